"""The last two checkpoints of a run. The file name contains a checksum, so that damage is detected before loading.

`step-00000300-1f2e3d4c5b6a7988.pt` is written by `torch.save`: `torch.load(path, weights_only=True)["model"]` is the
state_dict of the network.
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
    """Write the state after `step` steps, and remove all checkpoints but the last two."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    return keep(folder, f"step-{step:08d}-{_checksum(content)}.pt", content)


def keep(folder: Path, name: str, content: bytes) -> Path:
    """Write the content of a checkpoint under its name, and remove all checkpoints but the last two."""
    path = folder / name
    atomic.make_folder(folder)
    atomic.write(path, content)
    for old in saved(folder)[KEPT:]:
        if old != path:
            with suppress(OSError):
                old.unlink()
    return path


def saved(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, the last one first."""
    paths = [path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (int(path.name.split("-")[1]), path.stat().st_mtime_ns), reverse=True)


def latest(folder: Path, warn: Callable[[str], object]) -> bytes | None:
    """Return the content of the last intact checkpoint, or None; warn about damaged ones and rename them."""
    for path in saved(folder):
        content = path.read_bytes()
        expected = path.stem.rpartition("-")[2]
        if _checksum(content) == expected:
            return content
        warn(
            f"{path} is damaged (its {len(content):,} bytes do not match its checksum); it is renamed to .damaged, "
            "and the previous checkpoint is used"
        )
        with atomic.writing(path):
            path.rename(path.with_suffix(".damaged"))
    return None


def read(content: bytes) -> State:
    """Return the state in the content of a checkpoint, without executing code from it."""
    state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
