"""Tables on the terminal, whose cells may be other people's texts."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from anytime.safe_text import printable


class _SafeConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, lines=True), **options)


def console() -> Console:
    """A console for stdout that shows texts as they are: no escape codes, no markup, no emoji in them."""
    return _SafeConsole(markup=False, emoji=False)
