"""Layers of transformers that compute in the number format of their weights.

In mixed precision some weights are in bfloat16 and others are not; maps that come in another format are converted.
"""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer in the format of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class LayerNorm(nn.LayerNorm):
    """A layer norm in the format of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))
