"""The last two states of a run. A file's name carries its checksum, so that a damaged one is known before it is read.

`step-00000300-1f2e3d4c5b6a7988.pt` is what `torch.save` writes: `torch.load(path, weights_only=True)["model"]` are the
weights.
"""

import hashlib
import io
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ghostnoise.lab.store import atomic

KEPT = 2
NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})\.pt")

State = dict[str, Any]


def save(folder: Path, step: int, state: State) -> Path:
    """Write the state after `step` steps, and remove all but the last two."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    return keep(folder, f"step-{step:08d}-{_checksum(content)}.pt", content)


def keep(folder: Path, name: str, content: bytes) -> Path:
    """Write a checkpoint that was made under this name, here or elsewhere, and remove all but the last two."""
    path = folder / name
    atomic.make_folder(folder)
    atomic.write(path, content)
    for old in saved(folder)[KEPT:]:
        if old != path:
            with suppress(OSError):
                old.unlink()
    return path


def saved(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the last one first."""
    paths = [path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (int(path.name.split("-")[1]), path.stat().st_mtime_ns), reverse=True)


def latest(folder: Path, warn: Callable[[str], object]) -> bytes | None:
    """The content of the last good checkpoint, or None. Damaged ones are put aside as `.damaged`, and said."""
    for path in saved(folder):
        content = path.read_bytes()
        expected = path.stem.rpartition("-")[2]
        if _checksum(content) == expected:
            return content
        warn(f"{path} is damaged ({len(content):,} bytes that are not those it was saved with); the one before is used")
        with atomic.writing(path):
            path.rename(path.with_suffix(".damaged"))
    return None


def read(content: bytes) -> State:
    """The state in a checkpoint's content; nothing in it is executed."""
    state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
