"""The data of a run by name: training, validation and test rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anytime.data.base import ImageData, StreamedImages
from anytime.data.cifar import load_cifar
from anytime.data.digits import doubled, load_digits
from anytime.data.imagenet import load_imagenet
from anytime.data.split import Split, hold_out
from anytime.data.text import (
    TextData,
    TokenData,
    collect_vocabulary,
    draw_classes,
    load_text,
    load_tokenizer,
    take_classes,
    tokenize,
)
from anytime.data.tiny_imagenet import SIZE, load_tiny_imagenet
from anytime.data.wordpiece import WordPiece
from anytime.train.data.batches import BatchEvaluation
from anytime.train.data.logits import ExitEvaluation
from anytime.train.data.stream import StreamedEvaluation
from anytime.train.data.tokens import TokenEvaluation
from anytime.train.settings import RunConfig
from anytime.train.start import find_pretrained

Rows = ImageData | StreamedImages | TokenData
# Tokens of a new encoder: most words of the smaller data sets.
_TOKENS = 8192


@dataclass(frozen=True, eq=False)
class Sets:
    """The rows of a run.

    Attributes:
        train: Training rows.
        val: Validation rows, or None.
        test: Test rows.
        split: Which training rows are held out; None for a data set with a validation split.
        tokenizer: The tokenizer of texts.
        others: Rows that belong to no class, by name: `oos`, the out-of-scope queries of CLINC150.
    """

    train: Rows
    val: Rows | None
    test: Rows
    split: Split | None = None
    tokenizer: WordPiece | None = None
    others: Mapping[str, TokenData] = field(default_factory=dict)


def open_sets(config: RunConfig) -> Sets:
    """Load the data of a run."""
    if config.data == "digits":
        parts = {name: doubled(part) for name, part in load_digits(channels=3, seed=config.split_seed).items()}
        return Sets(parts["train"], parts["val"], parts["test"])
    if config.texts:
        return _open_texts(config)
    images = _open_images(config)
    return _held_out(images["train"], images["test"], config)


def measure(model: Any, data: Any, *, graph: bool = False) -> ExitEvaluation:
    """The evaluation for this type of data."""
    if not isinstance(data, Rows):
        return BatchEvaluation(model, data)
    if isinstance(data, TokenData):
        return TokenEvaluation(model, data)
    return ExitEvaluation(model, data, graph=graph) if isinstance(data, ImageData) else StreamedEvaluation(model, data)


def _open_images(config: RunConfig) -> Any:
    root, name = config.root or ".", config.data
    if name == "imagenet":
        return load_imagenet(root, workers=config.workers)
    if name == "tiny-imagenet":
        return load_tiny_imagenet(root, size=config.options.get("image_size", SIZE), workers=config.workers)
    return load_cifar(name, root)  # type: ignore[arg-type]


def _open_texts(config: RunConfig) -> Sets:
    """Texts as tokens. Duplicates, also of test texts, are removed from the training texts."""
    name: Any = config.data
    parts = load_text(name, config.root, distinct=True)
    outside = parts.get("oos_test")
    if config.classes is not None:
        chosen = draw_classes(parts["train"].classes, config.classes, seed=config.split_seed)
        parts = {split: take_classes(parts[split], chosen) for split in ("train", "val", "test") if split in parts}
    tokenizer = _tokenizer(config, parts["train"])
    rows = {split: tokenize(part, tokenizer, length=config.length) for split, part in parts.items() if split[:3] != "oos"}
    train, test = rows["train"], rows["test"]
    sets = Sets(train, rows["val"], test) if "val" in rows else _held_out(train, test, config)
    others = {} if outside is None else {"oos": tokenize(outside, tokenizer, length=config.length)}
    return replace(sets, tokenizer=tokenizer, others=others)


def _tokenizer(config: RunConfig, train: TextData) -> WordPiece:
    """The tokenizer of the initial weights; for a new network, one built from the training texts."""
    if config.init is None:
        return collect_vocabulary(train.texts, size=_TOKENS)
    pretrained = find_pretrained(config.init)
    if pretrained is not None:
        return WordPiece.load(pretrained.vocabulary)
    folder = Path(config.init)
    return load_tokenizer(folder if folder.is_dir() else folder.parent)[0]


def _held_out(train: Any, test: Any, config: RunConfig) -> Sets:
    split = hold_out(len(train), config.held_out, seed=config.split_seed)
    kept, val = split.apply(train)
    return Sets(kept, val if len(val) else None, test, split)
