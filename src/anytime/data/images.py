"""Images decoded by Pillow: a few formats, a bounded number of pixels, and typed errors.

Pillow detects about forty formats by their content and starts other programs for some of them (Ghostscript for PostScript), so
only the listed formats are tried.
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
_FIX = "check that the image opens in a viewer, and save it again"


def decode_image(
    file: IO[bytes],
    path: str | Path,
    *,
    mode: str = "RGB",
    formats: Sequence[str] = FORMATS,
    most: int = MOST_PIXELS,
    fix: str = _FIX,
) -> Image:
    """Decode the first image in an open file.

    Args:
        file: The file.
        path: Its name in errors.
        mode: Mode of the result, `RGB` or `L`.
        formats: Pillow's names of the formats to try.
        most: The largest number of pixels.
        fix: The fix in the error if the file cannot be decoded.
    """
    module = pillow()
    names = ", ".join(formats)
    with (
        parsing(path, expected=f"an image: {names}", fix=fix, what="cannot be decoded as an image"),
        module.open(file, formats=formats) as image,
    ):
        if image.width * image.height > most:
            raise FormatError(
                f"{path} has {image.width:,} × {image.height:,} pixels",
                expected=f"at most {most:,} pixels",
                fix="resize the image",
                path=path,
            )
        # Pillow clips 16-bit values at 255 instead of scaling them.
        scaled = image.point(lambda value: value / 256).convert("L") if image.mode.startswith("I;16") else image
        decoded: Image = scaled.convert(mode)
        return decoded


def read_image(path: Path, *, mode: str = "RGB", formats: Sequence[str] = FORMATS, fix: str = _FIX) -> Image:
    """Decode the image in a file; see `decode_image`."""
    with open_file(path, expected=f"an image: {', '.join(formats)}", fix=fix) as file:
        return decode_image(file, path, mode=mode, formats=formats, fix=fix)


def pillow() -> Any:
    """Import `PIL.Image`."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise MissingExtraError(
            "the package pillow, which decodes images, is not installed",
            expected="pillow",
            fix="pip install pillow; pixels in a .npy file and CIFAR's official archive do not need it",
        ) from error
