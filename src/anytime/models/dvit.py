"""DViT, the dynamic vision transformer of Wang et al. (2021) on T2T-ViT-12, one of the networks in the paper.

A cascade of transformers reads the same image, split into more and more tokens: 7², then 10², then 14². Each has its own
weights and its own head, which is an exit. A later transformer reuses the work of the one before: its blocks read the last
tokens of that one (feature reuse), and its attention logits are added to those of that one (relation reuse). Gradients flow
through both, so later exits train the earlier transformers too.

No operation depends on values, so a training step can be a CUDA graph. Linear layers and norms compute in the dtype of their
own weights, so a trainer may keep the former in bfloat16 and the latter in float32; the residual stream stays float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anytime.models.base import Carry, MultiExit
from anytime.models.config import check_config, check_heads, check_images, require
from anytime.models.layers import LayerNorm, Linear, mlp, multi_head

# Kernel, stride and padding of one split into overlapping tiles.
Unfold = tuple[int, int, int]
# What one transformer passes to the next: its last tokens before the final norm, and the attention logits of each layer.
Upstream = tuple[Tensor, list[Tensor]]

_LARGEST, _DEEPEST, _FINEST_GRID, _MOST_UNFOLDS = 1 << 16, 256, 256, 16


@dataclass(frozen=True)
class DViTConfig:
    """The shape of a DViT; the defaults are the published cascade of three T2T-ViT-12 for ImageNet.

    Attributes:
        classes: The number of classes.
        image_size: Height and width of the images.
        unfolds: For each transformer the splits from image to tokens, (kernel, stride, padding), with performers in between.
        width: Channels per token.
        depth: Blocks per transformer.
        heads: Attention heads per block.
        mlp_ratio: The ratio of the hidden width of a block's MLP to `width`.
        performer_width: Channels in the performers.
        random_features: Random features that approximate the softmax in a performer.
        reuse_hidden: Hidden channels of feature reuse.
        reuse_width: Channels of the reused features.
        relation_ratio: The ratio of the hidden channels of relation reuse to the number of attention maps.
        drop_path: The drop-path rate of the last block; it increases linearly from 0 in the first.
        performer_dropout: The dropout rate in the performers.
    """

    classes: int
    image_size: int = 224
    unfolds: tuple[tuple[Unfold, ...], ...] = (
        ((14, 8, 3), (3, 2, 1), (3, 2, 1)),
        ((11, 6, 5), (3, 2, 1), (3, 2, 1)),
        ((7, 4, 2), (3, 2, 1), (3, 2, 1)),
    )
    width: int = 256
    depth: int = 12
    heads: int = 4
    mlp_ratio: int = 2
    performer_width: int = 64
    random_features: int = 32
    reuse_hidden: int = 128
    reuse_width: int = 48
    relation_ratio: int = 3
    drop_path: float = 0.1
    performer_dropout: float = 0.1

    def __post_init__(self) -> None:
        rates = ("drop_path", "performer_dropout")
        counts = [field.name for field in fields(self) if field.name not in ("unfolds", *rates)]
        check_config(self, counts={**dict.fromkeys(counts, _LARGEST), "depth": _DEEPEST}, rates=rates)
        object.__setattr__(self, "unfolds", _check_unfolds(self.unfolds))
        grids = [sides[-1] for sides in self.sides]
        check_heads(self.width, self.heads, even=True)
        require(
            self.random_features <= self.performer_width,
            f"random_features is {self.random_features} with a performer_width of {self.performer_width}",
            expected="at most performer_width, because random features are orthogonal",
            fix="use performer_width // 2",
        )
        require(
            all(1 <= side <= _FINEST_GRID for sides in self.sides for side in sides),
            f"unfolds split an image of size {self.image_size} into grids of the sizes {self.sides}",
            expected=f"sizes from 1 to {_FINEST_GRID}",
            fix="change unfolds or image_size",
        )
        require(
            all(before < after <= 2 * before for before, after in pairwise(grids)),
            f"the tokens are on grids of the sizes {grids}",
            expected="each finer than the one before, at most by a factor of 2",
            fix="order unfolds from coarse to fine, or insert one in between",
        )

    @property
    def sides(self) -> tuple[tuple[int, ...], ...]:
        """The grid sizes after the splits of each transformer; the last of each is that of its tokens.

        >>> DViTConfig(classes=10).sides
        ((28, 14, 7), (38, 19, 10), (56, 28, 14))
        """
        networks = [[self.image_size] for _ in self.unfolds]
        for sides, unfolds in zip(networks, self.unfolds, strict=True):
            for kernel, stride, padding in unfolds:
                sides.append((sides[-1] + 2 * padding - kernel) // stride + 1)
        return tuple(tuple(sides[1:]) for sides in networks)


class _Performer(nn.Module):
    """One attention head with random features in place of the softmax: its cost is linear in the number of tokens.

    Maps `(batch, tokens, width_in)` to `(batch, tokens, performer_width)`. With φ(u) = exp(Wu − ‖u‖²/2)/√m, where the m rows of
    W are orthogonal with norm √m, token t attends to token s with the weight ⟨φ(q_t), φ(k_s)⟩.
    """

    def __init__(self, config: DViTConfig, width_in: int) -> None:
        super().__init__()
        width, features = config.performer_width, config.random_features
        self.norm = LayerNorm(width_in)
        self.kqv = Linear(width_in, 3 * width)
        self.project = Linear(width, width)
        self.mlp_norm = LayerNorm(width)
        self.mlp = mlp(width, width, width)
        self.dropout = nn.Dropout(config.performer_dropout)
        self.random_features: Tensor
        self.register_buffer("random_features", nn.init.orthogonal_(torch.empty(features, width)) * features**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        k, q, v = self.kqv(self.norm(tokens)).chunk(3, dim=-1)
        mixed = v + self.dropout(self.project(self._attend(k, q, v)))  # v, because the tokens have another width
        out: Tensor = mixed + self.dropout(self.mlp(self.mlp_norm(mixed)))
        return out

    def _attend(self, k: Tensor, q: Tensor, v: Tensor) -> Tensor:
        device = v.device.type  # the exponentials need float32
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            keys, queries = self._features(k.float()), self._features(q.float())
            total = queries @ keys.sum(dim=1).unsqueeze(-1)  # (batch, tokens, 1)
            attended = queries @ (keys.mT @ v.float()) / (total + 1e-8)
        return attended.to(v.dtype)

    def _features(self, u: Tensor) -> Tensor:
        exponents = u @ self.random_features.float().mT - u.square().sum(dim=-1, keepdim=True) / 2
        return exponents.exp() / math.sqrt(len(self.random_features))


class _Unfold(nn.Module):
    """Splits images `(batch, channels, side, side)` into overlapping tiles, `(batch, tiles, channels · kernel²)`.

    The same as `nn.Unfold`, which on a GPU launches one kernel per image.
    """

    def __init__(self, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def forward(self, image: Tensor) -> Tensor:
        tiles = F.pad(image, (self.padding,) * 4)
        for axis in (2, 3):
            tiles = tiles.unfold(axis, self.kernel, self.stride)
        # (batch, channels, down, across, kernel, kernel) to (batch, tiles, channels · kernel²)
        return tiles.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class _Tokens(nn.Module):
    """The token-to-token module: split into tiles, attend between them, arrange them as an image, split again."""

    def __init__(self, config: DViTConfig, network: int) -> None:
        super().__init__()
        unfolds, self.sides = config.unfolds[network], config.sides[network]
        channels = [3] + [config.performer_width] * (len(unfolds) - 1)
        tiles = [width * kernel**2 for width, (kernel, _, _) in zip(channels, unfolds, strict=True)]
        self.unfolds = nn.ModuleList(_Unfold(*unfold) for unfold in unfolds)
        self.performers = nn.ModuleList(_Performer(config, width) for width in tiles[:-1])
        self.project = Linear(tiles[-1], config.width)

    def forward(self, image: Tensor) -> Tensor:
        for unfold, performer, side in zip(self.unfolds, self.performers, self.sides, strict=False):
            image = performer(unfold(image)).mT.unflatten(-1, (side, side))  # (batch, channels, side, side)
        tokens: Tensor = self.project(self.unfolds[-1](image))
        return tokens


class _ClassToken(nn.Module):
    """Prepends the class token, which the head reads, and adds fixed sinusoidal positions."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, width), std=0.02))
        self.positions: Tensor
        self.register_buffer("positions", sinusoids(tokens + 1, width))

    def forward(self, tokens: Tensor) -> Tensor:
        # Under autocast the other tokens are in half precision; the residual stream stays float32.
        joined = torch.cat((self.token.expand(tokens.shape[0], -1, -1), tokens.to(self.token.dtype)), dim=1)
        return joined + self.positions

    def macs(self, x: Tensor, out: Tensor) -> int:
        """Copies and additions cost nothing in `anytime.models.cost`."""
        return 0


