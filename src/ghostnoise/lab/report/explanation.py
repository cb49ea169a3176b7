"""The picture that explains ghost noise: which samples contribute to the statistics of each sample.

`python -m ghostnoise.lab.report.explanation docs/ghost-noise.svg` draws it; a test compares the file.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostnoise.lab.report.figures import render

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAMPLES, GHOST_SIZE = 8, 4
# For each sample, the samples of its own ghost batch, drawn with replacement.
DRAWS = ((5, 1, 7, 1), (0, 3, 6, 4), (2, 2, 5, 0), (7, 4, 1, 6), (3, 6, 0, 3), (1, 5, 7, 2), (4, 0, 4, 6), (2, 7, 3, 5))
ONCE, TWICE, NEVER, EDGE, INK, CARD = "#56B4E9", "#0072B2", "#EEF1F4", "#FFFFFF", "#1F2933", "#FFFFFF"


def weights(method: str) -> list[list[int]]:
    """Return how often sample j contributes to the statistics of sample i, as rows i of columns j."""
    rules: dict[str, Callable[[int, int], int]] = {
        "bn": lambda i, j: 1,
        "gbn": lambda i, j: int(i // GHOST_SIZE == j // GHOST_SIZE),
        "xbn": lambda i, j: int(i // GHOST_SIZE == j // GHOST_SIZE and i != j),
        "gni": lambda i, j: DRAWS[i].count(j),
    }
    return [[rules[method](i, j) for j in range(SAMPLES)] for i in range(SAMPLES)]


PANELS = {
    "bn": ("BN: batch norm", "all samples of the batch"),
    "gbn": (f"GBN-{GHOST_SIZE}: ghost batches", f"{GHOST_SIZE} samples per ghost batch"),
    "xbn": (f"XBN-{GHOST_SIZE}: exclusive", "ghost batch without itself"),
    "gni": (f"GNI-{GHOST_SIZE}: ghost noise", f"BN, then {GHOST_SIZE} random samples"),
}


def figure() -> "Figure":
    """Draw a matrix for each method, and a legend for all of them."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    made = Figure(figsize=(8, 9.4), facecolor=CARD)
    made.text(0.5, 0.972, "Which samples contribute to each statistic?", ha="center", va="center", fontsize=20.5,
              fontweight="bold", color=INK)  # fmt: skip
    for at, (method, (title, about)) in enumerate(PANELS.items()):
        row, column = divmod(at, 2)
        axes = made.add_axes(((0.08, 0.56)[column], (0.545, 0.115)[row], 0.42, 0.32))
        _draw(axes, weights(method), title, about)
        if column == 0:
            axes.set_ylabel("normalized sample", fontsize=17, color=INK, labelpad=8)
        if row == 1:
            axes.set_xlabel("contributing sample", fontsize=17, color=INK, labelpad=8)
    handles = [Patch(color=color) for color in (NEVER, ONCE, TWICE)]
    made.legend(
        handles, ["does not contribute", "contributes", "drawn twice"], loc="lower center", ncols=3, frameon=False,
        fontsize=16.5, labelcolor=INK, handlelength=1.1, handleheight=1.1, columnspacing=1.3, handletextpad=0.5,
        bbox_to_anchor=(0.5, 0.004),
    )  # fmt: skip
    return made


def _draw(axes: "Axes", counts: list[list[int]], title: str, about: str) -> None:
    from matplotlib.patches import Rectangle

    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            color = (NEVER, ONCE, TWICE)[min(count, 2)]
            axes.add_patch(Rectangle((j, i), 1, 1, facecolor=color, edgecolor=EDGE, linewidth=1.6))
    axes.set(xlim=(0, SAMPLES), ylim=(SAMPLES, 0), aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    style: dict[str, Any] = {"ha": "center", "color": INK}
    axes.text(SAMPLES / 2, -1.05, title, fontsize=18, fontweight="bold", **style)
    axes.text(SAMPLES / 2, -0.25, about, fontsize=16, **style)


def svg() -> bytes:
    """Return the picture as an SVG file."""
    return render(figure(), "svg")


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(svg())
