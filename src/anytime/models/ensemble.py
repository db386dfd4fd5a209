"""Deep ensembles as models with exits.

`Ensemble` runs its members one after the other: member i is exit i, and a rule combines them (appendix B.6 of the paper).
`AveragedEnsemble` runs members with exits in parallel and averages their softmaxes at each exit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from anytime.checks import Inputs, check_logits
from anytime.errors import OptionError, ShapeError, StateError
from anytime.models.attach.probe import call, check_example, logits_of
from anytime.models.base import Carry, ExitModel, MultiExit
from anytime.models.input_spec import input_specs


class Ensemble(MultiExit):
    """One exit per member, in the given order; a member runs when its exit is requested.

    Args:
        members: Modules that return logits. Of a member with exits, the last exit is used.
        example: A batch, for members that take a tuple of tensors, by position, or a dict, by name. Attached exits know their
            inputs.

    Example:
        >>> Ensemble([nn.Linear(4, 3), nn.Linear(4, 3)])(torch.randn(5, 4)).shape
        torch.Size([2, 5, 3])
    """

    def __init__(self, members: Sequence[nn.Module], *, example: Inputs | None = None) -> None:
        super().__init__()
        self.members = nn.ModuleList(_checked(members))
        self.num_exits = len(self.members)
        known = [member.input_specs for member in self.members if isinstance(member, MultiExit) and member.input_specs]
        self.input_specs = known[0] if known and example is None else ()
        if example is not None:
            self.input_specs = input_specs(check_example(example))
        self.input_names = tuple(spec.name for spec in self.input_specs if spec.name)

    @classmethod
    def averaged(cls, members: Sequence[MultiExit]) -> AveragedEnsemble:
        """Average the members at each of their exits."""
        return AveragedEnsemble(members)

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run one member; all members read the input."""
        if len(carry) > 1 and not self.input_specs:
            raise ShapeError(
                f"{len(carry)} tensors of inputs",
                expected="one, or an ensemble that was made with an example of them",
                fix="pass the inputs as an example: Ensemble(members, example=x)",
            )
        self._check_carry(exit, carry)
        return carry if exit + 1 < self.num_exits else (), _last(self.members[exit], self._inputs(carry))

    def carry_size(self, exit: int) -> int:
        """The inputs, which all members read."""
        return max(1, len(self.input_specs))


class AveragedEnsemble(MultiExit):
    """Members with exits, averaged: exit m returns the logarithm of the mean of the members' softmaxes at exit m.

    These are log-probabilities. A ReLU product refuses them, because it reads the sign of a logit. Use `Ensemble`, or a rule
    that only reads differences of logits: `Latest`, `Caching` or `Product(Exponential())`.

    Args:
        members: Models with the same number of exits.
    """

    def __init__(self, members: Sequence[MultiExit]) -> None:
        super().__init__()
        counts = [getattr(member, "num_exits", None) for member in _checked(members)]
        if not isinstance(counts[0], int) or any(count != counts[0] for count in counts):
            raise OptionError(
                f"the members have {', '.join('no' if count is None else str(count) for count in counts)} exits",
                expected="the same number of exits for all members",
                fix="use Ensemble(members), where each member is one exit",
            )
        self.members = nn.ModuleList(members)
        self.num_exits = counts[0]
        names = {tuple(getattr(member, "input_names", ())) for member in members}
        if len(names) > 1:
            raise OptionError(
                f"the members take {' or '.join(', '.join(each) or 'unnamed inputs' for each in sorted(names))}",
                expected="the same inputs for all members, in the same order",
                fix="attach the exits of all members with the same example",
            )
        self.input_names = names.pop()

    @property
    def staged(self) -> bool:
        """Whether all members can run stage by stage."""
        return super().staged and len(self._staged_members()) == len(self.members)

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run one stage of every member; their carries are concatenated."""
        members = self._staged_members()
        if len(members) < len(self.members):
            raise StateError(
                f"{len(self.members) - len(members)} of the members cannot run stage by stage",
                expected="members whose `staged` is true",
                fix="use exits(x)",
            )
        self._check_carry(exit, carry)
        left: list[Tensor] = []
        logits: list[Tensor] = []
        start = 0
        for member in members:
            size = member.carry_size(exit)
            kept, now = member.stage(exit, carry[start : start + size])
            left += kept
            logits.append(now)
            start += size if exit else 0  # all first stages read the same input
        return tuple(left), _log_mean(logits)

    def carry_size(self, exit: int) -> int:
        """The sum over the members."""
        sizes = [member.carry_size(exit) for member in self._staged_members()]
        return sum(sizes) if exit else max(sizes, default=1)

    def exits(self, x: Inputs) -> Iterator[Tensor]:
        """Yield log-probabilities, `(batch, classes)`; the members run alternately, exit by exit."""
        with ExitStack() as stack:
            runs = [iter(member.exits(x)) for member in self.members if isinstance(member, ExitModel)]
            for run in runs:
                stack.callback(getattr(run, "close", lambda: None))
            for _ in range(self.num_exits):
                yield _log_mean([next(run) for run in runs])

    def _staged_members(self) -> list[MultiExit]:
        return [member for member in self.members if isinstance(member, MultiExit) and member.staged]


def average_logits(members: Sequence[Any]) -> Tensor:
    """Average saved logits as `AveragedEnsemble` does: log-probabilities, `(exits, batch, classes)`.

    Args:
        members: The logits of each member, `(exits, batch, classes)`, for the same inputs in the same order.

    Example:
        >>> average_logits([torch.zeros(3, 5, 2), torch.ones(3, 5, 2)])[0, 0].exp()
        tensor([0.5000, 0.5000])
    """
    checked = [check_logits(logits, name=f"logits of member {number}") for number, logits in enumerate(members)]
    shapes = [tuple(logits.shape) for logits in checked]
    if not shapes or any(shape != shapes[0] for shape in shapes):
        raise ShapeError(
            f"the logits of the members have the shapes {', '.join(map(str, shapes))}" if shapes else "there are no members",
            expected="at least one member, and the same exits, inputs and classes for all",
            fix="save the logits of all members for the same inputs",
        )
    return _log_mean(checked)


def _checked(members: Sequence[nn.Module]) -> list[nn.Module]:
    found: list[Any] = list(members) if isinstance(members, Iterable) else [members]
    wrong = next((member for member in found if not isinstance(member, nn.Module)), None)
    if not found or wrong is not None or not isinstance(members, Iterable):
        raise OptionError(
            f"members contains a {type(wrong).__name__}" if found else "members is empty",
            expected="a list of at least one torch.nn.Module",
            fix="pass, e.g., Ensemble([first, second])",
        )
    return found


def _last(member: nn.Module, x: Inputs) -> Tensor:
    if not isinstance(member, ExitModel):
        return logits_of(call(member, x))
    *_, logits = member.exits(x)
    return logits


def _log_mean(logits: list[Tensor]) -> Tensor:
    classes = [each.shape[-1] for each in logits]
    if len(set(classes)) > 1:
        raise ShapeError(
            f"the members have {', '.join(map(str, classes))} classes",
            expected="the same classes for all members",
            fix="combine members that were trained for the same classes",
        )
    return torch.stack([each.log_softmax(-1) for each in logits]).logsumexp(0) - math.log(len(logits))
