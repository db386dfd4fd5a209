"""Small runs on synthetic texts, in place of those on published data sets: short sentences, most with a word of their class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from anytime.data.text import TextData, TokenData, collect_vocabulary, draw_classes, take_classes, tokenize
from anytime.models import create
from anytime.reproduce.needs import OUT_OF_SCOPE, SINGLE_HEAD, SOME_CLASSES, TEXT, Need
from anytime.reproduce.runs import Run
from anytime.train.config import TrainConfig
from anytime.train.data.tokens import TokenEvaluation
from anytime.train.loop import fit

_NAME = "synthetic texts"
_CLASSES, _SOME = 8, (2, 4)
_WORDS = ("and", "in", "is", "it", "near", "not", "of", "or", "that", "the", "there", "to", "was", "with")
_COMMON, _TRUE, _LENGTH = 5, 0.8, 12
_UNSEEN = 240


def on_texts(need: Need, *, rows: int, epochs: int) -> Sequence[Run]:
    """Runs for a need of texts, trained on so many rows and epochs; empty for any other need."""
    if need in (TEXT, OUT_OF_SCOPE):
        return (_train(None, False, rows, epochs),)
    if need == SINGLE_HEAD:
        return (_train(None, True, rows, epochs),)
    return tuple(_train(classes, False, rows, epochs) for classes in _SOME) if need == SOME_CLASSES else ()


@cache
def _train(classes: int | None, single: bool, rows: int, epochs: int) -> Run:
    """A small encoder on all classes or some, with the logits of its validation and test rows."""
    parts = {"train": _write(rows, seed=0), "val": _write(_UNSEEN, seed=1), "test": _write(_UNSEEN, seed=2)}
    if classes is not None:
        chosen = draw_classes(_CLASSES, classes)
        parts = {split: take_classes(part, chosen) for split, part in parts.items()}
    tokenizer = collect_vocabulary(parts["train"].texts, size=200)
    tokens = {split: tokenize(part, tokenizer, length=_LENGTH) for split, part in parts.items()}
    outside = tokenize(_write(_UNSEEN, seed=3, outside=True), tokenizer, length=_LENGTH)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"layers": (3,), "head": "plain"} if single else {}
        model = create("encoder-tiny", classes=parts["train"].classes, vocabulary=len(tokenizer), **options)
    fit(model, tokens["train"], TrainConfig(epochs=epochs, batch=16, optimizer="adamw", lr=2e-3, schedule="linear"))

    def logits(data: TokenData) -> torch.Tensor:
        return TokenEvaluation(model, data).logits()

    stored = {split: (logits(tokens[split]), tokens[split].labels) for split in ("test", "val")}
    network, data = "minilm-single" if single else "minilm", _NAME if classes is None else f"{_NAME}-{classes}"
    return Run(
        f"{data} (stand-in{', single head' if single else ''})", network, data, 0, stored=stored, outside=logits(outside)
    )


def _write(rows: int, *, seed: int, outside: bool = False) -> TextData:
    """Sentences of common words and one word of a class, in four out of five the label's; `outside` have no such word."""
    draw = np.random.RandomState(seed)
    labels = draw.permutation(np.arange(rows) % _CLASSES)
    texts = []
    for label in labels:
        words = [_WORDS[at] for at in draw.randint(len(_WORDS), size=_COMMON)]
        own = label if draw.rand() < _TRUE else draw.randint(_CLASSES)
        texts.append(" ".join(words if outside else [*words[:2], f"{chr(97 + own)}-word", *words[2:]]))
    names = tuple(f"class {label + 1}" for label in range(_CLASSES))
    return TextData(_NAME, "train", tuple(texts), torch.from_numpy(labels).long(), names, torch.arange(rows))
