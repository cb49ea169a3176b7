"""HTML of texts that may contain anything: all text of the page is escaped here."""

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


def text(value: object) -> str:
    """Escape a text for elements and attributes."""
    return html.escape(str(value), quote=True)


def json_in_html(value: Any) -> str:
    """Return JSON without any character that an HTML parser could read as markup."""
    encoded = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        encoded = encoded.replace(character, f"\\u{ord(character):04x}")
    return encoded


@dataclass(frozen=True)
class TableCell:
    """A cell of an HTML table: its text, and the number by which it is sorted if it has one."""

    shown: str
    number: float | None = None
    label: str = ""
    """A class of the style sheet; the text is then shown as a label."""


def table(name: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[TableCell | str]]) -> str:
    """Return a table that is sorted by clicking its headings, and that scrolls if it is too wide."""
    cells = [[cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row] for row in rows]
    numeric = [any(row[at].number is not None for row in cells) for at in range(len(headings))]
    head = "".join(
        f'<th scope="col" aria-sort="none"{" class=number" if right else ""}><button type="button" class="sort" '
        f'id="{name}-{at}">{text(heading)}<span class="arrow" aria-hidden="true"></span></button></th>'
        for at, (heading, right) in enumerate(zip(headings, numeric, strict=True))
    )
    body = "".join(
        f"<tr>{''.join(_cell(cell, not at, numeric[at]) for at, cell in enumerate(row))}</tr>\n" for row in cells
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
        f'<table class="sortable" id="{name}"><caption>{text(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>\n"
    )


def section(name: str, heading: str, *content: str) -> str:
    """Return a section of the page with its heading."""
    inner = "\n".join(each for each in content if each)
    return (
        f'<section aria-labelledby="{name}-h" id="{name}"><h2 id="{name}-h">{text(heading)}</h2>\n{inner}</section>\n'
    )


def items(texts: Iterable[str]) -> str:
    """Return a list of texts; empty if there are none."""
    entries = "".join(f"<li>{text(each)}</li>" for each in texts)
    return f"<ul>{entries}</ul>" if entries else ""


def label(shown: str, kind: str) -> str:
    """Return a word in a coloured frame; the meaning does not depend on the colour."""
    return f'<span class="label {kind}">{text(shown)}</span>'


def _cell(cell: TableCell, heading: bool, right: bool) -> str:
    inner = label(cell.shown, cell.label) if cell.label else text(cell.shown)
    tag = 'th scope="row"' if heading else "td"
    sort = "" if cell.number is None else f' data-number="{cell.number!r}"'
    return f"<{tag}{' class=number' if right else ''}{sort}>{inner}</{tag[:2]}>"
