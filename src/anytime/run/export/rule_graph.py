"""A rule's answers as ONNX Runtime graphs, one for each number of exits.

A rule is a dozen small tensor functions, each of which is slow when a network has just filled the caches. One call of a graph
takes half of that time. Tracing records one branch of a rule, so only rules made of this library's own parts are traced: their
branches depend on values only to skip unnecessary work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anytime.combine import Prediction, Rule, State
from anytime.run.combining import ByRule
from anytime.run.engines.onnx import Free, make_session, traced
from anytime.run.export.rule_step import Exportable, is_own, typical_states

_TOLERANCE = 1e-5
_OUTPUTS = ["log_probs", "fell_back", "labels", "sum"]


class ByGraph(ByRule):
    """A rule over distributions that is evaluated by graphs; made and compared with the rule by `by_graph`.

    Logits are NumPy arrays, as returned by `OnnxRuntimeEngine.begin_arrays`.

    Args:
        rule: The rule.
        sessions: The graph for one exit, for two, and so on.
    """

    def __init__(self, rule: Rule[Any], sessions: Sequence[Any]) -> None:
        super().__init__(rule)
        self._sessions, self._names = sessions, _names(len(sessions))
        self.why = "ONNX Runtime graphs"

    def step(self, state: Any, logits: Any) -> tuple[State, Prediction]:
        """Take the logits of the next exit, `(batch, classes)`."""
        return super().step(state, torch.from_numpy(logits))

    def after(self, logits: Sequence[Any], exits: int) -> Prediction:
        """The answer after these of `exits` exits, equal to stepping over them."""
        if not self.unchecked:
            *outputs, total = self._sessions[len(logits) - 1].run(_OUTPUTS, dict(zip(self._names, logits, strict=False)))
            if math.isfinite(total):  # else the rule reports what is wrong, or works where only the sum overflows
                log_probs, fell_back, labels = map(torch.from_numpy, outputs)
                return Prediction(log_probs, fell_back, labels)
        return super().after([torch.from_numpy(now) for now in logits], exits)


def by_graph(rule: Rule[Any], exits: int, classes: int) -> ByRule:
    """A rule as graphs, or evaluated by torch if it cannot be written so; `why` gives the reason."""
    plain = ByRule(rule)
    if not is_own(rule):
        plain.why = f"torch: {type(rule).__name__}, or a part of it, is not a rule of this library"
        return plain
    rows = [logits for logits, _ in typical_states(rule, exits=exits, classes=classes)]
    try:
        graphs = ByGraph(rule, [make_session(_file(rule, rows[:seen], exits)) for seen in range(1, exits + 1)])
        if not _agree(graphs, plain, rows):
            plain.why = f"torch: the graphs of {rule!r} return other values"
            return plain
    except Exception as error:  # exporters and runtimes raise errors of many types; the rule itself works
        plain.why = f"torch: {rule!r} cannot be exported: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return plain
    graphs.unchecked = True  # the first batch of the model has yet to be checked
    return graphs


class _After(nn.Module):
    """A rule's answer as a function of the logits so far, and their sum, which is finite if they are."""

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
    sizes: dict[str, Free] = {name: {0: "batch"} for name in (*names, *_OUTPUTS[:-1])}
    return traced(_After(rule, exits, logits[0].shape[1]), tuple(logits), names, _OUTPUTS, sizes)


def _names(exits: int) -> list[str]:
    return [f"logits_{exit}" for exit in range(exits)]


def _agree(graphs: ByGraph, plain: ByRule, rows: Sequence[Tensor]) -> bool:
    """Whether both return the same, for one row and for all of them."""
    for seen in range(1, len(rows) + 1):
        for count in (1, len(rows[0])):
            logits = [now[:count] for now in rows[:seen]]
            found, wanted = graphs.after([now.numpy() for now in logits], len(rows)), plain.after(logits, len(rows))
            same = torch.allclose(found.log_probs, wanted.log_probs, rtol=_TOLERANCE, atol=_TOLERANCE)
            if not (same and torch.equal(found.fell_back, wanted.fell_back) and torch.equal(found.labels, wanted.labels)):
                return False
    return True
