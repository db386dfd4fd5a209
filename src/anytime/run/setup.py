"""What all requests of a runner share, and how an `Answer` is made from a prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from anytime.checks import Inputs
from anytime.combine import Prediction
from anytime.conformal import ConformalSets
from anytime.errors import AnytimeError, OptionError
from anytime.policy import Policy
from anytime.run.answer import Answer, Reason
from anytime.run.budget import Budget
from anytime.run.combining import Combiner
from anytime.run.engines.base import Engine, Stages
from anytime.run.forks import never_forked
from anytime.run.timing.clock import Clock
from anytime.run.timing.forecast import Forecast


@dataclass(frozen=True, eq=False)
class RunSetup:
    """What all requests of a runner share. `begin` is the engine's, or one whose logits are in the combiner's format."""

    engine: Engine
    begin: Callable[[Inputs], Stages]
    combiner: Combiner
    forecast: Forecast
    clock: Clock
    policy: Policy | None = None
    sets: ConformalSets | None = None
    generator: torch.Generator | None = None
    prior: Tensor | None = None
    grace: float = 0.0
    resolution: float = 0.0

    @cached_property
    def queues_ahead(self) -> bool:
        """Whether stages may be queued before they are requested: a policy decides after each one."""
        return self.policy is None and self.resolution > 0 and bool(getattr(self.engine, "queues_ahead", False))

    @cached_property
    def reads_modes(self) -> bool:
        """Whether stages depend on the modes of torch around a request, such as autocast."""
        return bool(getattr(self.engine, "reads_modes", True))

    @property
    def joins(self) -> bool:
        """Whether runs of different requests can share a batch."""
        return bool(getattr(self.engine, "joins", False))

    @property
    def merges(self) -> bool:
        """Whether runs that began in different batches are worth joining."""
        return bool(getattr(self.engine, "merges", True))

    def predict(self, outputs: Sequence[Any]) -> Any:
        """The combined prediction after these outputs of the first exits."""
        return self.combiner.after(outputs, self.engine.num_exits)

    def predict_or_none(self, outputs: Sequence[Any]) -> Any:
        """As `predict` for the rows of several requests; None if one of them is invalid, so that each is combined alone."""
        try:
            return self.predict(outputs)
        except AnytimeError:
            return None

    @never_forked()
    def draw(self, batch: int) -> Tensor | None:
        """Random numbers for randomised prediction sets."""
        if self.sets is None or not self.sets.randomised:
            return None
        shape = batch, 1 if self.sets.shared else self.sets.exits
        return torch.rand(shape, generator=self.generator, dtype=torch.float32, device="cpu")

    @never_forked()
    def from_prior(self, batch: int) -> Prediction:
        """The prior for each input."""
        assert self.prior is not None
        log_probs = self.prior.log().expand(batch, -1).clone()
        return Prediction(log_probs, torch.zeros(batch, dtype=torch.bool))

    def answer(
        self,
        prediction: Any,
        exit: int | Tensor,
        elapsed: float,
        budget: Budget,
        reason: Reason | None,
        macs: Sequence[float] | None,
        source: int | Tensor,
        uniform: Tensor | None,
        outputs: Sequence[Any] = (),
    ) -> Answer:
        """The answer for a prediction at an exit, or at one exit per input; `source` is the exit that it is from."""
        paid: float | Tensor | None = None
        if macs is not None:
            up_to = (0.0, *macs)
            paid = up_to[exit] if isinstance(exit, int) else torch.tensor(up_to, dtype=torch.float64)[exit]
        met = None if budget.time is None else elapsed <= budget.time + self.grace
        make_set = None if self.sets is None else partial(_members, self.sets, source, prediction, uniform)
        return Answer(prediction, exit, self.engine.num_exits, elapsed, met, reason, paid, make_set, tuple(outputs))


def _members(sets: ConformalSets, source: int | Tensor, prediction: Prediction, uniform: Tensor | None) -> Tensor:
    """The prediction sets of inputs whose predictions are from these exits, counted from 1; all classes for the prior, 0."""
    exits = torch.full((len(prediction.log_probs),), source) if isinstance(source, int) else source
    members = torch.ones(prediction.log_probs.shape, dtype=torch.bool)
    for exit in sorted(set(exits.tolist()) - {0}):
        rows = exits == exit
        draw = None if uniform is None else uniform[rows, 0 if sets.shared else exit - 1]
        members[rows] = sets.set_at(exit, prediction.log_probs[rows], draw)
    return members


def limit_exits(budget: Budget, exits: int, macs: tuple[float, ...] | None) -> int:
    """How many exits the budget allows, apart from time."""
    limit = exits if budget.exits is None else min(budget.exits, exits)
    if budget.macs is not None:
        assert macs is not None  # the runner has measured them
        affordable = sum(each <= budget.macs for each in macs)
        if affordable == 0:
            raise OptionError(
                f"a budget of {budget.macs:g} MACs",
                expected=f"at least {math.ceil(macs[0])}, the MACs of the first exit",
                fix=f"allow {math.ceil(macs[0])} MACs or more (Budget(macs=...), --macs), or use a smaller network",
            )
        limit = min(limit, affordable)
    if budget.min_exits is not None and budget.min_exits > limit:
        raise OptionError(
            f"min_exits is {budget.min_exits}",
            expected=f"at most {limit}: the exits of the model, and what the budget's exits and MACs allow",
            fix="ask for fewer exits, or allow more",
        )
    return limit
