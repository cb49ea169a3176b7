"""The checkpoints of a run. The file name contains a checksum, so that damage is detected before loading.

In training, `step-00000300-1f2e3d4c5b6a7988.pt` and the one before it have all that the rest of the run depends on. A
run that has ended keeps `final-…`, and with `--keep best` `best-…`: the same without the optimizer and the generators.
All are written by `torch.save`: `torch.load(path, weights_only=True)["model"]` is the state_dict of the network. All
commands read them with `readable`, which verifies them.
"""

import hashlib
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.limits import read_bytes
from ghostnoise.lab.store import atomic
from ghostnoise.lab.store.record import one_line, parse_lines

FORMAT = 1
KEPT = 2
NAME = re.compile(r"(step|final|best)-(\d{8,15})-([0-9a-f]{16})\.pt", re.ASCII)
MAX_BYTES = 2**40  # a checkpoint has the size of its network; this only rejects absurd sizes
COUNTS, TIMES = ("epoch", "step", "images"), ("seconds", "training_seconds")
METRICS = ("step", "split", "train_loss", "train_accuracy", "loss", "accuracy")

State = dict[str, Any]
Kind = Literal["step", "final", "best"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    content: bytes
    state: State


def save(folder: Path, step: int, state: State, kind: Kind = "step") -> Path:
    """Write the state after `step` steps, and remove earlier ones of its kind, but for the last two of "step"."""
    import torch  # here, since listing runs does not need it

    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    return _write(folder / f"{kind}-{step:08d}-{_checksum(content)}.pt", content, kind)


def keep(folder: Path, name: str, content: bytes) -> Path:
    """Write the content of a checkpoint under its name, and remove earlier ones of its kind; see `save`."""
    return _write(folder / name, content, _check_name(name, content))


def _write(path: Path, content: bytes, kind: Kind) -> Path:
    atomic.make_folder(path.parent)
    atomic.write(path, content)
    prune(path.parent, KEPT if kind == "step" else 1, kind, path)
    return path


def prune(folder: Path, count: int, kind: Kind = "step", written: Path | None = None) -> None:
    """Remove all checkpoints of a kind but the last `count`, and but the one that was just written."""
    for old in saved(folder, kind)[count:]:
        if old != written:
            with suppress(OSError):
                old.unlink()


def weights(state: State) -> State:
    """Return the state without what only the rest of the training needs."""
    kept = state | {"ranks": []}
    for name in ("optimizer", "scaler"):
        kept.pop(name, None)
    return kept


def evaluated(state: State) -> dict[str, Any]:
    """Return the state_dict that is evaluated: of the averaged weights if `train.ema` is set."""
    average = state.get("average")
    if average is None:
        return dict(state["model"])
    return {name.removeprefix("module."): value for name, value in average.items() if name != "n_averaged"}


def weights_sha256(state_dict: Mapping[str, Any]) -> str:
    """Return a checksum of the names, dtypes, shapes and contents of parameters and buffers."""
    import torch

    checksum = hashlib.sha256()
    for name, value in sorted(state_dict.items()):
        value = value.detach().cpu().contiguous()
        checksum.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        checksum.update(value.flatten().view(torch.uint8).numpy() if value.numel() else b"")
    return checksum.hexdigest()


def weights_of(folder: Path, warn: Callable[[str], object], best: bool = False) -> tuple[dict[str, Any], int]:
    """Return the state_dict that is evaluated, after the last or the best epoch of a run, and the epoch."""
    kinds: tuple[Kind, ...] = ("best",) if best else ("final", "step")
    found = next(readable(folder / "checkpoints", warn, rename=False, kinds=kinds), None)
    if found is None:
        remedy = "train it with --keep best" if best else "train it again"
        raise UserError(f"{folder}: has no {'best ' * best}weights that can be read; {remedy}")
    return evaluated(found.state), found.state["epoch"]


def read_weights(path: Path) -> dict[str, Any]:
    """Read a plain state_dict, without executing code from the file."""
    import torch

    try:
        found = torch.load(io.BytesIO(read_bytes(path, MAX_BYTES, follow=True)), map_location="cpu", weights_only=True)
        if not isinstance(found, dict) or not all(map(_is_entry, found.items())):
            raise ValueError("it is no state_dict")
    except Exception as error:  # reading a damaged file can raise anything
        remedy = "give a file that `ghostnoise runs export-weights` or torch.save(model.state_dict(), ...) wrote"
        raise UserError(f"{path}: cannot be read ({one_line(error)}); {remedy}") from None
    return found


def write_weights(path: Path, state_dict: Mapping[str, Any]) -> None:
    """Write a plain state_dict, which `torch.load(path, weights_only=True)` reads."""
    import torch

    buffer = io.BytesIO()
    torch.save(dict(state_dict), buffer)
    atomic.make_folder(path.parent, "the name of the file")
    atomic.write(path, buffer.getvalue(), "the name of the file")


def saved(folder: Path, kind: Kind = "step") -> list[Path]:
    """Return the paths of the checkpoints of a kind in `folder`, the last one first; they are not verified."""
    return sorted(filter(_named, folder.glob(f"{kind}-*.pt")), key=_age, reverse=True)


def _named(path: Path) -> bool:
    return NAME.fullmatch(path.name) is not None


def _age(path: Path) -> tuple[int, int]:
    """Return the number of steps, and when the file was written."""
    try:
        written = path.lstat().st_mtime_ns
    except OSError:
        written = 0
    return int(path.name.split("-")[1]), written


def any_saved(folder: Path) -> bool:
    """Return whether there are weights in `folder`."""
    return any(map(_named, folder.glob("*.pt")))


def readable(
    folder: Path, warn: Callable[[str], object], *, rename: bool, kinds: Sequence[Kind] = ("step",)
) -> Iterator[Checkpoint]:
    """Yield the checkpoints of some kinds that can be read, the last one first; warn about each one that cannot.

    `rename` sets such a checkpoint aside; it is for the process that owns the run folder.
    """
    for path in itertools.chain.from_iterable(map(saved, itertools.repeat(folder), kinds)):
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
    """Return the last checkpoint from which a run can resume, or None; set others aside with a warning."""
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
    content = read_bytes(path, MAX_BYTES, follow=True)
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


def _check_name(name: str, content: bytes) -> Kind:
    found = NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!a}: not the name of a checkpoint")
    if _checksum(content) != found[3]:
        raise ValueError(f"its {len(content):,} bytes do not match its checksum")
    return cast(Kind, found[1])


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
