"""Deep ensembles as models with exits.

`Ensemble` runs its members one after the other: member i is exit i, and a rule over the exits combines them (appendix B.6 of
the paper). `AveragedEnsemble` runs members that have exits themselves side by side and averages their softmaxes at each exit.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing

import torch
from torch import Tensor, nn

from anytime.errors import OptionError
from anytime.models.base import ExitModel, MultiExit
from anytime.models.probe import logits_of


class Ensemble(MultiExit):
    """Members in the order given, one an exit; a member is run when its exit is asked for.

    Args:
        members: Modules that give logits. One with exits of its own takes part with its last.

    Example:
        >>> Ensemble([nn.Linear(4, 3), nn.Linear(4, 3)])(torch.randn(5, 4)).shape
        torch.Size([2, 5, 3])
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(_checked(members))
        self.num_exits = len(self.members)

    @classmethod
    def averaged(cls, members: Sequence[MultiExit]) -> AveragedEnsemble:
        """The members side by side, averaged at each of their exits."""
        return AveragedEnsemble(members)

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the logits of each member, `(batch, classes)`."""
        for member in self.members:
            yield _last(member, x)


class AveragedEnsemble(MultiExit):
    """Members with exits, averaged: exit m gives the logarithm of the mean of the members' softmaxes at exit m.

    Args:
        members: Models with the same number of exits.
    """

    def __init__(self, members: Sequence[MultiExit]) -> None:
        super().__init__()
        counts = [getattr(member, "num_exits", None) for member in _checked(members)]
        if not isinstance(counts[0], int) or any(count != counts[0] for count in counts):
            raise OptionError(
                f"the members have {', '.join(str(count) for count in counts)} exits",
                expected="the same number of exits for all",
                fix="use Ensemble(members), where each member is an exit",
            )
        self.members = nn.ModuleList(members)
        self.num_exits = counts[0]

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        """Yield log-probabilities, `(batch, classes)`, which serve as logits; the members take turns, exit by exit."""
        with ExitStack() as stack:
            runs = [stack.enter_context(closing(_exits(member, x))) for member in self.members]
            for _ in range(self.num_exits):
                yield _log_mean([next(run) for run in runs])


def _checked(members: Sequence[nn.Module]) -> Sequence[nn.Module]:
    wrong = [member for member in members if not isinstance(member, nn.Module)]
    if not members or wrong:
        raise OptionError(
            f"members hold a {type(wrong[0]).__name__}" if wrong else "there are no members",
            expected="at least one torch module",
            fix="Ensemble([first, second])",
        )
    return members


def _last(member: nn.Module, x: Tensor) -> Tensor:
    if not isinstance(member, ExitModel):
        return logits_of(member(x))
    *_, logits = member.exits(x)
    return logits


def _exits(member: nn.Module, x: Tensor) -> Generator[Tensor]:
    assert isinstance(member, ExitModel)
    yield from member.exits(x)


def _log_mean(logits: list[Tensor]) -> Tensor:
    return torch.stack([each.log_softmax(-1) for each in logits]).logsumexp(0) - math.log(len(logits))
