"""What an engine is: a model made ready to be run stage by stage on some machinery."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Stages(Protocol):
    """One input, or batch of inputs, on its way through the stages. Used by one thread at a time."""

    def advance(self) -> Tensor:
        """Run the next stage; its logits, `(batch, classes)`, float32, on the CPU, without gradients. They stay as they are."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of the batch only, in this order."""
        ...

    def close(self) -> None:
        """Let go of everything; stages that were not asked for are never run."""
        ...


class Engine(Protocol):
    """Makes `Stages` from inputs. Several may be open at once; threads take turns."""

    @property
    def name(self) -> str:
        """Which machinery it is, such as `eager` or `onnxruntime`."""
        ...

    @property
    def num_exits(self) -> int:
        """How many exits there are."""
        ...

    def begin(self, x: Tensor) -> Stages:
        """Take inputs, batch first; nothing is computed yet."""
        ...
