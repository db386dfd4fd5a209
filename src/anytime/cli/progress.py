"""Progress on stderr: a bar with a rate and an end on a terminal, silence elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def rows_bar(what: str, unit: str = "rows") -> Iterator[Callable[[int, int], None]]:
    """A function of (done, total) that moves a bar."""
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    from anytime.cli.console import make_console

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:,.0f} {unit}/s" if task.speed else "")

    console = make_console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.percentage:3.0f} %"), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
