"""Output in a terminal: consoles that print text literally, and tables that become lists where they do not fit.

This module imports rich, so commands import it only when they print.
"""

import os
import textwrap
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ghostnoise.text import printable, wrapped

MANY_ROWS = 300  # above, rich would take seconds
MISSING = ("", "–")  # texts of cells without a value, which a list leaves out
LEAST_WRAPPED = 24  # characters of a column that wraps, below which it is hard to read


class LiteralConsole(Console):
    """A console without markup and highlighting, which escapes control characters other than line breaks.

    The names of runs, methods and settings can contain anything.
    """

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, width: int | None = None) -> None:
        super().__init__(stderr=stderr, file=file, width=width, markup=False, highlight=False, emoji=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects; in a terminal, lines of text with `soft_wrap` are broken between words, not within them."""
        if options.get("soft_wrap") and self.is_terminal:
            objects = tuple(wrapped(each, self.width) if isinstance(each, str) else each for each in objects)
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text, of a line or of a cell of a table, as it is shown."""
        shown = "\n".join(printable(line) for line in text.replace("\t", "    ").split("\n"))
        return super().render_str(shown, **options | {"markup": False, "emoji": False})


def print_table(console: Console, table: Table, titles: int = 1, one_line: bool = False) -> None:
    """Print a table, or a list if the terminal is too narrow for it; `titles` columns are the title of each paragraph.

    Without a terminal, as in a pipe, the table is as wide as it needs to be; with `one_line`, each row is then a line.
    In long tables, each row is a line in any case.
    """
    needed = needed_width(table)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = max(console.width, needed_width(table, wrap=False) if one_line else needed)
    if needed <= console.width:
        if table.row_count > MANY_ROWS:
            console.out("\n".join(aligned(table)), highlight=False)
        else:
            console.print(table)
        return
    heading = table.title or " ".join(_heading(column) for column in table.columns[:titles])
    console.print(Text(_plain(heading), style="bold"), soft_wrap=True)
    for text in (*listed(table, console.width, titles), table.caption):
        if text:
            console.print(Text(_plain(text)), soft_wrap=True)


def needed_width(table: Table, wrap: bool = True) -> int:
    """Return the width at which no cell is cut off, and columns that wrap have a readable width or do not wrap."""
    padding = table.padding[1] + table.padding[3] if isinstance(table.padding, tuple) else 0
    borders = 0 if table.box is None else len(table.columns) - 1 + 2 * table.show_edge
    return sum(_column_width(column, wrap) + padding for column in table.columns) + borders


def aligned(table: Table) -> list[str]:
    """Return the lines of a table in which nothing is wrapped, as rich draws it with `box.SIMPLE_HEAD`."""
    padding = table.padding if isinstance(table.padding, tuple) else (0, 0, 0, 0)
    left, right = " " * padding[3], " " * padding[1]
    columns = []
    for column in table.columns:
        width = _column_width(column, wrap=False)
        cells = [_heading(column), *map(_plain, column.cells)]
        after = column.justify == "right"
        padded = [" " * (width - cell_len(cell)) for cell in cells]
        columns.append(
            [left + (pad + cell if after else cell + pad) + right for cell, pad in zip(cells, padded, strict=True)]
        )
    heading, *rows = (" ".join(cells) for cells in zip(*columns, strict=True))
    edge = " " if table.show_edge else ""
    lines = [edge + heading, edge + "─" * cell_len(heading), *(edge + row for row in rows)]
    return ["", *(line.rstrip() for line in lines), ""]


def listed(table: Table, width: int, titles: int = 1) -> list[Text]:
    """Return the rows as paragraphs: the first cells, and indented below them the other headings and values."""

    headings = [_heading(column) for column in table.columns[titles:]]
    rows = zip(*([_plain(cell) for cell in column.cells] for column in table.columns), strict=True)
    paragraphs = []
    for row in rows:
        values = [" ".join(value.split()) for value in row[titles:]]
        pairs = [
            f"{heading}: {value}" if heading else value
            for heading, value in zip(headings, values, strict=True)
            if value not in MISSING
        ]
        # A pair that fits into a line is not broken.
        kept = [pair.replace(" ", "\N{NO-BREAK SPACE}") if len(pair) < width - 3 else pair for pair in pairs]
        body = textwrap.fill(
            "; ".join(kept), max(width, 20), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        title = " ".join(value.strip() for value in row[:titles])
        paragraphs.append(Text("\n".join([title, *body.replace("\N{NO-BREAK SPACE}", " ").splitlines()])))
    return paragraphs


def _heading(column: Column) -> str:
    return " ".join(_plain(column.header).replace("-\n", "-").split())


def _column_width(column: Column, wrap: bool) -> int:
    if column.width is not None:
        return column.width

    header = max([cell_len(line) for line in _plain(column.header).splitlines()] + [0])
    longest = max([cell_len(line) for cell in column.cells for line in _plain(cell).splitlines()] + [0])
    wrapped = column.min_width or min(longest, LEAST_WRAPPED)
    return max(header, wrapped if wrap and not column.no_wrap else longest, column.min_width or 0)


def _plain(cell: Any) -> str:
    """Return the text of a cell, which has no markup."""
    return "\n".join(map(printable, str(cell).split("\n")))
