"""What a model with exits is.

Anything with `num_exits` and `exits(x)` works everywhere in this library. `MultiExit` is the base of the networks that
ship with it. Most of them can be run stage by stage as well: `stage` is a function of tensors alone, so that a stage can be
exported or captured by itself, and inputs that are done can be dropped between two stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from anytime.errors import ShapeError, StateError

Carry = tuple[Tensor, ...]
"""What goes from one stage to the next; every tensor has the batch first: `tuple(t[rows] for t in carry)` drops rows."""


@runtime_checkable
class ExitModel(Protocol):
    """Anything that answers exit by exit."""

    @property
    def num_exits(self) -> int:
        """How many exits there are."""
        ...

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the logits of each exit, `(batch, classes)`; what is not asked for is not computed."""
        ...


@runtime_checkable
class StagedModel(ExitModel, Protocol):
    """An `ExitModel` that can be run stage by stage; `is_staged` says whether a model is one."""

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run one stage on what the one before left; see `MultiExit.stage`."""
        ...


def is_staged(model: object) -> TypeGuard[StagedModel]:
    """Whether `stage` of a model can be used: it is there, and `staged`, where there is such an attribute, is true.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> is_staged(MLP(MLPConfig(classes=4))), is_staged(nn.Linear(2, 4))
        (True, False)
    """
    return isinstance(model, StagedModel) and bool(getattr(model, "staged", True))


class MultiExit(nn.Module):
    """A network with exits: subclasses give `num_exits` and either `stage`, from which `exits` follows, or `exits`.

    Example:
        >>> class Halves(MultiExit):
        ...     num_exits = 3
        ...
        ...     def stage(self, exit, carry):
        ...         (x,) = carry
        ...         return ((x / 2,) if exit < 2 else ()), x
        >>> [logits.tolist() for logits in Halves().exits(torch.ones(1, 2))]
        [[[1.0, 1.0]], [[0.5, 0.5]], [[0.25, 0.25]]]
    """

    num_exits: int

    @property
    def staged(self) -> bool:
        """Whether `stage` can be used. Not so where a subclass gives `exits` alone: it might not do what `stage` does."""
        definers = {name: next(kind for kind in type(self).__mro__ if name in vars(kind)) for name in ("stage", "exits")}
        return definers["stage"] is not MultiExit and issubclass(definers["stage"], definers["exits"])

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run stage `exit` (from 0) on what the stage before left, `(x,)` for the first.

        What it is given stays as it is, and all that later stages need is in what it gives: the next one can be run at any
        time, more than once, and on some of the rows only.

        Args:
            exit: Which stage.
            carry: What stage `exit - 1` gave, or some rows of it.

        Returns:
            What the next stage needs, nothing (`()`) after the last, and the logits, `(batch, classes)`.
        """
        raise StateError(
            f"stage {exit} of a {type(self).__name__} was asked for, which only gives exits(x)",
            expected="a model whose `staged` is true",
            fix="use exits(x), or give the class a method stage(exit, carry)",
        )

    def carry_size(self, exit: int) -> int:
        """How many tensors stage `exit` is given: one, unless a subclass says otherwise."""
        return 1

    def free_sizes(self, exit: int) -> tuple[dict[int, str], ...]:
        """Which dimensions besides the batch may differ from input to input, by a name for each, of what a stage is given.

        None, unless a subclass says otherwise. `({1: "length"},)` is a tensor `(batch, length, ...)` of any length.
        """
        return tuple({} for _ in range(self.carry_size(exit)))

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the logits of each exit, `(batch, classes)`; stages after the last asked-for exit are not computed."""
        carry: Carry = (x,)
        for exit in range(self.num_exits):
            carry, logits = self.stage(exit, carry)
            yield logits

    def forward(self, x: Tensor) -> Tensor:
        """The logits of all exits, `(exits, batch, classes)`."""
        return torch.stack(tuple(self.exits(x)))

    def _check_carry(self, exit: int, carry: Carry) -> None:
        if not 0 <= exit < self.num_exits:
            raise StateError(
                f"stage {exit} was asked for",
                expected=f"a stage from 0 to {self.num_exits - 1}, one an exit",
                fix="count stages from 0, and stop after the last",
            )
        if len(carry) != self.carry_size(exit):
            raise ShapeError(
                f"stage {exit} was given {len(carry)} tensors",
                expected=f"{self.carry_size(exit)}, as stage {exit - 1} leaves them" if exit else "the input alone, (x,)",
                fix="pass on what the stage before gave, in its order",
            )
