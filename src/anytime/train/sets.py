"""The data of a run by name: training rows, validation rows split off them, test rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from anytime.data.base import ImageData, StreamedImages
from anytime.data.cifar import load_cifar
from anytime.data.digits import load_digits
from anytime.data.imagenet import load_imagenet
from anytime.data.split import Split, hold_out
from anytime.models.base import MultiExit
from anytime.train.logits import Evaluation
from anytime.train.settings import RunConfig
from anytime.train.stream import StreamedEvaluation

Images = ImageData | StreamedImages


@dataclass(frozen=True, eq=False)
class Sets:
    """What a run learns from and is measured on.

    Attributes:
        train: Rows to learn from.
        val: Rows held out; none where none are.
        test: Rows nothing is chosen by.
        split: Which of the training rows are held out; none where the data set comes in three parts.
    """

    train: Images
    val: Images | None
    test: Images
    split: Split | None = None

    @property
    def streamed(self) -> bool:
        """Whether the images are read as they are needed."""
        return not isinstance(self.train, ImageData)


def open_sets(config: RunConfig) -> Sets:
    """The data that a run's settings name."""
    if config.data == "digits":
        parts = {name: _doubled(part) for name, part in load_digits(channels=3, seed=config.split_seed).items()}
        return Sets(parts["train"], parts["val"], parts["test"])
    root = config.root or "."
    if config.data == "imagenet":
        folders = load_imagenet(root, workers=config.workers)
        return _held_out(folders["train"], folders["test"], config)
    images = load_cifar(config.data, root)
    return _held_out(images["train"], images["test"], config)


def measure(model: MultiExit, data: Images, *, graph: bool = False) -> Evaluation:
    """The evaluation that fits a data set."""
    return Evaluation(model, data, graph=graph) if isinstance(data, ImageData) else StreamedEvaluation(model, data)


def _held_out(train: Any, test: Any, config: RunConfig) -> Sets:
    split = hold_out(len(train), config.held_out, seed=config.split_seed)
    kept, val = split.apply(train)
    return Sets(kept, val if len(val) else None, test, split)


def _doubled(data: ImageData) -> ImageData:
    """Each pixel twice in both directions: 8 × 8 is too small for a network with two scales."""
    return replace(data, images=data.images.repeat_interleave(2, -1).repeat_interleave(2, -2))
