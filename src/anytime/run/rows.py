"""A batch whose inputs stop one by one: what each was answered, and which are still running.

The answers are those of `anytime.policy.run_batch`, but known after every exit, so that the batch can be interrupted: an input
that is still running then has the answer of its latest exit (or of its surest, where the policy says so).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anytime.combine import Prediction
from anytime.policy import Policy
from anytime.policy.compact import BREAK_EVEN


@dataclass(frozen=True, eq=False)
class RowAnswers:
    """The answers after some exit; nobody changes them afterwards. Every tensor has the batch first.

    Attributes:
        prediction: The answers.
        exit: How many exits were computed for each input.
        source: The exit that its answer is from, counted from 0.
    """

    prediction: Prediction
    exit: Tensor
    source: Tensor


class Rows:
    """The inputs of one batch under a policy.

    Args:
        policy: When an input stops.
        batch: How many inputs there are.
        exits: How many exits there are.
    """

    def __init__(self, policy: Policy, batch: int, exits: int) -> None:
        self._policy, self._exits = policy, exits
        self._surest = policy.otherwise == "surest"
        self._memory = policy.start(batch)
        self._rows = torch.arange(batch)  # which input each row of the running batch is
        self._going = torch.ones(batch, dtype=torch.bool)
        self._best = torch.full((batch,), -torch.inf, dtype=torch.float64)
        self._answers: RowAnswers | None = None

    @property
    def running(self) -> int:
        """How many rows the running batch has."""
        return len(self._rows)

    def take(self, exit: int, now: Prediction) -> tuple[RowAnswers, Tensor | None, bool]:
        """Take the running batch's answers at one exit, from 0.

        Returns:
            The answers of all inputs; the rows to go on with, where it pays to drop the others; and whether any input is left.
        """
        self._memory, passed = self._policy.stop(self._memory, exit, now)
        taken = self._going
        if self._surest:
            sure = now.log_odds.double()
            last = exit + 1 == self._exits
            taken = self._going & ((passed & (not last)) | (sure > self._best[self._rows]))
            self._best[self._rows] = torch.maximum(sure, self._best[self._rows])
        answers = self._put(exit, now, taken)
        self._going = self._going & ~passed
        left = int(self._going.sum())
        keep = None
        if 0 < left < len(self._going) and left <= BREAK_EVEN * len(self._going):
            keep = self._going.nonzero()[:, 0]
            self._memory = tuple(part[keep] for part in self._memory)
            self._rows, self._going = self._rows[keep], self._going[keep]
        return answers, keep, left > 0

    def _put(self, exit: int, now: Prediction, taken: Tensor) -> RowAnswers:
        """New tensors with the taken rows put in; whoever holds the old ones keeps them as they were."""
        before, place, going = self._answers, self._rows[taken], self._rows[self._going]
        if before is None:
            nothing = torch.zeros(len(self._going), dtype=torch.int64)
            before = RowAnswers(now, nothing, nothing)
        answers = before.prediction.clone()
        used, source = before.exit.clone(), before.source.clone()
        answers.write(place, now.at(taken))
        used[going], source[place] = exit + 1, exit
        self._answers = RowAnswers(answers, used, source)
        return self._answers
