"""HTML out of texts that may hold anything: every text is escaped here, and nowhere else."""

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


def text(value: object) -> str:
    """Escaped, also for attributes."""
    return html.escape(str(value), quote=True)


def json_in_html(value: Any) -> str:
    """JSON that no HTML parser can take for markup."""
    made = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        made = made.replace(sign, f"\\u{ord(sign):04x}")
    return made


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what it shows, and the number it is sorted by if it has one."""

    shown: str
    number: float | None = None
    label: str = ""
    """A class of the style sheet, shown as a label."""


def table(name: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[Cell | str]]) -> str:
    """A table that is sorted by its headings, and scrolls by itself where it is too wide."""
    made = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    numeric = [any(row[at].number is not None for row in made) for at in range(len(headings))]
    head = "".join(
        f'<th scope="col" aria-sort="none"{" class=number" if right else ""}><button type="button" class="sort" '
        f'id="{name}-{at}">{text(heading)}<span class="arrow" aria-hidden="true"></span></button></th>'
        for at, (heading, right) in enumerate(zip(headings, numeric, strict=True))
    )
    body = "".join(
        f"<tr>{''.join(_cell(cell, not at, numeric[at]) for at, cell in enumerate(row))}</tr>\n" for row in made
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
        f'<table class="sortable" id="{name}"><caption>{text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n"
    )


def section(name: str, heading: str, *content: str) -> str:
    """A part of the page with a heading of its own."""
    inner = "\n".join(each for each in content if each)
    return (
        f'<section aria-labelledby="{name}-h" id="{name}"><h2 id="{name}-h">{text(heading)}</h2>\n{inner}</section>\n'
    )


def items(texts: Iterable[str]) -> str:
    """A list of texts, or nothing."""
    made = "".join(f"<li>{text(each)}</li>" for each in texts)
    return f"<ul>{made}</ul>" if made else ""


def label(shown: str, kind: str) -> str:
    """A word in a coloured frame; the word says it too."""
    return f'<span class="label {kind}">{text(shown)}</span>'


def _cell(cell: Cell, heading: bool, right: bool) -> str:
    inner = label(cell.shown, cell.label) if cell.label else text(cell.shown)
    tag = 'th scope="row"' if heading else "td"
    sort = "" if cell.number is None else f' data-number="{cell.number!r}"'
    return f"<{tag}{' class=number' if right else ''}{sort}>{inner}</{tag[:2]}>"
