"""DViT, the dynamic vision transformer of Wang et al. (2021) on T2T-ViT-12, one of the networks the paper is shown on.

A cascade of whole transformers looks at the same image, each cut into more tokens than the one before: 7², then 10², then
14². Each has its own weights and its own head, which is an exit. A later network need not begin anew: each of its blocks reads
the tokens that the network before it ended with (feature reuse), and its attention begins from the attention of that
network (relation reuse). Gradients flow back through both: later exits train the earlier networks too.

Parts stand here before what is made of them. Nothing in them looks at numbers, so that a step can be a CUDA graph. Linear
layers and norms compute in the number format of their own weights, so that a trainer may keep the first in bfloat16 and the
second in float32; what the blocks add to stays float32.
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

from anytime.checks import check_count, check_number
from anytime.errors import OptionError, ShapeError
from anytime.models.base import Carry, MultiExit
from anytime.models.layers import LayerNorm, Linear

Unfold = tuple[int, int, int]
"""Kernel, stride and padding of one cut into overlapping tiles."""

Upstream = tuple[Tensor, list[Tensor]]
"""What one network leaves to the next: its last tokens before the final norm, and the attention logits of each layer."""

# Far beyond any network, near enough that a file made up to exhaust memory is refused.
_LARGEST, _DEEPEST, _FINEST_GRID, _MOST_CUTS = 1 << 16, 256, 256, 16


@dataclass(frozen=True)
class DViTConfig:
    """The shape of a DViT; the defaults are the published cascade of three T2T-ViT-12 for ImageNet.

    Attributes:
        classes: How many classes.
        image_size: Height and width of the images.
        unfolds: For each network the cuts that lead from the image to its tokens, as (kernel, stride, padding); a performer
            stands between two cuts.
        width: Channels of a token.
        depth: Blocks of each network.
        heads: Attention heads of each block.
        mlp_ratio: How many times as wide as a token the hidden layer of a block is.
        performer_width: Channels inside of the performers.
        random_features: How many random features stand in for the softmax in a performer.
        reuse_hidden: Hidden channels of what turns upstream tokens into reused features.
        reuse_width: Channels of the reused features.
        relation_ratio: How many times as wide as the attention maps the hidden layer of relation reuse is.
        drop_path: How often the last block is skipped in training; from block to block it rises linearly from 0.
        performer_dropout: Dropout in the performers.
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
        for field in fields(self):
            if field.name != "unfolds":
                _check_number(field.name, getattr(self, field.name))
        object.__setattr__(self, "unfolds", _check_unfolds(self.unfolds))
        self._check_fit()

    @property
    def sides(self) -> tuple[tuple[int, ...], ...]:
        """The sides of the grids after the cuts of each network; the last of each is that of its tokens.

        >>> DViTConfig(classes=10).sides
        ((28, 14, 7), (38, 19, 10), (56, 28, 14))
        """
        networks = []
        for unfolds in self.unfolds:
            sides = [self.image_size]
            for kernel, stride, padding in unfolds:
                sides.append((sides[-1] + 2 * padding - kernel) // stride + 1)
            networks.append(tuple(sides[1:]))
        return tuple(networks)

    def _check_fit(self) -> None:
        if self.width % (2 * self.heads):
            came, fix = f"width is {self.width} with {self.heads} heads", f"use a multiple of {2 * self.heads}"
            raise OptionError(came, expected="an even number of channels, the same for each head", fix=fix)
        if self.random_features > self.performer_width:
            came = f"{self.random_features} random_features came with a performer_width of {self.performer_width}"
            raise OptionError(came, expected="at most as many, as they are orthogonal", fix="half as many are usual")
        if not all(1 <= side <= _FINEST_GRID for sides in self.sides for side in sides):
            came = f"unfolds cut an image of size {self.image_size} into grids with the sides {self.sides}"
            raise OptionError(came, expected=f"sides from 1 to {_FINEST_GRID}", fix="change unfolds or image_size")
        grids = [sides[-1] for sides in self.sides]
        if not all(before < after <= 2 * before for before, after in pairwise(grids)):
            came, expected = f"the tokens have the grids {grids}", "each finer than the one before, at most twice as fine"
            raise OptionError(came, expected=expected, fix="order unfolds from coarse to fine, or add one between")


class _Performer(nn.Module):
    """One head of attention with random features in place of the softmax: its cost is linear in the number of tokens.

    Tokens `(batch, tokens, width_in)` become `(batch, tokens, performer_width)`. With φ(u) = exp(Wu − ‖u‖²/2)/√m, where the m
    rows of W are orthogonal and √m long, token t attends to token s by ⟨φ(q_t), φ(k_s)⟩.
    """

    def __init__(self, config: DViTConfig, width_in: int) -> None:
        super().__init__()
        width, features = config.performer_width, config.random_features
        self.norm = LayerNorm(width_in)
        self.kqv = Linear(width_in, 3 * width)
        self.project = Linear(width, width)
        self.mlp_norm = LayerNorm(width)
        self.mlp = _mlp(width, width, width)
        self.dropout = nn.Dropout(config.performer_dropout)
        self.random_features: Tensor
        self.register_buffer("random_features", nn.init.orthogonal_(torch.empty(features, width)) * features**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        k, q, v = self.kqv(self.norm(tokens)).chunk(3, dim=-1)
        mixed = v + self.dropout(self.project(self._attend(k, q, v)))  # from v, as the tokens have another width
        out: Tensor = mixed + self.dropout(self.mlp(self.mlp_norm(mixed)))
        return out

    def _attend(self, k: Tensor, q: Tensor, v: Tensor) -> Tensor:
        device = v.device.type  # below it is float32, for the exponentials
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            keys, queries = self._features(k.float()), self._features(q.float())
            total = queries @ keys.sum(dim=1).unsqueeze(-1)
            attended = queries @ (keys.mT @ v.float()) / (total + 1e-8)
        return attended.to(v.dtype)

    def _features(self, u: Tensor) -> Tensor:
        exponents = u @ self.random_features.float().mT - u.square().sum(dim=-1, keepdim=True) / 2
        return exponents.exp() / math.sqrt(len(self.random_features))


class _Cut(nn.Module):
    """Cuts images `(batch, channels, side, side)` into overlapping tiles, `(batch, tiles, channels · kernel²)`.

    They are those of `nn.Unfold`, which on a GPU cuts one image at a time: a launch for each.
    """

    def __init__(self, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def forward(self, image: Tensor) -> Tensor:
        tiles = F.pad(image, (self.padding,) * 4)
        for axis in (2, 3):
            tiles = tiles.unfold(axis, self.kernel, self.stride)
        return tiles.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class _Tokens(nn.Module):
    """The token-to-token module: cut into tiles, let them attend to each other, lay them out as an image, cut again."""

    def __init__(self, config: DViTConfig, network: int) -> None:
        super().__init__()
        cuts, self.sides = config.unfolds[network], config.sides[network]
        channels = [3] + [config.performer_width] * (len(cuts) - 1)
        tiles = [width * kernel**2 for width, (kernel, _, _) in zip(channels, cuts, strict=True)]
        self.cuts = nn.ModuleList(_Cut(*cut) for cut in cuts)
        self.performers = nn.ModuleList(_Performer(config, width) for width in tiles[:-1])
        self.project = Linear(tiles[-1], config.width)

    def forward(self, image: Tensor) -> Tensor:
        for cut, performer, side in zip(self.cuts, self.performers, self.sides, strict=False):
            image = performer(cut(image)).mT.unflatten(-1, (side, side))
        tokens: Tensor = self.project(self.cuts[-1](image))
        return tokens


class _ClassToken(nn.Module):
    """Puts the token that the head reads before the others, then adds fixed sinusoidal positions; it comes at position 0."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, width), std=0.02))
        self.positions: Tensor
        self.register_buffer("positions", sinusoids(tokens + 1, width))

    def forward(self, tokens: Tensor) -> Tensor:
        # Under autocast the other tokens come in less than float32, which what the blocks add to should not.
        joined = torch.cat((self.token.expand(tokens.shape[0], -1, -1), tokens.to(self.token.dtype)), dim=1)
        return joined + self.positions

    def macs(self, x: Tensor, out: Tensor) -> int:
        """It copies and adds, which costs nothing by the rule of `anytime.models.cost`."""
        return 0


class _Attention(nn.Module):
    """Attention that gives its logits too, `(batch, heads, tokens, tokens)`, and adds those of another to them."""

    def __init__(self, config: DViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.scale = (config.width // config.heads) ** -0.5
        self.qkv = Linear(config.width, 3 * config.width, bias=False)
        self.project = Linear(config.width, config.width)

    def forward(self, x: Tensor, relation: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        logits = (q * self.scale) @ k.mT
        if relation is not None:
            logits = logits + relation
        mixed = logits.softmax(dim=-1).to(v.dtype) @ v
        return self.project(mixed.transpose(1, 2).flatten(2)), logits


class _RelationReuse(nn.Module):
    """Mixes attention logits `(batch, depth · heads, tokens, tokens)`, the class token's too, then resizes: R' = E R Eᵀ."""

    def __init__(self, config: DViTConfig) -> None:
        super().__init__()
        maps = config.depth * config.heads
        hidden = maps * config.relation_ratio
        self.mix = nn.Sequential(nn.Conv2d(maps, hidden, 1), nn.GELU(), nn.Conv2d(hidden, maps, 1))

    def forward(self, maps: Tensor, resize: Tensor) -> Tensor:
        mixed: Tensor = self.mix(maps)
        return resize.to(mixed.dtype) @ mixed @ resize.to(mixed.dtype).mT


class _Block(nn.Module):
    """Attention, then an MLP, which reads features of the upstream tokens besides its own tokens (feature reuse)."""

    def __init__(self, config: DViTConfig, *, reuses: bool, drop_path: float) -> None:
        super().__init__()
        width = config.width + (config.reuse_width if reuses else 0)
        self.attention_norm = LayerNorm(config.width)
        self.attention = _Attention(config)
        features = _mlp(config.width, config.reuse_hidden, config.reuse_width)
        self.reuse = nn.Sequential(LayerNorm(config.width), *features) if reuses else None
        self.mlp_norm = LayerNorm(width)
        self.mlp = _mlp(width, config.mlp_ratio * config.width, config.width)
        self.drop_path = drop_path

    def forward(self, x: Tensor, relation: Tensor | None, reused: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        attended, logits = self.attention(self.attention_norm(x), relation)
        x = x + self._drop(attended)
        joined = x if reused is None else torch.cat((x, self.features(*reused).to(x.dtype)), dim=-1)
        return x + self._drop(self.mlp(self.mlp_norm(joined))), logits

    def features(self, upstream: Tensor, resize: Tensor) -> Tensor:
        """What is reused, one vector for each token of this network: nothing for the class token."""
        assert self.reuse is not None
        features = self.reuse(upstream)[:, 1:]
        return F.pad(resize[1:, 1:].to(features.dtype) @ features, (0, 0, 1, 0))

    def _drop(self, x: Tensor) -> Tensor:
        """Drop path: in training nothing is added to some of the rows, and more to the others."""
        return x * F.dropout(x.new_ones(x.shape[0], 1, 1), self.drop_path) if self.training else x


class _Network(nn.Module):
    """One transformer of the cascade: gives its logits, the tokens it ends with, and the attention logits of its layers."""

    def __init__(self, config: DViTConfig, network: int) -> None:
        super().__init__()
        grid, reuses = config.sides[network][-1], network > 0
        self.heads = config.heads
        self.is_last = network == len(config.unfolds) - 1
        self.tokens = _Tokens(config, network)
        self.class_token = _ClassToken(grid**2, config.width)
        shares = [config.drop_path * layer / max(1, config.depth - 1) for layer in range(config.depth)]
        self.blocks = nn.ModuleList(_Block(config, reuses=reuses, drop_path=share) for share in shares)
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
    """A cascade of transformers with more and more tokens, each of which is a stage with an exit at its end.

    Random features, positions and the matrices that resize are buffers: saved, never trained. Where the published text is
    open, layer norms, the order q, k, v of the attention, and a GELU in feature reuse are as in other vision transformers.

    Args:
        config: Its shape; `PRESETS` has the published one.

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
        """Run a stage: the images go into all of them, and what the transformer before leaves into all but the first."""
        self._check_carry(exit, carry)
        image, *left = carry
        size = self.config.image_size
        if image.shape[1:] != (3, size, size):
            raise ShapeError(
                f"images have shape {tuple(image.shape)}",
                expected=f"(batch, 3, {size}, {size})",
                fix="channels come before height and width; other sizes need another image_size in the config",
            )
        logits, (tokens, maps) = self.networks[exit](image, (left[0], left[1:]) if left else None)
        return (image, tokens, *maps) if exit + 1 < self.num_exits else (), logits

    def carry_size(self, exit: int) -> int:
        """The images, the last tokens of the transformer before, and the attention logits of its blocks."""
        return 2 + self.config.depth if exit else 1


def sinusoids(positions: int, width: int) -> Tensor:
    """Fixed positions, `(positions, width)`: row p has the sine and cosine of p/10000^(2i/width) at 2i and 2i + 1."""
    rates = 10000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()


def resize_matrix(side_in: int, side_out: int) -> Tensor:
    """E, `(1 + side_out², 1 + side_in²)`: keeps the class token, doubles the grid (nearest), averages it down (adaptive)."""
    doubled = 2 * side_in
    cell, start = torch.arange(doubled), torch.arange(side_out) * doubled
    first, end = start // side_out, -(-(start + doubled) // side_out)
    window = ((cell >= first[:, None]) & (cell < end[:, None])).float()
    axis = (window / window.sum(dim=1, keepdim=True)).view(side_out, side_in, 2).sum(dim=-1)
    resize = F.pad(torch.kron(axis, axis), (1, 0, 1, 0))
    resize[0, 0] = 1
    return resize


def _mlp(width_in: int, hidden: int, width_out: int) -> nn.Sequential:
    return nn.Sequential(Linear(width_in, hidden), nn.GELU(), Linear(hidden, width_out))


def _init(module: nn.Module) -> None:
    # Layer norms begin with scale 1 and shift 0 in PyTorch too, and convolutions keep its defaults.
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _check_number(name: str, value: Any) -> None:
    if name in ("drop_path", "performer_dropout"):
        check_number(value, name, low=0, below=1)
    else:
        check_count(value, name, most=_DEEPEST if name == "depth" else _LARGEST)


def _check_unfolds(values: Any) -> tuple[tuple[Unfold, ...], ...]:
    try:
        networks = tuple(tuple((kernel, stride, padding) for kernel, stride, padding in network) for network in values)
    except (TypeError, ValueError):
        networks = ()
    cuts = [cut for network in networks for cut in network]
    whole = all(type(number) is int and 0 <= number <= _FINEST_GRID for cut in cuts for number in cut)
    fits = whole and all(kernel and stride and 2 * padding <= kernel for kernel, stride, padding in cuts)
    if fits and all(1 <= len(some) <= _MOST_CUTS for some in (networks, *networks)):
        return networks
    raise OptionError(
        f"unfolds is {values!r}",
        expected=f"for each network one to {_MOST_CUTS} cuts (kernel, stride, padding), the padding at most half the kernel",
        fix="((7, 4, 2), (3, 2, 1), (3, 2, 1)) is the published choice for 14² tokens",
    )


_CIFAR_CUTS = (((7, 4, 2), (3, 2, 1)), ((5, 3, 2), (3, 2, 1)), ((3, 2, 1), (3, 2, 1)))

PRESETS: Mapping[str, DViTConfig] = MappingProxyType(
    {
        "dvit-imagenet-12": DViTConfig(classes=1000),
        "dvit-cifar": DViTConfig(
            classes=100, image_size=32, unfolds=_CIFAR_CUTS, width=128, depth=6, reuse_hidden=64, reuse_width=24
        ),
    }
)
"""Networks by name; `anytime.models.create` sets the number of classes.

`dvit-imagenet-12` is the published one. `dvit-cifar` is this library's own, at twice the cost of the MSDNet for CIFAR: images
of 32² give 4², 6² and 8² tokens after two cuts in place of three, half the width and half the depth leave heads of 32 channels
and 24 attention maps, and the reused features are halved too.
"""
