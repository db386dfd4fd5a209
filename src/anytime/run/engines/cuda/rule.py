"""A rule's step beside each stage on the GPU, so that nothing is left to compute on the CPU.

What a stage returns then has more columns than its logits: the log-probabilities of the rule, whether it fell back, the label,
which is taken before normalising as on the CPU, and the sum of all logits so far, which is finite if they are. The state of the
rule becomes part of the carry, so that runs join, split and drop rows as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anytime.combine import Prediction, Rule, State
from anytime.models.base import Carry
from anytime.run.combining import ByRule
from anytime.run.export.rule_step import Exportable, filled, flat, is_own, typical_states

if TYPE_CHECKING:
    from anytime.run.engines.cuda.recording import CudaGraphs, Step

_TOLERANCE = 1e-4
"""Of log-probabilities: a GPU adds in another order, and rounds logarithms otherwise."""


class RuleColumns:
    """The steps of a rule as functions of tensors, which return all columns.

    Args:
        rule: The rule.
        exits: The number of exits.
        classes: The number of classes.
    """

    def __init__(self, rule: Rule[Any], exits: int, classes: int) -> None:
        self.rule, self.classes = rule, classes
        self._states = [state for _, state in typical_states(rule, exits=exits, classes=classes)]
        self._tensors = [len(flat(state)) + (exit > 0) for exit, state in enumerate(self._states)]

    def step(self, exit: int, logits: Tensor, state: Carry) -> tuple[Carry, Tensor]:
        """The state after an exit, `()` after the last, and the columns of the answer, `(batch, 2 * classes + 3)`."""
        logits = logits.float()
        total = logits.sum(-1, keepdim=True)
        if exit:
            *state, before = state  # type: ignore[assignment]
            total = total + before
        with Exportable():  # no condition on values: a graph is the same for all of them
            after, answer = self.rule._update(filled(self._states[exit], iter(state)), logits)
        flags = (answer.fell_back[:, None].float(), answer.labels[:, None].float(), total)
        columns = torch.cat((logits, answer.log_probs.float(), *flags), 1)
        return () if exit + 1 == len(self._states) else (*flat(after).values(), total), columns

    def after_stage(self, exit: int, carry: Carry, stage: Step) -> tuple[Carry, Tensor]:
        """Run a stage and the step without a graph."""
        own = len(carry) - self._tensors[exit]
        left, logits = stage(carry[:own])
        state, columns = self.step(exit, logits, carry[own:])
        return (*left, *state), columns


class ByColumns(ByRule):
    """Reads the answer of a rule from columns.

    Args:
        rule: The rule.
        classes: The number of classes.
    """

    def __init__(self, rule: Rule[Any], classes: int) -> None:
        super().__init__(rule)
        self._classes, self.why = classes, "CUDA graphs"

    def step(self, state: Any, logits: Tensor) -> tuple[State, Prediction]:
        """Take the columns of the next exit."""
        return super().step(state, logits[:, : self._classes])

    def after(self, logits: Sequence[Tensor], exits: int) -> Prediction:
        """The answer after these of `exits` exits: the columns of the last."""
        classes, last = self._classes, logits[-1]
        if not self.unchecked:
            # Lists, since every small operation of torch costs a microsecond or two of the caller's time.
            fell_back, labels, totals = zip(*last[:, 2 * classes :].tolist(), strict=True)
            if math.isfinite(sum(totals)):
                flags = torch.tensor(fell_back, dtype=torch.bool), torch.tensor(labels, dtype=torch.long)
                return Prediction(last[:, classes : 2 * classes], *flags)
        # The first batch of the model has yet to be checked; and the rule reports what is wrong with logits, and where.
        return super().after([each[:, :classes] for each in logits], exits)


def make_columns(rule: Rule[Any], exits: int, classes: int, recorder: CudaGraphs) -> tuple[RuleColumns | None, str]:
    """The rule as columns if it can be recorded and gives the same answers as on the CPU; else None and the reason."""
    if not is_own(rule):
        return None, f"the rule is left out: {type(rule).__name__}, or a part of it, is not a rule of this library"
    try:
        rows = torch.stack([logits for logits, _ in typical_states(rule, exits=exits, classes=classes)])
        columns = RuleColumns(rule, exits, classes)
        with torch.inference_mode(), recorder.queue():
            given = rows.transpose(0, 1).to(recorder.device)  # the batch first
            stages: list[Callable[[Carry], tuple[Carry, Tensor]]] = [partial(_logits_at, exit) for exit in range(exits)]
            recorded = recorder.record(stages, (given,), columns)
            for stage in recorded:
                stage.start()
        recorded[-1].wait()
        combiner = ByColumns(rule, classes)
        combiner.unchecked = False
        for exit, stage in enumerate(recorded):
            found, wanted = combiner.after([stage.result], exits), rule.after(rows[: exit + 1], exits)
            same = torch.allclose(found.log_probs, wanted.log_probs, rtol=_TOLERANCE, atol=_TOLERANCE)
            if not (same and torch.equal(found.fell_back, wanted.fell_back) and torch.equal(found.labels, wanted.labels)):
                return None, f"the rule is left out: on the GPU {rule!r} returns other values"
    except Exception as error:  # operations that cannot be captured raise errors of many types; the rule itself works
        return None, f"the rule is left out: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return columns, "the rule is part of the graphs"


def _logits_at(exit: int, carry: Carry) -> tuple[Carry, Tensor]:
    return carry, carry[0][:, exit].clone()  # a graph without work raises a warning
