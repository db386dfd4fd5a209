"""The interface of engines: a model prepared to run stage by stage on some backend."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from anytime.checks import Inputs


class Ahead(NamedTuple):
    """What may be computed before it is requested: stages that follow without another decision, if nothing intervenes.

    Attributes:
        stages: How many stages may follow the next one.
        seconds: From now on, within which they must end to be of use.
        resolution: For how many seconds they may go on after the next stage, if they are not needed after all.
    """

    stages: int = 0
    seconds: float = 0.0
    resolution: float = 0.0


NOTHING = Ahead()
"""Every stage starts when it is requested."""


class Stages(Protocol):
    """One batch of inputs on its way through the stages. Used by one thread at a time."""

    def advance(self) -> Tensor:
        """Run the next stage; its logits, `(batch, classes)`, float32, on the CPU, without gradients, never overwritten."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows of the batch only, in this order."""
        ...

    def close(self) -> None:
        """Release all memory; the remaining stages are never run."""
        ...


class Engine(Protocol):
    """Makes `Stages` from inputs. Several may be open at once; threads take turns."""

    @property
    def name(self) -> str:
        """The backend, such as `eager` or `onnxruntime`."""
        ...

    @property
    def num_exits(self) -> int:
        """The number of exits."""
        ...

    def begin(self, x: Inputs) -> Stages:
        """Take inputs, a tensor or a tuple or dict of tensors with the batch first; nothing is computed yet."""
        ...
