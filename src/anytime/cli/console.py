"""The terminal that tables and progress are drawn on."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.text import Text

from anytime.safe_text import printable

_NARROWEST, _WIDEST = 20, 1000


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Pass the error on: rich would leave with exit code 1 though nothing has failed."""
        raise

    def render_str(self, text: str, **options: Any) -> Text:
        """Cells may be other people's texts: escape codes in them are shown, not obeyed."""
        return super().render_str(printable(text, lines=True), **options)


def make_console(*, stderr: bool = False, **options: Any) -> Console:
    """A console of rich that shows texts as they are, without markup or emoji.

    A width from the environment that no table can be drawn in is not used.
    """
    given = {**os.environ}
    for name in ("COLUMNS", "LINES"):
        size = given.get(name, "")
        if not (size.isascii() and size.isdigit() and len(size) < 9 and _NARROWEST <= int(size) <= _WIDEST):
            given.pop(name, None)
    return _Terminal(stderr=stderr, markup=False, emoji=False, _environ=given, **options)
