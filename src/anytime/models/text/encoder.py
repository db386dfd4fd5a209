"""Text encoders with exits: the transformer of BERT (Devlin et al. 2019) with the heads of Schwartz et al. (2020).

The input is one tensor of token ids, `(batch, length)`, with padding at the end, or a dict with such a tensor and its mask, as
Hugging Face's tokenizers return. Tokens and heads ignore padding, so the
logits of a row do not depend on the padding of its batch. One shared pooler reads the output of every layer. An exit reads a
mix of all pooled vectors up to its layer (`head="mix"`) or that of its layer only (`"plain"`). In the code of Schwartz et al.
the weights of the mix stay at their random values; here they are trained.

Linear layers and norms compute in the dtype of their own weights, so a trainer may keep the former in bfloat16 and the latter
in float32. No operation depends on values, so a training step can be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anytime.checks import Inputs, check_count, check_counts, check_fraction
from anytime.errors import DtypeError, InputError, ShapeError
from anytime.models.base import Carry, MultiExit
from anytime.models.config import check_config, check_heads, require
from anytime.models.layers import LayerNorm, Linear, mlp, multi_head, token_mean

Head = Literal["mix", "plain"]
Pool = Literal["cls", "mean"]

DEEPEST = 256
_LIMITS = dict.fromkeys(("classes", "width", "heads", "intermediate", "max_length", "types"), 1 << 16)


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder with exits; the defaults are those of BERT-base.

    Attributes:
        classes: The number of classes.
        layers: The layers with an exit, counted from 1. Layers above the last of them are not built.
        vocabulary: The size of the vocabulary.
        width: Channels per token.
        heads: Attention heads per layer.
        intermediate: Hidden channels of each layer's MLP.
        max_length: Tokens of the longest row, that is, the number of positions.
        types: The number of segment types of the weights; all tokens have the first.
        pad: The id of the padding token.
        head: `mix` reads all pooled vectors up to the exit, `plain` only the last.
        pool: `cls` is a linear layer with tanh over the first token, as in BERT; `mean` is the mean of all tokens, as in
            MiniLM's sentence encoders, without weights.
        dropout: The dropout rate of embeddings, attention, residual branches and pooled vectors.
        norm_eps: The epsilon of the norms.
        embedding: Channels per token before the first layer, if not `width`: the smaller ELECTRAs project them.
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
        limits = {**_LIMITS, "vocabulary": 1 << 22, **({} if self.embedding is None else {"embedding": 1 << 16})}
        check_config(self, counts=limits, choices={"head": get_args(Head), "pool": get_args(Pool)}, rates=("dropout",))
        check_count(self.pad, "pad", low=0, most=self.vocabulary - 1)
        check_fraction(self.norm_eps, "norm_eps", fix="pass norm_eps=1e-12, as in BERT")
        object.__setattr__(self, "layers", check_layers(self.layers))
        check_heads(self.width, self.heads)

    @property
    def depth(self) -> int:
        """The number of layers that are built."""
        return self.layers[-1]


class _Embeddings(nn.Module):
    """The sum of token, position and type embeddings: from `(batch, length)` to `(batch, length, width)`."""

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
        positions = torch.arange(ids.shape[1], device=ids.device)
        embedded = self._words(ids) + self.types(torch.zeros_like(positions)) + self.positions(positions)
        out: Tensor = self.dropout(self.norm(embedded))
        if self.project is not None:
            out = self.project(out)
        return out

    def _words(self, ids: Tensor) -> Tensor:
        try:
            out: Tensor = self.words(ids)
        except IndexError as error:  # checking the ids first would slow every text down
            raise InputError(
                f"token ids range from {int(ids.min())} to {int(ids.max())}",
                expected=f"ids from 0 to {self.words.num_embeddings - 1}, the network's vocabulary",
                fix="encode the texts with the tokenizer that the network was trained with",
            ) from error
        return out


class _Layer(nn.Module):
    """Attention, then an MLP, each with a residual connection and a norm after it."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width)
        self.project = Linear(config.width, config.width)
        self.attention_norm = LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = mlp(config.width, config.intermediate, config.width)
        self.mlp_norm = LayerNorm(config.width, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.project(self._attend(x, mask))))
        out: Tensor = self.mlp_norm(x + self.dropout(self.mlp(x)))
        return out

    def _attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = multi_head(self.qkv(x), self.heads)  # (batch, heads, length, channels) each
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :], dropout_p=dropout)
        return mixed.transpose(1, 2).flatten(2)  # (batch, length, width)


