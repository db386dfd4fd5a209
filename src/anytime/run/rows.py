"""Early stopping per input: the answer of each input of a batch, and which inputs are still running.

The answers are those of `anytime.policy.run_batch`, but known after every exit, so that the batch can be interrupted: an input
that is still running then has the answer of its latest exit (or of its most confident one, if the policy says so).
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
    """The answers after some exit, never changed afterwards. Every tensor has the batch first.

    Attributes:
        prediction: The answers.
        exit: How many exits were computed for each input.
        source: The exit of its answer, counted from 0.
    """

    prediction: Prediction
    exit: Tensor
    source: Tensor


class RowStopping:
    """The inputs of one batch under a policy.

    Args:
        policy: Decides when an input stops.
        batch: The number of inputs.
        exits: The number of exits.
    """

    def __init__(self, policy: Policy, batch: int, exits: int) -> None:
        self._policy, self._exits = policy, exits
        self._most_confident = policy.otherwise == "surest"
        self._memory = policy.start(batch)
        self._rows = torch.arange(batch)  # the input of each row of the running batch
        self._going = torch.ones(batch, dtype=torch.bool)
        self._best = torch.full((batch,), -torch.inf, dtype=torch.float64)
        self._answers: RowAnswers | None = None

    @property
    def running(self) -> int:
        """The number of rows of the running batch."""
        return len(self._rows)

    def take(self, exit: int, now: Prediction) -> tuple[RowAnswers, Tensor | None, bool]:
        """Take the running batch's answers at one exit, from 0.

        Returns:
            The answers of all inputs; the rows to continue with, if dropping the others pays off; whether any input is left.
        """
        self._memory, passed = self._policy.stop(self._memory, exit, now)
        taken = self._going
        if self._most_confident:
            confidence = now.log_odds.double()
            last = exit + 1 == self._exits
            taken = self._going & ((passed & (not last)) | (confidence > self._best[self._rows]))
            self._best[self._rows] = torch.maximum(confidence, self._best[self._rows])
        answers = self._write(exit, now, taken)
        self._going = self._going & ~passed
        left = int(self._going.sum())
        keep = None
        if 0 < left < len(self._going) and left <= BREAK_EVEN * len(self._going):
            keep = self._going.nonzero()[:, 0]
            self._memory = tuple(part[keep] for part in self._memory)
            self._rows, self._going = self._rows[keep], self._going[keep]
        return answers, keep, left > 0

    def _write(self, exit: int, now: Prediction, taken: Tensor) -> RowAnswers:
        """Copies of the answers with the taken rows written; the old tensors stay unchanged for their holders."""
        before, place, going = self._answers, self._rows[taken], self._rows[self._going]
        if before is None:
            nothing = torch.zeros(len(self._going), dtype=torch.int64)
            before = RowAnswers(now, nothing, nothing)
        answers = before.prediction.clone()
        used, source = before.exit.clone(), before.source.clone()
        answers.put(place, now.at(taken))
        used[going], source[place] = exit + 1, exit
        self._answers = RowAnswers(answers, used, source)
        return self._answers
