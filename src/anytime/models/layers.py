"""Layers of transformers that compute in the dtype of their weights.

In mixed precision some weights are bfloat16 and others float32; inputs are converted.
"""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer in the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class LayerNorm(nn.LayerNorm):
    """A layer norm in the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def mlp(width_in: int, hidden: int, width_out: int) -> nn.Sequential:
    """Linear, GELU, linear."""
    return nn.Sequential(Linear(width_in, hidden), nn.GELU(), Linear(hidden, width_out))


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of the tokens of a mask: `(batch, tokens, width)` and `(batch, tokens)` to `(batch, width)`; 0 without tokens.

    >>> import torch
    >>> token_mean(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
    tensor([[2.]])
    """
    weights = mask / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (x * weights[..., None].to(x.dtype)).sum(dim=1)


def multi_head(qkv: Tensor, heads: int) -> Tensor:
    """Split the output of a joint projection: `(batch, tokens, 3 · width)` to `(3, batch, heads, tokens, width / heads)`."""
    batch, tokens, width = qkv.shape
    return qkv.view(batch, tokens, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
