"""The diagram of how the library is built: a batch, forward and backward, and an experiment.

`python docs/site/diagram.py` writes docs/walks.svg; a test compares the file.
"""

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parents[1]
WIDTH, BOX, HIGH, GAP, LEFT = 1000, 172, 74, 22, 26
LANE, ROW = HIGH + 18, HIGH + 62
INK, MUTED, LINE = "#1f2933", "#52606d", "#9aa5b1"


class Box(NamedTuple):
    """A step: its title, a line about it, and the file or folder of src/ghostnoise that contains it.

    It stands in a column and a lane of its walk, and may span several columns.
    """

    title: str
    about: str
    path: str
    column: int
    lane: float = 0
    span: int = 1


class Walk(NamedTuple):
    """Steps, and the arrows between them."""

    title: str
    color: str
    boxes: tuple[Box, ...]
    arrows: tuple[tuple[int, int], ...]
    lanes: int = 1


WALKS = (
    Walk("A batch, forward: the general level, or one fused operator", "#e3f2fd", (
        Box("layer", "state, one call", "methods/base.py", 0, 0.5),
        Box("function", "checks, draws", "methods/ghost_noise.py", 1, 0.5),
        Box("moments", "mean, var: (B, C)", "engine/ops.py", 2),
        Box("decide", "center, scale, shift", "tables.py", 3),
        Box("transform", "y = scale·(x − c) + shift", "engine/ops.py", 4),
        Box("normalize", "BN, GBN, XBN, BRN and BN with ghost noise, in one call", "engine/fused.py", 2, 1, 3),
    ), ((0, 1), (1, 2), (2, 3), (3, 4), (1, 5)), lanes=2),
    Walk("A batch, backward: the general level", "#fff3e0", (
        Box("dy", "with x and the tables", "engine/general.py", 4),
        Box("gradient sums", "Σ dy, Σ dy·(x − c)", "engine/ops.py", 3),
        Box("autograd", "decide, differentiated", "tables.py", 2),
        Box("input gradient", "three terms, one write", "engine/ops.py", 1),
        Box("dx", "and of parameters", "engine/general.py", 0),
    ), ((0, 1), (1, 2), (2, 3), (3, 4))),
    Walk("An experiment", "#e8f5e9", (
        Box("recipe", "settings, grid, claims", "lab/recipes", 0),
        Box("runs", "what is missing", "lab/sweep", 1),
        Box("train", "resumes exactly", "lab/train", 2),
        Box("store", "curve, result, hash", "lab/store", 3),
        Box("report", "tables with intervals", "lab/report", 4),
    ), ((0, 1), (1, 2), (2, 3), (3, 4))),
)  # fmt: skip


def svg() -> str:
    """Return the diagram."""
    high = 20 + sum(ROW + (walk.lanes - 1) * LANE for walk in WALKS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" height="{high}" '
        'font-family="system-ui, sans-serif" role="img" aria-label="How a batch and an experiment pass through the '
        'code">',
        f'<rect width="{WIDTH}" height="{high}" rx="8" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{LINE}"/></marker></defs>',
    ]
    top = 20
    for walk in WALKS:
        parts += _walk(walk, top)
        top += ROW + (walk.lanes - 1) * LANE
    return "\n".join([*parts, "</svg>", ""])


def _walk(walk: Walk, top: int) -> list[str]:
    parts = [f'<text x="{LEFT}" y="{top + 14}" font-size="17" font-weight="600" fill="{INK}">{walk.title}</text>']
    for box in walk.boxes:
        x, y, width = _place(box, top)
        parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{HIGH}" rx="6" fill="{walk.color}" '
                     f'stroke="{LINE}"/>')  # fmt: skip
        lines = ((box.title, 16, 22, INK, "600"), (box.about, 13, 42, INK, "400"), (box.path, 12, 62, MUTED, "400"))
        parts += [
            f'<text x="{x + width // 2}" y="{y + down}" font-size="{size}" font-weight="{weight}" fill="{color}" '
            f'text-anchor="middle">{escape(text)}</text>'
            for text, size, down, color, weight in lines
        ]
    for start, end in walk.arrows:
        (x, y, width), (to_x, to_y, to_width) = (_place(walk.boxes[at], top) for at in (start, end))
        ends = (x + width + 3, to_x - 3) if to_x > x else (x - 3, to_x + to_width + 3)
        parts.append(f'<line x1="{ends[0]}" y1="{y + HIGH // 2}" x2="{ends[1]}" y2="{to_y + HIGH // 2}" '
                     f'stroke="{LINE}" stroke-width="2" marker-end="url(#tip)"/>')  # fmt: skip
    return parts


def _place(box: Box, top: int) -> tuple[int, int, int]:
    """Return the left edge, the upper edge and the width of a box."""
    return LEFT + box.column * (BOX + GAP), top + 30 + round(box.lane * LANE), box.span * (BOX + GAP) - GAP


if __name__ == "__main__":
    (DOCS / "walks.svg").write_text(svg(), encoding="utf-8")
