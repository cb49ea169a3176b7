"""The last two checkpoints of a run. The file name contains a checksum, so that damage is detected before loading.

`step-00000300-1f2e3d4c5b6a7988.pt` is written by `torch.save`: `torch.load(path, weights_only=True)["model"]` is the
state_dict of the network. All commands read checkpoints with `readable`, which verifies them.
"""

import hashlib
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ghostnoise.lab.limits import read_bytes
from ghostnoise.lab.store import atomic
from ghostnoise.lab.store.contents import one_line, parse_lines

FORMAT = 1
KEPT = 2
NAME = re.compile(r"step-(\d{8,15})-([0-9a-f]{16})\.pt", re.ASCII)
MOST_BYTES = 2**40  # a checkpoint has the size of its network; this only rejects absurd sizes
COUNTS, TIMES = ("epoch", "step", "images"), ("seconds", "training_seconds")
METRICS = ("step", "split", "train_loss", "train_accuracy", "loss", "accuracy")

State = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    content: bytes
    state: State


def save(folder: Path, step: int, state: State) -> Path:
    """Write the state after `step` steps, and remove all checkpoints but the last two."""
    import torch  # here, since listing runs does not need it

    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    return keep(folder, f"step-{step:08d}-{_checksum(content)}.pt", content)


def keep(folder: Path, name: str, content: bytes) -> Path:
    """Write the content of a checkpoint under its name, and remove all checkpoints but the last two."""
    _check_name(name, content)
    path = folder / name
    atomic.make_folder(folder)
    atomic.write(path, content)
    prune(folder, path)
    return path


def prune(folder: Path, written: Path | None = None) -> None:
    """Remove all checkpoints but the last two, and but the one that was just written."""
    for old in saved(folder)[KEPT:]:
        if old != written:
            with suppress(OSError):
                old.unlink()


def saved(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in `folder`, the last one first; they are not verified."""
    paths = [path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (int(path.name.split("-")[1]), _written(path)), reverse=True)


def readable(folder: Path, warn: Callable[[str], object], *, rename: bool) -> Iterator[Checkpoint]:
    """Yield the checkpoints that can be read, the last one first; warn about each one that cannot.

    `rename` sets such a checkpoint aside; it is for the process that owns the run folder.
    """
    for path in saved(folder):
        try:
            content = intact(path)
            found = Checkpoint(path, content, read(content))
        except FileNotFoundError:
            continue  # the owner of the run folder has just removed it
        except MemoryError:
            raise
        except Exception as error:  # reading a damaged file can raise anything
            reject(path, one_line(error), warn, rename=rename)
        else:
            yield found


def latest(folder: Path, warn: Callable[[str], object]) -> Checkpoint | None:
    """Return the last checkpoint that can be read, or None; set others aside with a warning."""
    return next(readable(folder, warn, rename=True), None)


def reject(path: Path, reason: str, warn: Callable[[str], object], *, rename: bool) -> None:
    """Warn that a checkpoint cannot be used, and set it aside if `rename`."""
    done = "it is ignored"
    if rename:
        names = (path.with_suffix(".damaged" + (f"-{again}" if again > 1 else "")) for again in itertools.count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        with atomic.writing(path), suppress(FileNotFoundError):
            path.rename(aside)
        done = f"it is renamed to {aside.suffix}"
    warn(f"{path} is damaged ({reason}); {done}, and an earlier checkpoint is used if there is one")


def intact(path: Path) -> bytes:
    """Return the content of a checkpoint after comparing it with the checksum in its name."""
    content = read_bytes(path, MOST_BYTES, follow=True)
    _check_name(path.name, content)
    return content


def read(content: bytes) -> State:
    """Return the state in the content of a checkpoint, without executing code from it; raises an error if it has none.

    Whether it is a state of a given network, only the network can tell: see `Session.restore`.
    """
    import torch

    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"it contains a {type(state).__name__}, not a checkpoint")
    number = state.get("format")
    if type(number) is not int or number != FORMAT:
        raise ValueError(f"format {ascii(number)[:40]}: this version reads format {FORMAT}")
    for name in COUNTS:
        if type(state.get(name)) is not int or not 0 <= state[name] < 2**63:
            raise ValueError(f"{name} is missing or not a count")
    for name in TIMES:
        if type(state.get(name)) not in (int, float) or not 0 <= state[name] < 1e15:
            raise ValueError(f"{name} is missing or not a time")
    if not isinstance(state.get("model"), dict) or not all(map(_is_entry, state["model"].items())):
        raise ValueError("model is missing or not a state_dict")
    if not isinstance(state.get("history"), str) or not isinstance(state.get("ranks"), list):
        raise ValueError("history or ranks are missing")
    lines = parse_lines(state["history"].encode())
    if len(lines) < state["epoch"]:
        raise ValueError(f"epoch {state['epoch']} with the metrics of {len(lines)} epochs")
    if any(name not in line for line in lines for name in METRICS):
        raise ValueError("its metrics are incomplete")
    return state


def _is_entry(item: tuple[object, object]) -> bool:
    """Whether an item of a state_dict has a name, and a value that a module can load."""
    import torch

    return isinstance(item[0], str) and (item[0].endswith("_extra_state") or isinstance(item[1], torch.Tensor))


def _check_name(name: str, content: bytes) -> None:
    found = NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!a}: not the name of a checkpoint")
    if _checksum(content) != found[2]:
        raise ValueError(f"its {len(content):,} bytes do not match its checksum")


def _written(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
