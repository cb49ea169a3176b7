"""The events of a run in training. Terminals, logs, and the runners of sweeps consume them.

Events can be pickled, and importing this module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ghostnoise.lab.run import Run

EndStatus = Literal["finished", "diverged", "stopped", "failed", "elsewhere"]


@dataclass(frozen=True)
class Started:
    """The run is locked, its settings and its environment are written, and its training starts or resumes."""

    run: Run
    """With all settings that depend on the machine, and with its folder."""
    heading: str
    done: int
    """Steps that were done before; 0 unless it is resumed."""
    steps: int
    """Steps in an epoch."""
    where: str = ""
    """The worker that trains it."""


@dataclass(frozen=True)
class Step:
    """A step was done, the `done`-th of `total`; loss and accuracy are means over the epoch so far."""

    epoch: int
    done: int
    total: int
    loss: float
    accuracy: float
    images_per_second: float
    lr: float
    gradient_norm: float | None = None
    """Norm of the gradient before clipping, after steps that `Options.log_steps` selects."""
    memory: int | None = None
    """Largest memory in bytes, after the same steps: of the GPU, or of the process."""


@dataclass(frozen=True)
class Epoch:
    """An epoch has ended: its line of metrics, and whether its accuracy is the best so far."""

    line: Mapping[str, Any]
    best: bool


@dataclass(frozen=True)
class Saved:
    """A checkpoint was saved after `done` steps."""

    path: Path
    done: int


@dataclass(frozen=True)
class Ended:
    """The run has ended, and is not trained any more.

    `status` is "finished" or "diverged" (`run` has the result), "stopped" by `signal`, "failed" (the reason is in
    `message` and in the run folder), or "elsewhere" (another process owns the run). `early` tells that the run had
    finished or diverged before. `message` has the warnings otherwise.
    """

    status: EndStatus
    run: Run | None = None
    signal: int = 0
    message: str = ""
    early: bool = False


Event: TypeAlias = Started | Step | Epoch | Saved | Ended
