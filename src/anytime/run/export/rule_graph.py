"""A rule's answers as graphs of ONNX Runtime, one for each number of exits.

A rule is a dozen small tensor functions, and each is slow when a network has just swept the caches. As one call they take half
of that time. Tracing sees one way through a rule, so only rules made of this library's own parts are traced: of these it is
known that nothing hangs on numbers but work that may be left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anytime.combine import Prediction, Rule, State
from anytime.run.combining import ByRule
from anytime.run.engines.onnx import Free, make_session, traced
from anytime.run.export.rule_step import Exportable, typical_states

_SAME = 1e-5
_GIVES = ["log_probs", "fell_back", "labels", "sum"]


class ByGraph(ByRule):
    """A rule over distributions whose answers come from graphs; `by_graph` makes one and compares it with the rule.

    Logits are NumPy arrays, as `OnnxRuntimeEngine.begin_arrays` gives them.

    Args:
        rule: The rule.
        sessions: What to run after one exit, after two, and so on.
    """

    def __init__(self, rule: Rule[Any], sessions: Sequence[Any]) -> None:
        super().__init__(rule)
        self._sessions, self._names = sessions, _names(len(sessions))

    def step(self, state: Any, logits: Any) -> tuple[State, Prediction]:
        """Take the logits of the next exit, `(batch, classes)`."""
        return super().step(state, torch.from_numpy(logits))

    def after(self, logits: Sequence[Any], exits: int) -> Prediction:
        """The answer after these of `exits` exits: what stepping over them gives."""
        if self.unchecked:
            return super().after([torch.from_numpy(now) for now in logits], exits)
        *gave, total = self._sessions[len(logits) - 1].run(_GIVES, dict(zip(self._names, logits, strict=False)))
        if not math.isfinite(total):  # the rule says what is wrong, or can do it where the sum is too large
            return super().after([torch.from_numpy(now) for now in logits], exits)
        return Prediction(*map(torch.from_numpy, gave))


def by_graph(rule: Rule[Any], exits: int, classes: int) -> ByRule:
    """A rule as graphs, or as it is where it cannot be written so.

    Args:
        rule: The rule.
        exits: Of the model.
        classes: Of the model.
    """
    plain = ByRule(rule)
    if not _is_ours(rule):
        return plain
    rows = [logits for logits, _ in typical_states(rule, exits=exits, classes=classes)]
    try:
        graphs = ByGraph(rule, [make_session(_file(rule, rows[:seen], exits)) for seen in range(1, exits + 1)])
        if not _agree(graphs, plain, rows):
            return plain
        graphs.unchecked = True  # the first batch of the model is still to come
        return graphs
    except Exception:  # whatever an exporter or a runtime stumbles over, the rule itself does not
        return plain


def _is_ours(part: Any) -> bool:
    """Whether a rule, and every rule and activation in it, is this library's own."""
    if not is_dataclass(part):
        return isinstance(part, int | float | str | tuple | None)
    known = type(part).__module__.startswith(f"{__package__.partition('.')[0]}.")
    return known and all(_is_ours(getattr(part, field.name)) for field in fields(part))


class _After(nn.Module):
    """A rule's answer as a function of the logits so far, and their sum, which is finite where they are."""

    def __init__(self, rule: Rule[Any], exits: int, classes: int) -> None:
        super().__init__()
        self.rule, self.exits, self.classes = rule, exits, classes
        self.eval()

    def forward(self, *logits: Tensor) -> tuple[Tensor, ...]:
        rows = torch.cat(logits)
        with Exportable():
            prediction = self.rule.after(rows.view(len(logits), -1, self.classes), self.exits)
        return prediction.log_probs, prediction.fell_back, prediction.labels, rows.sum()


def _file(rule: Rule[Any], logits: Sequence[Tensor], exits: int) -> bytes:
    names = _names(len(logits))
    sizes: dict[str, Free] = {name: {0: "batch"} for name in (*names, *_GIVES[:-1])}
    return traced(_After(rule, exits, logits[0].shape[1]), tuple(logits), names, _GIVES, sizes)


def _names(exits: int) -> list[str]:
    return [f"logits_{exit}" for exit in range(exits)]


def _agree(graphs: ByGraph, plain: ByRule, rows: Sequence[Tensor]) -> bool:
    """Whether both give the same, for one row and for all of them."""
    for seen in range(1, len(rows) + 1):
        for count in (1, len(rows[0])):
            logits = [now[:count] for now in rows[:seen]]
            found, wanted = graphs.after([now.numpy() for now in logits], len(rows)), plain.after(logits, len(rows))
            same = torch.allclose(found.log_probs, wanted.log_probs, rtol=_SAME, atol=_SAME)
            if not (same and torch.equal(found.fell_back, wanted.fell_back) and torch.equal(found.labels, wanted.labels)):
                return False
    return True
