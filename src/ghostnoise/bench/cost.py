"""A model of what a layer costs on a GPU: launches, and bytes that are read and written.

It is a prediction from the kernels, not a measurement. Every implementation of batch norm reads x twice and writes y,
and in the backward pass reads x and dy twice and writes dx; they differ in their launches and in the small tables. Of
our kernels, the launches are counted by a test. Those of cuDNN and of Inductor are what we expect for a tensor that
does not fit into the cache: two kernels for the statistics and the normalization, and one for the count of batches.
"""

import math
from typing import NamedTuple

WORD, WIDE = 4, 8  # bytes of an entry in the arithmetic of float32, and in float64
PASSES = {"forward": 3, "backward": 5}  # over x, y, dy and dx
NOISE_PASSES = {"forward": 3, "backward": 2}
# Launches: with the seed of the draws, moments, decide, transform; and sums, decide, gradient of x.
LAUNCHES = {
    "BN": (3, 3), "GBN": (3, 3), "XBN": (3, 3), "BRN": (3, 3), "BN+GNI": (4, 3), "GNI": (4, 1),
    "nn.BatchNorm2d, cuDNN": (3, 2), "nn.BatchNorm2d, Inductor": (2, 2),
}  # fmt: skip
SHAPES = ((256, 64, 32, 32), (256, 256, 8, 8), (64, 16, 8, 8))
# Of data sheets: bytes per second. A launch in a CUDA graph takes about 2 µs from start to start.
GPUS = {"A100 (1.6 TB/s)": 1.555e12, "H100 (3.4 TB/s)": 3.35e12}
LAUNCH = 2e-6


class Cost(NamedTuple):
    """Launches, and bytes of passes over x and of tables, of a forward and a backward pass."""

    launches: int
    passes: int
    tables: int

    def seconds(self, bandwidth: float, launch: float = LAUNCH) -> float:
        """Predict the time from the bandwidth of the memory and the time between launches."""
        return self.launches * launch + (self.passes + self.tables) / bandwidth


def cost(method: str, shape: tuple[int, ...], itemsize: int = 4, ghost_size: int = 32) -> Cost:
    """Return the cost of a layer; `method` is a key of `LAUNCHES`."""
    passes = NOISE_PASSES if method == "GNI" else PASSES
    moved = sum(passes.values()) * math.prod(shape) * itemsize
    return Cost(sum(LAUNCHES[method]), moved, _tables(method, shape, ghost_size))


def _tables(method: str, shape: tuple[int, ...], ghost_size: int) -> int:
    """Return the bytes of tables that kernels write, and read again; draws count each sample that is drawn."""
    entries = shape[0] * shape[1]
    if method.startswith("nn."):
        return 12 * shape[1] * WORD
    moments, sums = 2 * 2 * WIDE * entries, 2 * 2 * WORD * entries  # written and read: mean and var, Σ dy and Σ dy·x
    if method in ("BN", "BRN"):
        return moments + sums
    if method == "GBN":
        return moments + sums + 2 * (2 * WIDE + 5 * WORD) * (shape[0] // ghost_size) * shape[1]
    if method == "XBN":  # moments are read four times, and again by the backward pass; tables have a row per sample
        return moments + 10 * WIDE * entries + sums + 2 * (2 * WIDE + 5 * WORD) * entries
    gathered = 2 * WIDE * entries * ghost_size
    tables = 2 * WORD * entries * (2 if method == "GNI" else 3)
    return moments + gathered + tables + (0 if method == "GNI" else sums + 2 * WORD * entries)


def markdown() -> str:
    """Return the table of `results/bench/README.md`."""
    head = ["shape, float32", "layer", "launches", "MB of x", "MB of tables", *(f"µs, {gpu}" for gpu in GPUS)]
    lines = [head, ["---"] * len(head)]
    for shape in SHAPES:
        for method in LAUNCHES:
            found, forward_and_backward = cost(method, shape), " + ".join(map(str, LAUNCHES[method]))
            times = [f"{found.seconds(bandwidth) * 1e6:.0f}" for bandwidth in GPUS.values()]
            sizes = [f"{found.passes / 1e6:.1f}", f"{found.tables / 1e6:.1f}"]
            lines.append(["×".join(map(str, shape)), method, forward_and_backward, *sizes, *times])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
