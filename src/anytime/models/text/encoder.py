"""Encoders of text with exits: the transformer of BERT (Devlin et al. 2019), and the heads of Schwartz et al. (2020) on it.

One tensor goes in, the numbers of the word pieces `(batch, length)`, filled up with that of the padding. No token and no head
sees padding, so a row's logits do not depend on how far its batch is filled up. Every layer's output is pooled by one shared
pooler, and an exit reads a mix of all pooled vectors up to its layer (`head="mix"`) or that of its layer alone (`"plain"`). In
Schwartz et al.'s code the weights of the mix stay as they were drawn; here they are trained.

Linear layers compute in the number format of their own weights and norms in that of theirs, so that a trainer may keep
the first in bfloat16 and the second in float32. Nothing here looks at numbers, so that a step can be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anytime.checks import check_choice, check_count, check_fraction, check_number
from anytime.errors import DtypeError, InputError, OptionError, ShapeError
from anytime.models.base import Carry, MultiExit
from anytime.models.layers import LayerNorm, Linear

Head = Literal["mix", "plain"]
Pool = Literal["cls", "mean"]

# Far beyond any encoder, near enough that a file made up to exhaust memory is refused.
DEEPEST = 256
_LARGEST, _MOST_PIECES = 1 << 16, 1 << 22


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder with exits; the defaults are those of BERT-base.

    Attributes:
        classes: How many classes.
        layers: After which layers there is an exit, counted from 1. Layers above the last of them are not built.
        vocabulary: How many word pieces there are.
        width: Numbers a token.
        heads: Attention heads of a layer.
        intermediate: Width of the hidden layer in each layer's perceptron.
        max_length: The longest row, in tokens: how many positions are known.
        types: How many kinds of segments the weights know; all tokens are of the first.
        pad: The word piece that rows are filled up with.
        head: `mix` reads all pooled vectors up to the exit, `plain` the last.
        pool: `cls` is a layer with tanh over the first token, as in BERT; `mean` is the mean of all tokens, as in MiniLM's
            sentence encoders, and has no weights.
        dropout: Of embeddings, attention, what layers add, and pooled vectors.
        norm_eps: What the norms add to a variance.
        embedding: Numbers a word piece before the first layer, where they are not as many as `width`: those of the smaller
            ELECTRAs are projected.
    """

    classes: int
    layers: tuple[int, ...] = (1, 4, 6, 12)
    vocabulary: int = 30522
    width: int = 768
    heads: int = 12
    intermediate: int = 3072
    max_length: int = 512
    types: int = 2
    pad: int = 0
    head: Head = "mix"
    pool: Pool = "cls"
    dropout: float = 0.1
    norm_eps: float = 1e-12
    embedding: int | None = None

    def __post_init__(self) -> None:
        for name in ("classes", "width", "heads", "intermediate", "max_length", "types"):
            check_count(getattr(self, name), name, most=_LARGEST)
        check_count(self.vocabulary, "vocabulary", most=_MOST_PIECES)
        if self.embedding is not None:
            check_count(self.embedding, "embedding", most=_LARGEST)
        check_count(self.pad, "pad", low=0, most=self.vocabulary - 1)
        object.__setattr__(self, "layers", check_places(self.layers))
        for name, known in (("head", get_args(Head)), ("pool", get_args(Pool))):
            check_choice(getattr(self, name), name, known)
        check_number(self.dropout, "dropout", low=0, below=1)
        check_fraction(self.norm_eps, "norm_eps")
        if self.width % self.heads:
            raise OptionError(
                f"width is {self.width} with {self.heads} heads",
                expected="the same number of channels for each head",
                fix=f"use a multiple of {self.heads}",
            )

    @property
    def depth(self) -> int:
        """How many layers are built."""
        return self.layers[-1]


