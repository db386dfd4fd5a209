"""What the inputs of a trained network are: how images were normalised, and the names of the classes.

A training run and `anytime.save` store it as `data.json`. Without it, or a known data set, images are refused: a network that
gets pixels on another scale gives meaningless answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anytime.artifacts import check_sealed, read_sealed
from anytime.data.cifar import STATISTICS
from anytime.data.imagenet import MEAN, STD
from anytime.errors import FormatError, MissingFileError, OptionError
from anytime.reading import is_file, json_from, parsing, read_file
from anytime.safe_text import printable

DATA = "data.json"
_EXPECTED, _FIX = "name, mean, std and class_names, as a training run writes them", "copy it again from its folder"


@dataclass(frozen=True)
class Description:
    """How the images of a data set were normalised, and the names of its classes, if known."""

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...] | None = None

    def word(self, label: int) -> str:
        """The name of a class."""
        return f"class {label}" if self.class_names is None else printable(self.class_names[label])


KNOWN = {
    **{name: Description(name, *statistics) for name, statistics in STATISTICS.items()},
    "imagenet": Description("imagenet", MEAN, STD),
}


def describe_data(name: str, normalisation: Any, class_names: Sequence[str] | None, classes: int | None) -> Description | None:
    """The description of what a caller says about a model's inputs; None if nothing is said.

    Args:
        name: The name of the data.
        normalisation: One of `KNOWN`, or the mean and the standard deviation of each channel.
        class_names: In the order of the logits.
        classes: The number of classes, if known.
    """
    if class_names is not None:
        words = [class_names] if isinstance(class_names, str) else list(class_names)
        if not all(isinstance(word, str) for word in words) or len(words) != (len(words) if classes is None else classes):
            raise OptionError(
                f"class_names has {len(words)} entries",
                expected=f"{'one name' if classes is None else f'{classes} names, one'} per class, in the order of the logits",
                fix="pass a list of texts",
            )
    elif normalisation is None:
        return None
    if isinstance(normalisation, str) and normalisation in KNOWN:
        known = KNOWN[normalisation]
        name, mean, std = known.name, known.mean, known.std
    else:
        name, mean, std = name, *_statistics(normalisation)
    return Description(name, mean, std, None if class_names is None else tuple(class_names))


def _statistics(normalisation: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    try:
        mean, std = ((), ()) if normalisation is None else (tuple(float(part) for part in each) for each in normalisation)
        if len(mean) == len(std) and all(part > 0 for part in std) and all(map(math.isfinite, (*mean, *std))):
            return mean, std
    except (TypeError, ValueError):
        pass
    raise OptionError(
        f"normalisation is {normalisation!r}"[:200],
        expected=f"the mean and the standard deviation of each channel, or one of {', '.join(KNOWN)}",
        fix="pass normalisation=([0.5, 0.5, 0.5], [0.25, 0.25, 0.25]) for pixels from 0 to 1",
    )


def read_description(path: Path, *, sealed: bool = False) -> Description:
    """The data.json of a run.

    Args:
        path: The file.
        sealed: Whether it must be in the manifest of its folder; one that the caller names may be anywhere.
    """
    if not is_file(path):
        raise MissingFileError(
            f"there is no data set {str(path)!r}",
            expected=f"one of {', '.join(KNOWN)}, or the {DATA} of a training run",
            fix="check the name or the path",
            path=path,
        )
    check_sealed(path)
    data = read_sealed(path.parent, path.name) if sealed else read_file(path, expected=_EXPECTED, fix=_FIX)
    return description_from(data, path)


def description_from(data: bytes, path: Path) -> Description:
    """The description in the bytes of a data.json."""
    stored = json_from(data, path, expected=_EXPECTED, fix=_FIX)
    with parsing(path, expected=_EXPECTED, fix=_FIX, kind=FormatError, what="does not describe a data set"):
        mean, std = (tuple(float(part) for part in stored[key]) for key in ("mean", "std"))
        words = stored["class_names"]
        found = Description(str(stored["name"]), mean, std, None if words is None else tuple(str(word) for word in words))
        if len(found.mean) != len(found.std) or not all(part > 0 for part in found.std):
            raise ValueError("mean and std do not belong together")
    return found
