"""Tables of text: printed they are aligned, in a notebook they are HTML, and `rows` can go anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from anytime.safe_text import printable


@dataclass(frozen=True, repr=False)
class Table:
    """Numbers as text; the first cell of each row is its heading.

    `str(table)` is aligned text, and notebooks show it as HTML. `pandas.DataFrame(table.rows, columns=table.columns)` makes a
    data frame.

    Attributes:
        caption: What the numbers are.
        columns: The headings of the columns.
        rows: The cells.

    Example:
        >>> Table("Two exits", ("", "exit 1", "exit 2"), (("accuracy", "61 %", "72 %"),))
        Two exits
                  exit 1  exit 2
        accuracy    61 %    72 %
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        cells = [[printable(cell) for cell in row] for row in (self.columns, *self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.columns))]
        lines = [
            "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs)).rstrip()
            for pairs in (list(zip(row, widths, strict=True)) for row in cells)
        ]
        return "\n".join([printable(self.caption), *lines] if self.caption else lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks; the colours are those of the notebook."""
        head = _row("th", self.columns)
        body = "".join(_row("td", row) for row in self.rows)
        caption = f'<caption style="{_CAPTION}">{escape(printable(self.caption))}</caption>' if self.caption else ""
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"


class Displayed:
    """What has a table: notebooks show its `repr` in one line and the table below it."""

    def table(self) -> Table:
        """The numbers as a table."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return f"<p><code>{escape(printable(repr(self)))}</code></p>{self.table()._repr_html_()}"


def exit_table(caption: str, exits: int, rows: Sequence[tuple[str, ...]], *, heading: str = "rule") -> Table:
    """A table with one column per exit."""
    return Table(caption, (heading, *(f"exit {exit}" for exit in range(1, exits + 1))), tuple(rows))


_CAPTION = "text-align:left;font-weight:600;caption-side:top;white-space:nowrap"


def _row(tag: str, cells: Sequence[str]) -> str:
    parts = [
        f'<{tag} style="padding:2px 8px;text-align:{"right" if column else "left"}">{escape(printable(cell))}</{tag}>'
        for column, cell in enumerate(cells)
    ]
    return f"<tr>{''.join(parts)}</tr>"