class _Embeddings(nn.Module):
    """Word, position and type of each token, added up: `(batch, length)` to `(batch, length, width)`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.width if config.embedding is None else config.embedding
        self.words = nn.Embedding(config.vocabulary, size)
        self.positions = nn.Embedding(config.max_length, size)
        self.types = nn.Embedding(config.types, size)
        self.norm = LayerNorm(size, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.project = None if config.embedding is None else Linear(size, config.width)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        embedded = self._words(ids) + self.types(torch.zeros_like(places)) + self.positions(places)
        out: Tensor = self.dropout(self.norm(embedded))
        if self.project is not None:
            out = self.project(out)
        return out

    def _words(self, ids: Tensor) -> Tensor:
        try:
            out: Tensor = self.words(ids)
        except IndexError as error:  # asked for afterwards: to look at the numbers first would cost every text
            raise InputError(
                f"word pieces have numbers from {int(ids.min())} to {int(ids.max())}",
                expected=f"numbers from 0 to {self.words.num_embeddings - 1}, those of the network's vocabulary",
                fix="make them with the tokenizer that the network was trained with",
            ) from error
        return out


class _Layer(nn.Module):
    """Attention, then a perceptron; each is added to what it read, and a norm follows."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.project = Linear(config.width, config.width)
        self.attention_norm = LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = nn.Sequential(
            Linear(config.width, config.intermediate), nn.GELU(), Linear(config.intermediate, config.width)
        )
        self.mlp_norm = LayerNorm(config.width, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.project(self._attend(x, mask))))
        out: Tensor = self.mlp_norm(x + self.dropout(self.mlp(x)))
        return out

    def _attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :], dropout_p=dropout)
        return mixed.transpose(1, 2).flatten(2)


class _Encoder(nn.Module):
    """What is pretrained: the embeddings and the layers."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.depth))


class _FirstToken(nn.Module):
    """BERT's pooler: a layer with tanh over the first token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.linear = Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        pooled: Tensor = self.linear(x[:, 0]).tanh()
        return pooled


class _MeanToken(nn.Module):
    """The mean of the tokens that are not padding."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        share = mask / mask.sum(dim=1, keepdim=True)
        return (x * share[..., None].to(x.dtype)).sum(dim=1)


class _Mix(nn.Module):
    """A sum of pooled vectors `(batch, layers, width)`, weighed by a vector of length 1 that is learnt."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        # One weight alone is a sign: its gradient is rounding noise, which might turn it over.
        self.weight = nn.Parameter(torch.randn(layers), requires_grad=layers > 1)

    def forward(self, pooled: Tensor) -> Tensor:
        weight = F.normalize(self.weight, dim=0)
        return (weight[:, None] * pooled).sum(dim=1)

    def macs(self, x: Tensor, out: Tensor) -> int:
        """One multiply-accumulate an element of the vectors."""
        return x.numel()