class _Encoder(nn.Module):
    """The pretrained part: embeddings and layers."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.depth))


class _FirstToken(nn.Module):
    """BERT's pooler: a linear layer with tanh over the first token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.linear = Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        pooled: Tensor = self.linear(x[:, 0]).tanh()
        return pooled


class _MeanToken(nn.Module):
    """The mean of the tokens that are not padding."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return token_mean(x, mask)


class _Mix(nn.Module):
    """A sum of pooled vectors `(batch, layers, width)`, weighted by a learned vector of norm 1."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        # A single normalised weight is a sign: its gradient is rounding noise, which could flip it.
        self.weight = nn.Parameter(torch.randn(layers), requires_grad=layers > 1)

    def forward(self, pooled: Tensor) -> Tensor:
        weight = F.normalize(self.weight, dim=0)
        return (weight[:, None] * pooled).sum(dim=1)

    def macs(self, x: Tensor, out: Tensor) -> int:
        """One multiply-accumulate per element of the vectors."""
        return x.numel()


class EncoderExits(MultiExit):
    """A text encoder with exits after some of its layers.

    Args:
        config: The shape; `PRESETS` has some, and `anytime.models.load_minilm` one with weights.

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
        """Create a network with a copy of the weights of a Hugging Face encoder and new heads.

        Args:
            model: A BERT, RoBERTa, ELECTRA or DistilBERT of the package `transformers`, with or without a head.
            classes: The number of classes.
            layers: The layers with an exit, counted from 1; all by default.
            head: As in `EncoderConfig`.
            pool: As in `EncoderConfig`.
        """
        # Imported here because that module imports this one.
        from anytime.models.text.pretrained import describe, first_position, take_encoder

        to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
        stored: dict[str, Any] = to_dict()
        network = cls(EncoderConfig(classes=classes, head=head, pool=pool, **describe(stored, layers=layers)))
        take_encoder(network, model.state_dict(), first_position=first_position(stored))
        return network.to(next(model.parameters()).device).train(model.training)

    def exits(self, x: Inputs) -> Iterator[Tensor]:
        """Yield the logits of each exit, `(batch, classes)`, for token ids or what a Hugging Face tokenizer returns."""
        return super().exits(self.token_ids(x))

    def token_ids(self, x: Inputs) -> Tensor:
        """The token ids, `(batch, length)`, in what a Hugging Face tokenizer returns, with padding where its mask is 0.

        Args:
            x: A dict with `input_ids` and, if rows are padded at the end, `attention_mask`. Segments (`token_type_ids`) are
                not used: all tokens have the first type. Token ids are returned as they are.

        Example:
            >>> network = EncoderExits(PRESETS["encoder-tiny"])
            >>> network.token_ids({"input_ids": torch.tensor([[7, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 0]])})
            tensor([[7, 8, 0]])
        """
        if not isinstance(x, Mapping):
            return self._check_ids(x)
        if "input_ids" not in x:
            raise InputError(
                f"the inputs are named {', '.join(map(str, x))}",
                expected="input_ids, and attention_mask if rows are padded",
                fix="pass what the tokenizer returns, with return_tensors='pt'",
            )
        ids, mask = self._check_ids(x["input_ids"]), x.get("attention_mask")
        if mask is None:
            return ids
        if not isinstance(mask, Tensor) or mask.shape != ids.shape:
            raise ShapeError(
                f"attention_mask {f'has shape {tuple(mask.shape)}' if isinstance(mask, Tensor) else 'is not a tensor'}",
                expected=f"shape {tuple(ids.shape)}, that of input_ids",
                fix="pass what the tokenizer returns, with return_tensors='pt'",
            )
        if ((mask[:, 0] == 0) & (mask != 0).any(dim=1)).any():
            raise InputError(
                "rows are padded at their start",
                expected="padding at the end, so that positions count from the first token",
                fix="set tokenizer.padding_side = 'right'",
            )
        return ids.masked_fill(mask == 0, self.config.pad)

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage on the token ids; all but the first also take the hidden states `(batch, length, width)` and, with
        `head="mix"`, the pooled vectors so far, `(batch, layers, width)`.
        """
        if not exit and len(carry) > 1:
            raise ShapeError(
                f"the first stage got {len(carry)} tensors",
                expected="one tensor of token ids, with padding",
                fix="pass network.token_ids(encoded) for what a tokenizer returns",
            )
        self._check_carry(exit, carry)
        ids, *left = carry
        self._check_ids(ids)
        mask, layers = self._mask(ids), self.config.layers
        x, pooled = (left[0], left[1:]) if left else (self.encoder.embeddings(ids), [])
        for layer in range(layers[exit - 1] if exit else 0, layers[exit]):
            x = self.encoder.layers[layer](x, mask)
            if self.mixes is not None or layer + 1 == layers[exit]:
                # Dropout is applied once: all later exits read the same vector.
                pooled.append(self.dropout(self.pooler(x, mask))[:, None])
        vectors = torch.cat(pooled, dim=1)
        logits = self.heads[exit](vectors[:, 0] if self.mixes is None else self.mixes[exit](vectors))
        if exit + 1 == self.num_exits:
            return (), logits
        return (ids, x) if self.mixes is None else (ids, x, vectors), logits

    def carry_size(self, exit: int) -> int:
        """The token ids; for later stages also the hidden states and, with `head="mix"`, the pooled vectors."""
        return (2 if self.mixes is None else 3) if exit else 1

    def free_sizes(self, exit: int) -> tuple[dict[int, str], ...]:
        """Texts may have any length."""
        return ({1: "length"}, {1: "length"}, {})[: self.carry_size(exit)]

    def _mask(self, ids: Tensor) -> Tensor:
        """The tokens that are not padding. The first always counts, so a row of padding gives finite logits."""
        return (ids != self.config.pad) | (torch.arange(ids.shape[1], device=ids.device) == 0)

    def _check_ids(self, ids: Any) -> Tensor:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            raise DtypeError(
                f"token ids have dtype {ids.dtype}" if isinstance(ids, Tensor) else f"the input is a {type(ids).__name__}",
                expected="a tensor of token ids, int64",
                fix="encode the texts with anytime.data.WordPiece.encode, or with the tokenizer of the weights",
            )
        if ids.ndim != 2 or not 1 <= ids.shape[1] <= self.config.max_length:
            raise ShapeError(
                f"token ids have shape {tuple(ids.shape)}",
                expected=f"(batch, length) with 1 to {self.config.max_length} tokens per row",
                fix="add a batch dimension, ids[None], or truncate the texts: WordPiece.encode(texts, length=...)",
            )
        return ids


def _init(module: nn.Module) -> None:
    # As in BERT; PyTorch initialises norms with scale 1 and shift 0 already.
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def check_layers(layers: Any) -> tuple[int, ...]:
    """Check the layers with an exit: ascending numbers from 1."""
    found = check_counts(layers, "layers", most=DEEPEST, fix="pass, e.g., layers=(1, 4, 6, 12)")
    expected = "distinct layers in ascending order"
    require(list(found) == sorted(set(found)), f"layers is {layers!r}", expected=expected, fix="sort the layers")
    return found


PRESETS: Mapping[str, EncoderConfig] = MappingProxyType(
    {
        "minilm-l6": EncoderConfig(classes=2, layers=(1, 2, 3, 4, 5, 6), width=384, heads=12, intermediate=1536, pool="mean"),
        "bert-base": EncoderConfig(classes=2),
        "encoder-tiny": EncoderConfig(
            classes=2, layers=(1, 2, 3), width=64, heads=4, intermediate=128, max_length=128, pool="mean"
        ),
    }
)
"""`minilm-l6` has the shape of MiniLM-L6, whose weights `load_minilm` reads, `bert-base` the four exits of Schwartz et al.
`encoder-tiny` is our own, small enough to train from scratch on a CPU.
"""
