"""Common mistakes with exits on one's own module, with costs and with encoders: each error says what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anytime.errors import AnytimeError, DtypeError, InputError, OptionError, ShapeError, StateError
from anytime.models import EncoderExits, attach_exits, measure_cost
from anytime.models.text.encoder import PRESETS

IMAGES = torch.zeros(2, 3, 8, 8)
IDS, MASK = torch.tensor([[3, 4, 5, 0], [6, 7, 8, 9]]), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
TOKENS = {"input_ids": IDS, "attention_mask": MASK}


def body() -> nn.Sequential:
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 2)
    return nn.Sequential(*layers)


class Reader(nn.Module):
    """Takes two tensors; what its blocks are called with depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x) + x
        return self.last((x * attention_mask[..., None]).mean(1))


class Joined(Reader):
    """Rows depend on each other, so stages cannot drop any."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
            x = x - x.mean(0) if len(x) > 1 else x
        return self.last(x.mean(1))


def exits(module: nn.Module | None = None, at: Any = ("0",), example: Any = IMAGES, **options: Any) -> Any:
    return attach_exits(module or body(), list(at), example=example, **options)


def reader() -> Any:
    return exits(Reader(), ["blocks.0"], TOKENS)


class Named(Reader):
    """Returns anything as its logits."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.output(super().forward(input_ids, attention_mask))


def named(output: Callable[[Tensor], Any]) -> Callable[[], Any]:
    return lambda: exits(Named(output), ["blocks.0"], TOKENS)


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(body(), IMAGES)  # type: ignore[no-untyped-call]


def encoder() -> EncoderExits:
    return EncoderExits(PRESETS["encoder-tiny"])


CALLS: dict[str, tuple[Callable[[], object], type[AnytimeError], str]] = {
    "images of bytes as an example": (lambda: exits(example=IMAGES.byte()), InputError, "example.float() / 255"),
    "a text as an example": (lambda: exits(example="a cat"), DtypeError, "example is"),
    "a list of texts as an example": (lambda: exits(Reader(), ["blocks.0"], ["a cat", "a dog"]), DtypeError, "example is"),
    "a number in a dict of examples": (lambda: exits(Reader(), ["blocks.0"], {**TOKENS, "n": 3}), DtypeError, "example['n']"),
    "None in a dict of examples": (lambda: exits(Reader(), ["blocks.0"], {**TOKENS, "n": None}), DtypeError, "leave out None"),
    "an example that is a batch with labels": (lambda: exits(example=(IMAGES, IDS)), InputError, "(x, y), x alone"),
    "lists of token ids": (lambda: reader()({"input_ids": [[3, 4]], "attention_mask": [[1, 1]]}), DtypeError, "return_tensors"),
    "inputs by position and by name": (lambda: reader()(IDS, attention_mask=MASK), InputError, "all by name"),
    "no inputs": (lambda: reader()(), InputError, "0 inputs"),
    "a name too many": (lambda: reader()(**TOKENS, token_type_ids=IDS), InputError, "leave out token_type_ids"),
    "a name too few": (lambda: reader()(input_ids=IDS), InputError, "add attention_mask"),
    "an empty dict as an example": (lambda: exits(Reader(), ["blocks.0"], {}), InputError, "example is empty"),
    "an example without rows": (lambda: exits(example=IMAGES[:0]), ShapeError, "skip an empty batch"),
    "examples of different lengths": (
        lambda: exits(Reader(), ["blocks.0"], {**TOKENS, "attention_mask": MASK[:1]}),
        ShapeError,
        "different numbers of rows",
    ),
    "an argument that forward does not have": (
        lambda: exits(Reader(), ["blocks.0"], {**TOKENS, "types": IDS}),
        InputError,
        "unexpected keyword argument 'types'",
    ),
    "a call that does not happen": (lambda: exits(at=["0#2"]), OptionError, "'0#1' to '#1'"),
    "a stage of rows that depend on each other": (
        lambda: exits(Joined(), ["blocks.0"], TOKENS, method="replay"),
        OptionError,
        "stage 2 gives another result",
    ),
    "tracing several tensors": (
        lambda: exits(Reader(), ["blocks.0"], TOKENS, method="trace"),
        OptionError,
        "method='thread'",
    ),
    "other inputs than in the example": (
        lambda: reader()({"input_ids": IDS}),
        InputError,
        "the names input_ids, attention_mask",
    ),
    "a text in place of inputs": (lambda: reader()("a cat"), DtypeError, "tokenizer"),
    "a stage of one tensor of two": (lambda: reader().stage(0, (IDS,)), ShapeError, "got 1 tensors"),
    "images of another size, replayed": (
        lambda: exits(method="replay")(torch.zeros(2, 3, 9, 9)),
        ShapeError,
        "attach the exits with an example of this shape",
    ),
    "stages of a module in a thread": (lambda: exits(method="thread").stage(0, (IMAGES,)), StateError, "use exits(x)"),
    "the cost of a module without exits": (lambda: measure_cost(body(), IMAGES), OptionError, "anytime.attach_exits"),  # type: ignore[arg-type]
    "the cost for a text": (lambda: measure_cost(exits(), "a cat"), DtypeError, "example is"),  # type: ignore[arg-type]
    "an encoder without token ids": (lambda: encoder()({"ids": IDS}), InputError, "return_tensors='pt'"),
    "a stage of an encoder with a mask": (lambda: encoder().stage(0, (IDS, MASK)), ShapeError, "token_ids(encoded)"),
    "an encoder with padding at the start": (
        lambda: encoder()({"input_ids": IDS, "attention_mask": MASK.flip(1)}),
        InputError,
        "padding_side = 'right'",
    ),
    "exits on a script": (lambda: exits(scripted()), OptionError, "pass the module that was scripted or traced"),
    "exits on a model with exits": (lambda: exits(exits()), OptionError, "attach all exits at once"),
    "a head of another width": (lambda: exits(head=lambda shape: nn.Linear(3, 2)), OptionError, "the head at '0' fails"),
    "one logit": (named(lambda logits: logits[:, :1]), ShapeError, "-z / 2 and z / 2"),
    "logits of a sigmoid": (named(lambda logits: logits[:, 0]), ShapeError, "-z / 2 and z / 2"),
    "logits of tokens": (named(lambda logits: logits[:, None]), ShapeError, "docs/dense.md"),
    "a list of logits": (named(lambda logits: [logits, logits]), ShapeError, "from_outputs(module, example=x)"),
    "inputs by position for names": (lambda: exits(Named(list), ["blocks.0"], (IDS, MASK)), InputError, "a dict by name"),
    "a percentage as a place": (lambda: exits(at=[50]), OptionError, "0.5 for half of the MACs"),
    "an index as a place": (lambda: exits(at=[3]), OptionError, "in quotes: '3'"),
    "more fractions than blocks": (lambda: exits(at=[0.2, 0.4, 0.6, 0.8]), OptionError, "no block is left for the fraction"),
    "an encoder with a mask of another shape": (
        lambda: encoder()({"input_ids": IDS, "attention_mask": MASK[:, :2]}),
        ShapeError,
        "that of input_ids",
    ),
}


@pytest.mark.parametrize("mistake", CALLS)
def test_a_mistake_is_explained(mistake: str, explained: Any) -> None:
    explained(*CALLS[mistake])
