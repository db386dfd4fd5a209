"""The terminal on which tables and progress bars are drawn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from anytime.safe_text import printable

if TYPE_CHECKING:
    from anytime.display.table import Table as Cells

_NARROWEST, _WIDEST = 20, 1000


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error again: rich would exit with code 1 although nothing has failed."""
        raise

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape control codes: cells may contain text of unknown origin."""
        return super().render_str(printable(text, lines=True), **options)


def make_console(*, stderr: bool = False, **options: Any) -> Console:
    """A rich console without markup or emoji; a width in the environment that is too small or too large is ignored."""
    given = {**os.environ}
    for name in ("COLUMNS", "LINES"):
        size = given.get(name, "")
        if not (size.isascii() and size.isdigit() and len(size) < 9 and _NARROWEST <= int(size) <= _WIDEST):
            given.pop(name, None)
    return _Terminal(stderr=stderr, markup=False, emoji=False, _environ=given, **options)


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", numeric: bool = True, section: int | None = None
) -> None:
    """Print a table to stdout.

    Args:
        headings: Of the columns; the first column is aligned left unless it has numbers.
        rows: The cells.
        title: Above the table.
        numeric: Align the other columns right.
        section: Number of rows above a horizontal line.
    """
    cells = list(rows)
    table = Table(title=title or None, title_justify="left")
    for index, heading in enumerate(headings):
        right = numeric and (index > 0 or all(row[0].isdigit() for row in cells))
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for index, row in enumerate(cells, 1):
        table.add_row(*row, end_section=index == section)
    make_console().print(table)


def show_table(table: Cells) -> None:
    """Print a table of numbers to stdout."""
    print_table(table.columns, table.rows, title=table.caption)


def print_line(text: str) -> None:
    """Print a line to stdout that is not wrapped."""
    make_console().print(text, soft_wrap=True, highlight=False)


@contextmanager
def progress_bar(what: str, unit: str = "rows") -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total) that updates a progress bar on stderr; silent unless stderr is a terminal."""
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:,.0f} {unit}/s" if task.speed else "")

    console = make_console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.percentage:3.0f} %"), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
