"""The interface of a model with exits.

Anything with `num_exits` and `exits(x)` works everywhere in this library. Its own networks derive from `MultiExit`. Most of
them also run stage by stage: `stage` is a function of tensors, so a stage can be exported or captured in a CUDA graph, and
inputs that are done can be dropped between stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from anytime.checks.inputs import Inputs, tensors_of
from anytime.errors import InputError, OptionError, ShapeError, StateError
from anytime.models.input_spec import InputSpec

Carry = tuple[Tensor, ...]
"""The tensors that one stage passes to the next, all with the batch first: `tuple(t[rows] for t in carry)` drops rows."""


@runtime_checkable
class ExitModel(Protocol):
    """A model that yields one prediction per exit."""

    @property
    def num_exits(self) -> int:
        """The number of exits."""
        ...

    def exits(self, x: Any) -> Iterator[Tensor]:
        """Yield the logits of each exit, `(batch, classes)`, computed only when they are requested."""
        ...


@runtime_checkable
class StagedModel(ExitModel, Protocol):
    """An `ExitModel` that can run stage by stage; `is_staged` checks for one."""

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run one stage; see `MultiExit.stage`."""
        ...


def is_staged(model: object) -> TypeGuard[StagedModel]:
    """Whether a model can run stage by stage: it has `stage`, and its attribute `staged`, if there is one, is true.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> is_staged(MLP(MLPConfig(classes=4))), is_staged(nn.Linear(2, 4))
        (True, False)
    """
    return isinstance(model, StagedModel) and bool(getattr(model, "staged", True))


def check_network(model: Any) -> Any:
    """The model, if it is a torch module with exits."""
    if not isinstance(model, nn.Module) or not isinstance(model, ExitModel):
        raise OptionError(
            f"the model is a {type(model).__name__}" + (", without exits" if isinstance(model, nn.Module) else ""),
            expected="a torch module with num_exits and exits(x)",
            fix="add exits with anytime.attach_exits; for a module that returns the logits of all exits, wrap it with "
            "anytime.models.from_outputs",
        )
    return model


class MultiExit(nn.Module):
    """A network with exits. Subclasses set `num_exits` and define `stage` (then `exits` follows from it) or `exits`.

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
    input_names: tuple[str, ...] = ()
    """The names of the tensors of a dict of inputs, in the order in which the first stage takes them."""
    input_specs: tuple[InputSpec, ...] = ()
    """What the model takes, as far as an example of it was given."""

    @property
    def staged(self) -> bool:
        """Whether `stage` can be used: not if a subclass overrides only `exits`, which may then differ from `stage`."""
        definers = {name: next(kind for kind in type(self).__mro__ if name in vars(kind)) for name in ("stage", "exits")}
        return definers["stage"] is not MultiExit and issubclass(definers["stage"], definers["exits"])

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run one stage.

        A stage does not change its inputs, and its outputs are all that later stages need: the next stage can run at any time,
        more than once, and on some of the rows only.

        Args:
            exit: The index of the stage, from 0.
            carry: The tensors of the inputs for the first stage, `(x,)` if there is one; then what the previous stage
                returned, or some rows of it.

        Returns:
            The tensors for the next stage, `()` after the last, and the logits, `(batch, classes)`.
        """
        raise StateError(
            f"{type(self).__name__} does not define stage()",
            expected="a model whose `staged` is true",
            fix="use exits(x), or define stage(exit, carry) in the class",
        )

    def carry_size(self, exit: int) -> int:
        """The number of tensors that stage `exit` takes; by default the inputs for the first, and 1 for the others."""
        return 1 if exit else max(1, len(self.input_names))

    def free_sizes(self, exit: int) -> tuple[dict[int, str], ...]:
        """For each tensor of a carry, the dimensions besides the batch that vary between inputs, with their names.

        By default none do. `({1: "length"},)` means a tensor `(batch, length, ...)` of any length.
        """
        return tuple({} for _ in range(self.carry_size(exit)))

    def exits(self, x: Inputs) -> Iterator[Tensor]:
        """Yield the logits of each exit, `(batch, classes)`; stages after the last requested exit are not computed."""
        carry: Carry = tensors_of(x, self.input_names)
        for exit in range(self.num_exits):
            carry, logits = self.stage(exit, carry)
            yield logits

    def forward(self, *x: Any, **named: Tensor) -> Tensor:
        """The logits of all exits, `(exits, batch, classes)`.

        Several tensors are passed as `exits` takes them, a tuple or a dict, or spread out: `model(left, right)` or
        `model(**tokens)`.
        """
        if bool(x) == bool(named):
            raise InputError(
                f"{len(x)} inputs by position" + (f" and {', '.join(named)} by name" if named else ""),
                expected="all inputs by position, or all by name",
                fix="pass a dict or a tuple of tensors: model({'input_ids': ids, 'attention_mask': mask})",
            )
        return torch.stack(tuple(self.exits(named or (x[0] if len(x) == 1 else x))))

    def _inputs(self, carry: Carry) -> Inputs:
        """The inputs in the carry of the first stage as the model takes them."""
        if self.input_names:
            return dict(zip(self.input_names, carry, strict=True))
        return carry if len(carry) > 1 else carry[0]

    def _check_carry(self, exit: int, carry: Carry) -> None:
        if not 0 <= exit < self.num_exits:
            raise StateError(
                f"stage({exit}, carry) is called on a model with {self.num_exits} exits",
                expected=f"a stage from 0 to {self.num_exits - 1}",
                fix="count stages from 0, and stop after the last",
            )
        if len(carry) != self.carry_size(exit):
            size = self.carry_size(exit)
            raise ShapeError(
                f"stage({exit}, carry) got {len(carry)} tensors" if exit else f"the model got {len(carry)} tensors",
                expected=f"the {size} tensors that stage {exit - 1} returns" if exit else f"{size}, the inputs of the model",
                fix="pass the first result of the previous stage unchanged"
                if exit
                else "pass the inputs as the model takes them; of a batch with several values the last one is the labels",
            )
