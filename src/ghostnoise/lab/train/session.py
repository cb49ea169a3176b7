"""What a run has in memory: the network, its optimizer, and how far it is; and all of it as a checkpoint."""

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.train import generators, optimizer
from ghostnoise.lab.train.machine import Machine

Record = dict[str, Any]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Progress:
    """How far a run is. `step` counts in the epoch; `loss` and `right` are this process's sums over the epoch."""

    epoch: int = 0
    step: int = 0
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    right: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    images: int = 0  # seen in training, by all processes
    seconds: float = 0.0  # in the training loop, evaluation and checkpoints included
    training_seconds: float = 0.0  # in training steps
    history: list[Record] = field(default_factory=list)

    @property
    def best(self) -> Record | None:
        """The line of the best epoch so far, the first of equals."""
        scored = [line for line in self.history if line["accuracy"] is not None]
        return max(scored, key=lambda line: line["accuracy"], default=None)

    def start_epoch(self, device: torch.device) -> None:
        """Forget the sums."""
        self.step = 0
        self.loss = torch.zeros((), device=device)
        self.right = torch.zeros((), dtype=torch.int64, device=device)


class Session:
    """A network in training."""

    def __init__(self, model: nn.Module, settings: Settings, here: Machine) -> None:
        train, device = settings.train, here.device
        form = torch.channels_last if train.channels_last else torch.preserve_format
        model = model.to(device=device, memory_format=form)  # type: ignore[call-overload]
        self.model: nn.Module = model
        self.settings, self.here = settings, here
        self.optimizer = optimizer.build(model, settings.optim)
        self.average: AveragedModel | None = None
        if train.ema is not None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(train.ema), use_buffers=True)
            self.average.eval()
        self.precision = PRECISIONS.get(train.amp)
        self.scaler = torch.amp.GradScaler(device.type) if train.amp == "fp16" else None
        self.forward: nn.Module = DistributedDataParallel(model) if here.world > 1 else model
        if train.compile:  # the steps; evaluation stays as it is, one graph less to make
            self.forward = torch.compile(self.forward)  # type: ignore[assignment]
        self.progress = Progress()
        self.progress.start_epoch(device)

    @property
    def evaluated(self) -> nn.Module:
        """The network that is scored: the average, if there is one."""
        return self.model if self.average is None else self.average.module

    @property
    def parameters(self) -> int:
        """How many numbers are learned."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def casting(self) -> AbstractContextManager[object]:
        """Mixed precision, if asked for."""
        return torch.autocast(self.here.device.type, self.precision) if self.precision else nullcontext()

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step of the optimizer; its loss and hits are added to the progress."""
        with self.casting():
            scores = self.forward(images)
            loss = F.cross_entropy(scores, labels, label_smoothing=self.settings.train.label_smoothing)
        if self.scaler is None:
            loss.backward()
            self._clip()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            if self.settings.optim.clip is not None:
                self.scaler.unscale_(self.optimizer)
                self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)
        with torch.no_grad():
            self.progress.loss += loss
            self.progress.right += (scores.argmax(1) == labels).sum()

    def _clip(self) -> None:
        if self.settings.optim.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.optim.clip)

    def weights_sha256(self) -> str:
        """A checksum of the evaluated network's weights and buffers: names, types, shapes and every bit."""
        checksum = hashlib.sha256()
        for name, value in sorted(self.evaluated.state_dict().items()):
            value = value.detach().cpu().contiguous()
            checksum.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            checksum.update(value.flatten().view(torch.uint8).numpy() if value.numel() else b"")
        return checksum.hexdigest()

    def state(self) -> Record:
        """Everything that the rest of the run depends on; complete in the first process alone."""
        progress = self.progress
        mine = {"generators": generators.states(self.here.device), "loss": progress.loss, "right": progress.right}
        return {
            "format": 1,
            "epoch": progress.epoch,
            "step": progress.step,
            "images": progress.images,
            "seconds": progress.seconds,
            "training_seconds": progress.training_seconds,
            "history": json.dumps(progress.history),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "ranks": self.here.gather(mine),
        }

    def restore(self, state: Record) -> None:
        """Go on from a checkpoint."""
        mine, device = state["ranks"][self.here.rank], self.here.device
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(
            state["epoch"], state["step"], mine["loss"].to(device), mine["right"].to(device), state["images"],
            state["seconds"], state["training_seconds"], json.loads(state["history"]),
        )  # fmt: skip
        generators.restore(mine["generators"], device)
