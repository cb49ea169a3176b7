"""The diagram of how the library is built: a batch, forward and backward, and an experiment.

`python docs/site/diagram.py` writes docs/walks.svg; a test compares the file.
"""

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parents[1]
WIDTH, BOX, HIGH, GAP, LEFT = 1000, 164, 74, 28, 26
INK, MUTED, LINE = "#1f2933", "#52606d", "#9aa5b1"


class Box(NamedTuple):
    """A step: its title, a line about it, and the file or folder of src/ghostnoise that contains it."""

    title: str
    about: str
    path: str


class Walk(NamedTuple):
    """Steps from left to right, or from right to left."""

    title: str
    color: str
    boxes: tuple[Box, ...]
    backward: bool = False


WALKS = (
    Walk("A batch, forward", "#e3f2fd", (
        Box("layer", "state, one call", "methods/base.py"),
        Box("function", "checks, draws", "methods/ghost_noise.py"),
        Box("measure", "moments, two (B, C)", "engine/general.py"),
        Box("decide", "center, scale, shift", "tables.py"),
        Box("apply", "y = scale·(x − c) + shift", "engine/ops.py"),
    )),
    Walk("A batch, backward", "#fff3e0", (
        Box("input gradient", "dx, one write", "engine/ops.py"),
        Box("linear term", "slope, center, offset", "engine/general.py"),
        Box("autograd", "decide, differentiated", "tables.py"),
        Box("gradient sums", "Σ dy, Σ dy·(x − mean)", "engine/ops.py"),
        Box("backward", "dy, x, tables", "engine/general.py"),
    ), backward=True),
    Walk("An experiment", "#e8f5e9", (
        Box("recipe", "settings and claims", "lab/config"),
        Box("data, model", "verified, seeded", "lab/models"),
        Box("train", "resumes exactly", "lab/train"),
        Box("run folder", "curve, result, hash", "lab/store"),
        Box("report", "tables with intervals", "lab/report"),
    )),
)  # fmt: skip


def svg() -> str:
    """Return the diagram."""
    row = HIGH + 62
    high = 20 + row * len(WALKS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" height="{high}" '
        'font-family="system-ui, sans-serif" role="img" aria-label="How a batch and an experiment pass through the '
        'code">',
        f'<rect width="{WIDTH}" height="{high}" rx="8" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{LINE}"/></marker></defs>',
    ]
    for at, walk in enumerate(WALKS):
        parts += _walk(walk, 20 + at * row)
    return "\n".join([*parts, "</svg>", ""])


def _walk(walk: Walk, top: int) -> list[str]:
    y = top + 30
    parts = [f'<text x="{LEFT}" y="{top + 14}" font-size="17" font-weight="600" fill="{INK}">{walk.title}</text>']
    for at, box in enumerate(walk.boxes):
        x = LEFT + at * (BOX + GAP)
        parts.append(f'<rect x="{x}" y="{y}" width="{BOX}" height="{HIGH}" rx="6" fill="{walk.color}" '
                     f'stroke="{LINE}"/>')  # fmt: skip
        lines = ((box.title, 16, 22, INK, "600"), (box.about, 13, 42, INK, "400"), (box.path, 12, 62, MUTED, "400"))
        parts += [
            f'<text x="{x + BOX // 2}" y="{y + down}" font-size="{size}" font-weight="{weight}" fill="{color}" '
            f'text-anchor="middle">{escape(text)}</text>'
            for text, size, down, color, weight in lines
        ]
        if at + 1 < len(walk.boxes):
            ends = [x + BOX + 3, x + BOX + GAP - 3]
            start, end = reversed(ends) if walk.backward else ends
            parts.append(f'<line x1="{start}" y1="{y + HIGH // 2}" x2="{end}" y2="{y + HIGH // 2}" stroke="{LINE}" '
                         'stroke-width="2" marker-end="url(#tip)"/>')  # fmt: skip
    return parts


if __name__ == "__main__":
    (DOCS / "walks.svg").write_text(svg(), encoding="utf-8")
