"""MNIST-1D (Greydanus and Kobak, "Scaling Down Deep Learning"): generated signals of 40 points in 10 classes.

They have the values of the authors' package `mnist1d` (`make_dataset`), rounded to float32, but are generated without
the global random generators, and faster. Training and test signals are its data set of 10,000 signals with seed 42 and
`train_split=0.2`; the signals for validation are a further 4,000 with seed 43. A copy is kept in the data folder.
"""

import hashlib
import io
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ghostnoise.lab.data.catalog import CATALOG
from ghostnoise.lab.data.files import Arrays
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import atomic

Part = Literal["train", "test", "validation"]

SIGNALS, SEED = 10_000, 42
VALIDATION_SIGNALS, VALIDATION_SEED = 4_000, 43
LENGTH, WINDOW = 40, 72
LEAST_PADDING, MOST_PADDING, MOST_SHIFT = 36, 60, 48
SCALE, SLOPE, CORRELATED_NOISE, WHITE_NOISE = 0.4, 0.75, 0.25, 0.02
TEMPLATES = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)
FILE = "mnist1d/signals.npz"
FORMAT = 1  # of the file


def load(folder: Path, part: Part) -> Arrays:
    """Return signals (N, 1, 40) in float32 and their labels, from the copy in the data folder if it is intact.

    Otherwise they are generated and the copy is written; if the folder cannot be written to, there is no copy.
    """
    path = folder / FILE
    arrays = _read(path)
    if arrays is None:
        arrays = generate()
        with suppress(UserError):
            _write(path, arrays)
    return Arrays(arrays[f"{part}_signals"], arrays[f"{part}_labels"])


def generate() -> dict[str, NDArray[Any]]:
    """Generate the signals and labels of all parts."""
    train, (signals, labels) = CATALOG["mnist1d"].train_size, data_set(SIGNALS, SEED)
    further, further_labels = data_set(VALIDATION_SIGNALS, VALIDATION_SEED)
    return {
        "train_signals": signals[:train],
        "train_labels": labels[:train],
        "test_signals": signals[train:],
        "test_labels": labels[train:],
        "validation_signals": further,
        "validation_labels": further_labels,
    }


def data_set(
    count: int, seed: int, shifts: tuple[int, int] = (0, MOST_SHIFT)
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the `count` signals (count, 1, 40) and labels that the package generates with this seed.

    Each signal is a template, stretched by a random factor in a window of 72 points, scaled and shifted cyclically.
    Where it is 0, correlated noise is added; everywhere, white noise and a random slope. Then 40 points are sampled.
    The shifts are those from `shifts[0]` to `shifts[1] - 1`.
    """
    from scipy.ndimage import gaussian_filter1d

    random = np.random.RandomState(seed)  # the package's generator, whose numbers numpy keeps stable
    templates, each = _templates(), count // len(TEMPLATES)
    labels = np.repeat(np.arange(len(TEMPLATES)), each)
    padding, scale, shift, slope = (np.empty(len(labels)) for _ in range(4))
    correlated, white = (np.empty((len(labels), WINDOW)) for _ in range(2))
    for row in range(len(labels)):  # one signal after the other: the order of the package's draws
        padding[row] = LEAST_PADDING + int(random.random_sample() * (MOST_PADDING - LEAST_PADDING + 1))
        scale[row] = 1 + SCALE * (random.random_sample() - 0.5)
        shift[row] = random.randint(*shifts)
        correlated[row] = random.standard_normal(WINDOW)
        white[row] = random.standard_normal(WINDOW)
        slope[row] = SLOPE * (random.random_sample() - 0.5)
    order = random.permutation(len(labels))
    clean = np.stack([_stretched(templates[label], int(pad)) for label, pad in zip(labels, padding, strict=True)])
    clean *= scale[:, None]
    columns = (np.arange(WINDOW) - shift[:, None].astype(np.int64)) % WINDOW
    clean = np.take_along_axis(clean, columns, 1)
    noise = gaussian_filter1d(CORRELATED_NOISE * correlated, 2, axis=1)
    noisy = np.where(clean != 0, clean, noise) + WHITE_NOISE * white
    noisy -= slope[:, None] * np.linspace(-0.5, 0.5, WINDOW)
    sampled = _resampled(noisy, LENGTH)[order]
    standardized = (sampled - sampled.mean()) / sampled.std()
    return standardized.astype(np.float32)[:, None], labels[order].astype(np.int64)


def _templates() -> NDArray[np.float64]:
    """Return the templates, standardized and shifted so that they start and end at 0."""
    raw = np.array(TEMPLATES)
    raw = (raw - raw.mean(1, keepdims=True)) / raw.std(1, keepdims=True)
    shifted: NDArray[np.float64] = (raw - raw[:, :1]) / 6 + 1e-8  # not exactly 0, which would mean padding
    return shifted


def _stretched(template: NDArray[np.float64], padding: int) -> NDArray[np.float64]:
    """Append `padding` zeros, and resample to the window."""
    made: NDArray[np.float64] = _resampled(np.concatenate([template, np.zeros(padding)])[None], WINDOW)[0]
    return made


def _resampled(signals: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """Interpolate signals (N, L) linearly at `length` equidistant points from the first to the last."""
    old, new = np.linspace(0, 1, signals.shape[1]), np.linspace(0, 1, length)
    right = np.clip(np.searchsorted(old, new), 1, len(old) - 1)
    left = right - 1
    low, high = signals[:, left], signals[:, right]
    made: NDArray[np.float64] = (high - low) / (old[right] - old[left]) * (new - old[left]) + low
    return made


def sizes() -> dict[Part, int]:
    """Return the number of signals of each part."""
    entry = CATALOG["mnist1d"]
    return {"train": entry.train_size, "test": entry.test_size, "validation": VALIDATION_SIGNALS}


def _read(path: Path) -> dict[str, NDArray[Any]] | None:
    """Return the arrays of the file; None if it is missing, damaged or of another format."""
    try:
        # Opened here, since numpy leaves a damaged archive open.
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        checksum = arrays.pop("checksum")
    except Exception:  # a damaged archive can raise anything
        return None
    shape = CATALOG["mnist1d"].shape
    expected = {
        name: kind
        for part, count in sizes().items()
        for name, kind in ((f"{part}_signals", ((count, *shape), "float32")), (f"{part}_labels", ((count,), "int64")))
    }
    found = {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
    return arrays if found == expected and str(checksum) == _checksum(arrays) else None


def _write(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write the file; other processes never read a part of it."""
    content = io.BytesIO()
    np.savez(content, checksum=np.array(_checksum(arrays)), **arrays)  # type: ignore[arg-type]
    with atomic.writing(path, "--data-dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, content.getvalue(), "--data-dir")


def _checksum(arrays: dict[str, NDArray[Any]]) -> str:
    """Return a checksum of the names and contents."""
    digest = hashlib.sha256(str(FORMAT).encode())
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
