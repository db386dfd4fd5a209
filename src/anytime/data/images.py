"""Pictures decoded by Pillow: a few formats by name, a bounded number of pixels, and typed errors.

Pillow knows some forty formats, goes by the content rather than by the name, and starts other programs for some of them
(Ghostscript for PostScript): whatever is not in the list is not looked at.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from anytime.errors import FormatError, MissingExtraError
from anytime.reading import open_file, parsing

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MOST_PIXELS = 1 << 26
_FIX = "check that it opens elsewhere"


def decode_image(
    file: IO[bytes],
    path: str | Path,
    *,
    mode: str = "RGB",
    formats: Sequence[str] = FORMATS,
    most: int = MOST_PIXELS,
    fix: str = _FIX,
) -> Image:
    """The first picture in an open file.

    Args:
        file: The file.
        path: What to call it in an error.
        mode: Of the result: `RGB` or `L`.
        formats: The formats to look for, by Pillow's names.
        most: The most pixels it may have.
        fix: What to do about a file that cannot be decoded.
    """
    module = pillow()
    names = ", ".join(formats)
    with (
        parsing(path, expected=f"a picture: {names}", fix=fix, what="cannot be decoded as a picture"),
        module.open(file, formats=formats) as image,
    ):
        if image.width * image.height > most:
            raise FormatError(
                f"{path} has {image.width:,} × {image.height:,} pixels",
                expected=f"at most {most:,} pixels",
                fix="make it smaller",
                path=path,
            )
        # Pillow cuts numbers of 16 bits off at 255 where they ought to be scaled.
        scaled = image.point(lambda value: value / 256).convert("L") if image.mode.startswith("I;16") else image
        decoded: Image = scaled.convert(mode)
        return decoded


def read_image(path: Path, *, mode: str = "RGB", formats: Sequence[str] = FORMATS, fix: str = _FIX) -> Image:
    """The picture in a file; see `decode_image`."""
    with open_file(path, expected=f"a picture: {', '.join(formats)}", fix=fix) as file:
        return decode_image(file, path, mode=mode, formats=formats, fix=fix)


def pillow() -> Any:
    """The module `PIL.Image`, or an error that says what to install."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingExtraError(
            "pictures are decoded by Pillow, which is not installed",
            expected="the package pillow",
            fix="pip install pillow; or give pixels as .npy, and CIFAR as its official archive, which need none",
        ) from error
