"""What a model with exits is.

Anything with `num_exits` and `exits(x)` works everywhere in this library. `MultiExit` is the base of the networks that
ship with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


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


class MultiExit(nn.Module, ABC):
    """A network with exits: subclasses give `num_exits` and the generator `exits`."""

    num_exits: int

    @abstractmethod
    def exits(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the logits of each exit, `(batch, classes)`; stages after the last asked-for exit are not computed."""

    def forward(self, x: Tensor) -> Tensor:
        """The logits of all exits, `(exits, batch, classes)`."""
        return torch.stack(tuple(self.exits(x)))
