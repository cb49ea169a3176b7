"""HTML of texts that may contain anything: all text of the page is escaped here."""

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

EMPTY = ("", "–")  # texts of cells without a value


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
    color: tuple[str, str] | None = None
    """A colour for light and one for dark pages; a dot of it is then shown before the text."""


def table(name: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[TableCell | str]]) -> str:
    """Return a table that is sorted by clicking its headings, and that scrolls if it is too wide.

    Columns without any value are left out; the ids of the headings keep the numbers of all columns.
    """
    cells = [[cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row] for row in rows]
    kept = [at for at in range(len(headings)) if not at or any(row[at].shown not in EMPTY for row in cells)]
    numeric = {at for at in kept if any(row[at].number is not None for row in cells)}
    head = "".join(
        f'<th scope="col" aria-sort="none"{" class=n" if at in numeric else ""}><button type="button" class="sort" '
        f'id="{name}-{at}">{text(headings[at])}<span class="arrow" aria-hidden="true"></span></button></th>'
        for at in kept
    )
    body = "".join(f"<tr>{''.join(_cell(row[at], not at, at in numeric) for at in kept)}</tr>\n" for row in cells)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
        f'<table class="sortable" id="{name}"><caption><span>{text(caption)}</span></caption>'
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
    if cell.color:
        inner = f'<span class="dot tint" style="--l:{cell.color[0]};--d:{cell.color[1]}"></span>{inner}'
    tag = 'th scope="row"' if heading else "td"
    known = cell.number is None or _reads_as(cell.shown, cell.number)
    sort = "" if known else f' data-number="{cell.number:.8g}"'
    return f"<{tag}{' class=n' if right else ''}{sort}>{inner}</{tag[:2]}>"


def _reads_as(shown: str, number: float) -> bool:
    """Return whether the page reads this number from the text, up to the digits that are shown."""
    try:
        return math.isclose(float(shown.replace(",", "")), number, rel_tol=1e-3, abs_tol=5e-3)
    except ValueError:
        return False