class _Attention(nn.Module):
    """Attention that adds `relation` to its logits `(batch, heads, tokens, tokens)` and returns them too."""

    def __init__(self, config: DViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.scale = (config.width // config.heads) ** -0.5
        self.qkv = Linear(config.width, 3 * config.width, bias=False)
        self.project = Linear(config.width, config.width)

    def forward(self, x: Tensor, relation: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = multi_head(self.qkv(x), self.heads)  # (batch, heads, tokens, channels) each
        logits = (q * self.scale) @ k.mT
        if relation is not None:
            logits = logits + relation
        mixed = logits.softmax(dim=-1).to(v.dtype) @ v
        return self.project(mixed.transpose(1, 2).flatten(2)), logits


class _RelationReuse(nn.Module):
    """Mixes the attention logits of all layers, `(batch, depth · heads, tokens, tokens)`, and resizes them: R' = E R Eᵀ."""

    def __init__(self, config: DViTConfig) -> None:
        super().__init__()
        maps = config.depth * config.heads
        hidden = maps * config.relation_ratio
        self.mix = nn.Sequential(nn.Conv2d(maps, hidden, 1), nn.GELU(), nn.Conv2d(hidden, maps, 1))

    def forward(self, maps: Tensor, resize: Tensor) -> Tensor:
        mixed: Tensor = self.mix(maps)
        return resize.to(mixed.dtype) @ mixed @ resize.to(mixed.dtype).mT


class _Block(nn.Module):
    """Attention, then an MLP that also reads features of the upstream tokens (feature reuse)."""

    def __init__(self, config: DViTConfig, *, reuses: bool, drop_path: float) -> None:
        super().__init__()
        width = config.width + (config.reuse_width if reuses else 0)
        self.attention_norm = LayerNorm(config.width)
        self.attention = _Attention(config)
        features = mlp(config.width, config.reuse_hidden, config.reuse_width)
        self.reuse = nn.Sequential(LayerNorm(config.width), *features) if reuses else None
        self.mlp_norm = LayerNorm(width)
        self.mlp = mlp(width, config.mlp_ratio * config.width, config.width)
        self.drop_path = drop_path

    def forward(self, x: Tensor, relation: Tensor | None, reused: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        attended, logits = self.attention(self.attention_norm(x), relation)
        x = x + self._drop(attended)
        joined = x if reused is None else torch.cat((x, self.features(*reused).to(x.dtype)), dim=-1)
        return x + self._drop(self.mlp(self.mlp_norm(joined))), logits

    def features(self, upstream: Tensor, resize: Tensor) -> Tensor:
        """The reused features, one vector per token of this transformer, zero for the class token."""
        assert self.reuse is not None
        features = self.reuse(upstream)[:, 1:]
        return F.pad(resize[1:, 1:].to(features.dtype) @ features, (0, 0, 1, 0))

    def _drop(self, x: Tensor) -> Tensor:
        """Drop path: in training, zeroes random rows and scales the others up."""
        return x * F.dropout(x.new_ones(x.shape[0], 1, 1), self.drop_path) if self.training else x


class _Network(nn.Module):
    """One transformer of the cascade: returns its logits, its last tokens, and the attention logits of its layers."""

    def __init__(self, config: DViTConfig, network: int) -> None:
        super().__init__()
        grid, reuses = config.sides[network][-1], network > 0
        self.heads = config.heads
        self.is_last = network == len(config.unfolds) - 1
        self.tokens = _Tokens(config, network)
        self.class_token = _ClassToken(grid**2, config.width)
        rates = [config.drop_path * layer / max(1, config.depth - 1) for layer in range(config.depth)]
        self.blocks = nn.ModuleList(_Block(config, reuses=reuses, drop_path=rate) for rate in rates)
        self.relations = _RelationReuse(config) if reuses else None
        self.norm = LayerNorm(config.width)
        self.head = Linear(config.width, config.classes)
        self.resize: Tensor | None
        self.register_buffer("resize", resize_matrix(config.sides[network - 1][-1], grid) if reuses else None)

    def forward(self, image: Tensor, upstream: Upstream | None) -> tuple[Tensor, Upstream]:
        x = self.class_token(self.tokens(image))
        reused, relations = None, [None] * len(self.blocks)
        if upstream is not None and self.relations is not None and self.resize is not None:
            reused = upstream[0], self.resize
            relations = self.relations(torch.cat(upstream[1], dim=1), self.resize).split(self.heads, dim=1)
        maps = []
        for block, relation in zip(self.blocks, relations, strict=True):
            x, logits = block(x, relation, reused)
            if not self.is_last:
                maps.append(logits)
        return self.head(self.norm(x)[:, 0]), (x, maps)


class DViT(MultiExit):
    """A cascade of transformers with more and more tokens; each is one stage with an exit.

    Random features, positions and resizing matrices are buffers: saved, not trained. Details that the paper of DViT leaves open
    (layer norms, the order q, k, v, a GELU in feature reuse) follow other vision transformers.

    Args:
        config: The shape; `PRESETS` has the published one.

    Example:
        >>> network = DViT(PRESETS["dvit-cifar"]).eval()
        >>> next(network.exits(torch.zeros(1, 3, 32, 32))).shape  # only the first transformer has run
        torch.Size([1, 100])
    """

    def __init__(self, config: DViTConfig) -> None:
        super().__init__()
        self.config = config
        self.num_exits = len(config.unfolds)
        self.networks = nn.ModuleList(_Network(config, network) for network in range(self.num_exits))
        self.apply(_init)

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage: all read the images, all but the first also what the transformer before passes on."""
        self._check_carry(exit, carry)
        image, *left = carry
        check_images(image, self.config.image_size)
        logits, (tokens, maps) = self.networks[exit](image, (left[0], left[1:]) if left else None)
        return (image, tokens, *maps) if exit + 1 < self.num_exits else (), logits

    def carry_size(self, exit: int) -> int:
        """The images; for later stages also the last tokens and the attention logits of the transformer before."""
        return 2 + self.config.depth if exit else 1


def sinusoids(positions: int, width: int) -> Tensor:
    """Positional encodings, `(positions, width)`: row p has the sine and cosine of p/10000^(2i/width) at 2i and 2i + 1."""
    rates = 10000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()


def resize_matrix(side_in: int, side_out: int) -> Tensor:
    """E, `(1 + side_out², 1 + side_in²)`: keeps the class token, upsamples the grid by 2 (nearest), then average-pools it."""
    doubled = 2 * side_in
    cell, start = torch.arange(doubled), torch.arange(side_out) * doubled
    first, end = start // side_out, -(-(start + doubled) // side_out)
    window = ((cell >= first[:, None]) & (cell < end[:, None])).float()
    axis = (window / window.sum(dim=1, keepdim=True)).view(side_out, side_in, 2).sum(dim=-1)
    resize = F.pad(torch.kron(axis, axis), (1, 0, 1, 0))
    resize[0, 0] = 1
    return resize


def _init(module: nn.Module) -> None:
    # PyTorch initialises layer norms with scale 1 and shift 0 already; convolutions keep its default.
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _check_unfolds(values: Any) -> tuple[tuple[Unfold, ...], ...]:
    try:
        networks = tuple(tuple((kernel, stride, padding) for kernel, stride, padding in network) for network in values)
    except (TypeError, ValueError):
        networks = ()
    unfolds = [unfold for network in networks for unfold in network]
    integers = all(type(number) is int and 0 <= number <= _FINEST_GRID for unfold in unfolds for number in unfold)
    fits = integers and all(kernel and stride and 2 * padding <= kernel for kernel, stride, padding in unfolds)
    require(
        fits and all(1 <= len(some) <= _MOST_UNFOLDS for some in (networks, *networks)),
        f"unfolds is {values!r}",
        expected=f"1 to {_MOST_UNFOLDS} splits (kernel, stride, padding) per transformer, the padding at most half the kernel",
        fix="pass, e.g., ((7, 4, 2), (3, 2, 1), (3, 2, 1)), as published for 14² tokens, for each transformer",
    )
    return networks


_CIFAR_UNFOLDS = (((7, 4, 2), (3, 2, 1)), ((5, 3, 2), (3, 2, 1)), ((3, 2, 1), (3, 2, 1)))

PRESETS: Mapping[str, DViTConfig] = MappingProxyType(
    {
        "dvit-imagenet-12": DViTConfig(classes=1000),
        "dvit-cifar": DViTConfig(
            classes=100, image_size=32, unfolds=_CIFAR_UNFOLDS, width=128, depth=6, reuse_hidden=64, reuse_width=24
        ),
    }
)
"""`dvit-imagenet-12` is the published network. `dvit-cifar` is our own, with twice the MACs of the MSDNet for CIFAR: 4², 6² and
8² tokens from images of 32² in two splits instead of three, and half the width, depth and reused features.
"""
