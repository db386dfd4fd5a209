"""The folded engine: torch on a copy of the model with folded batch norms and channels-last images."""

from __future__ import annotations

import torch
from torch import Tensor

from anytime.models.base import StagedModel
from anytime.run.engines import folding
from anytime.run.engines.eager import EagerEngine
from anytime.run.engines.running import device_of


class FoldedEngine(EagerEngine):
    """Runs a copy of a staged model in float32; the model itself stays as it is and may be trained on.

    Args:
        model: A staged torch module.
        example: Inputs to find and check the folding with.
    """

    name = "folded"
    TOLERANCE = folding.TOLERANCE
    """How far its logits may lie from the model's, relative to the largest of an exit."""

    def __init__(self, model: StagedModel, example: Tensor) -> None:
        copy = folding.folded_copy(model, example).to(device_of(model))
        if example.ndim == 4:
            copy.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        assert isinstance(copy, StagedModel)
        super().__init__(copy)

    def _prepared(self, x: Tensor) -> Tensor:
        moved = x.to(self.device, torch.float32) if x.is_floating_point() else x.to(self.device)
        return moved.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else moved
