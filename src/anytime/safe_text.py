"""Untrusted text made safe for a terminal or a spreadsheet.

Class names, file names, rules and settings may come from anywhere. A terminal would execute escape codes in them, and a
spreadsheet would evaluate a cell that begins with `=`.
"""

from __future__ import annotations

import builtins
import re
from typing import TextIO

# Control characters, marks of direction or without width, and lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff\U000e0000-\U000e0fff]"
)
_UNSAFE_IN_LINES = re.compile(f"(?![\n\t]){_UNSAFE.pattern}")
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with control and invisible characters as escapes such as `\x1b`; `lines` keeps line ends and tabs.

    Example:
        >>> print(printable("cat\x1b[2J"))
        cat\x1b[2J
    """
    return (_UNSAFE_IN_LINES if lines else _UNSAFE).sub(_escaped, text)


def print_safely(*values: object, file: TextIO | None = None, flush: bool = False) -> None:
    """Print values through `printable`."""
    builtins.print(*(printable(str(value), lines=True) for value in values), file=file, flush=flush)


def csv_cell(value: object) -> object:
    """A cell that a spreadsheet does not evaluate as a formula; numbers stay numbers.

    Example:
        >>> csv_cell("=1+1"), csv_cell("product"), csv_cell(-0.5)
        ("'=1+1", 'product', -0.5)
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