class EncoderExits(MultiExit):
    """An encoder of text with an exit after chosen layers.

    Args:
        config: Its shape; `PRESETS` has some, `anytime.models.load_minilm` one with weights.

    Example:
        >>> network = EncoderExits(PRESETS["encoder-tiny"]).eval()
        >>> ids = torch.tensor([[101, 2023, 102, 0], [101, 2023, 2003, 102]])  # 0 is padding
        >>> next(network.exits(ids)).shape  # only the first layer has run
        torch.Size([2, 2])
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.num_exits = len(config.layers)
        self.encoder = _Encoder(config)
        self.pooler = _FirstToken(config) if config.pool == "cls" else _MeanToken()
        self.dropout = nn.Dropout(config.dropout)
        self.mixes = nn.ModuleList(_Mix(layer) for layer in config.layers) if config.head == "mix" else None
        self.heads = nn.ModuleList(Linear(config.width, config.classes) for _ in config.layers)
        self.apply(_init)

    @classmethod
    def from_transformers(
        cls, model: nn.Module, *, classes: int, layers: Sequence[int] | None = None, head: Head = "mix", pool: Pool = "cls"
    ) -> Self:
        """A network with a copy of the weights of a Hugging Face encoder of BERT's type; its heads are new.

        Args:
            model: A BERT, RoBERTa, ELECTRA or DistilBERT of the package `transformers`, with or without a head of its own.
            classes: How many classes.
            layers: After which layers to put an exit, counted from 1; after every one by default.
            head: As in `EncoderConfig`.
            pool: As in `EncoderConfig`.
        """
        # Here, as that module builds on this one.
        from anytime.models.text.pretrained import describe, first_position, take_encoder

        to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
        stored: dict[str, Any] = to_dict()
        network = cls(EncoderConfig(classes=classes, head=head, pool=pool, **describe(stored, layers=layers)))
        take_encoder(network, model.state_dict(), first_position=first_position(stored))
        return network.to(next(model.parameters()).device).train(model.training)

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage: word pieces go into all of them, the tokens `(batch, length, width)` into all but the first, and, where
        they are mixed, the pooled vectors so far too, `(batch, layers, width)`.
        """
        self._check_carry(exit, carry)
        ids, *left = carry
        self._check_ids(ids)
        mask, layers = self._mask(ids), self.config.layers
        x, pooled = (left[0], left[1:]) if left else (self.encoder.embeddings(ids), [])
        for place in range(layers[exit - 1] if exit else 0, layers[exit]):
            x = self.encoder.layers[place](x, mask)
            if self.mixes is not None or place + 1 == layers[exit]:
                # Dropped once: all later exits read the same vector.
                pooled.append(self.dropout(self.pooler(x, mask))[:, None])
        vectors = torch.cat(pooled, dim=1)
        logits = self.heads[exit](vectors[:, 0] if self.mixes is None else self.mixes[exit](vectors))
        if exit + 1 == self.num_exits:
            return (), logits
        return (ids, x) if self.mixes is None else (ids, x, vectors), logits

    def carry_size(self, exit: int) -> int:
        """The word pieces and the tokens, and the pooled vectors where they are mixed."""
        return (2 if self.mixes is None else 3) if exit else 1

    def free_sizes(self, exit: int) -> tuple[dict[int, str], ...]:
        """Texts may be of any length."""
        return ({1: "length"}, {1: "length"}, {})[: self.carry_size(exit)]

    def _mask(self, ids: Tensor) -> Tensor:
        """Which tokens are seen. The first always is, so that a row of padding alone gives numbers too."""
        return (ids != self.config.pad) | (torch.arange(ids.shape[1], device=ids.device) == 0)

    def _check_ids(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            raise DtypeError(
                f"word pieces have element type {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__} came",
                expected="a tensor of int64, the number of each piece in the vocabulary",
                fix="make them with anytime.data.WordPiece.encode",
            )
        if ids.ndim != 2 or not 1 <= ids.shape[1] <= self.config.max_length:
            raise ShapeError(
                f"word pieces have shape {tuple(ids.shape)}",
                expected=f"(batch, length) with at most {self.config.max_length} pieces a row",
                fix="add a batch dimension, ids[None], or cut the texts: WordPiece.encode(texts, length=...)",
            )


def _init(module: nn.Module) -> None:
    # BERT's start; norms begin with scale 1 and shift 0 in PyTorch too.
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def check_places(layers: Any) -> tuple[int, ...]:
    """The layers after which there is an exit, as a tuple, if they are that."""
    try:
        places = tuple(layers)
    except TypeError:
        places = ()
    whole = all(type(place) is int and 1 <= place <= DEEPEST for place in places)
    if not places or not whole or list(places) != sorted(set(places)):
        raise _wrong("layers", layers, f"ascending numbers of layers, from 1 to at most {DEEPEST}")
    return places


def _wrong(name: str, value: Any, expected: str) -> OptionError:
    return OptionError(f"{name} is {value!r}", expected=expected, fix=f"correct {name}")


PRESETS: Mapping[str, EncoderConfig] = MappingProxyType(
    {
        "minilm-l6": EncoderConfig(classes=2, layers=(1, 2, 3, 4, 5, 6), width=384, heads=12, intermediate=1536, pool="mean"),
        "bert-base": EncoderConfig(classes=2),
        "encoder-tiny": EncoderConfig(
            classes=2, layers=(1, 2, 3), width=64, heads=4, intermediate=128, max_length=128, pool="mean"
        ),
    }
)
"""Networks by name, with new weights; `anytime.models.create` sets the number of classes.

`minilm-l6` has the shape of MiniLM-L6, whose weights `load_minilm` reads. `bert-base` has the four exits that Schwartz et al.
give for it. `encoder-tiny` is this library's own, small enough to train from scratch on a CPU.
"""
