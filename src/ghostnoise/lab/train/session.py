"""The state of a run in memory: network, optimizer, learning rate, random generators and progress."""

import json
import math
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ghostnoise.history import histories
from ghostnoise.lab.config import recipe, schema
from ghostnoise.lab.config.own import call
from ghostnoise.lab.config.schema import OptimSettings, Settings
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.train.machine import Machine

Record = dict[str, Any]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def build_optimizer(model: nn.Module, settings: OptimSettings) -> Optimizer:
    """Build the optimizer. Weight decay applies to parameters with two or more dimensions: not to gains and biases."""
    weights: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    fused = True
    for parameter in model.parameters():
        if parameter.requires_grad:
            (weights if parameter.ndim > 1 else others).append(parameter)
            fused = fused and parameter.device.type in ("cpu", "cuda")
    groups: list[Record] = [{"params": weights, "weight_decay": settings.weight_decay}] if weights else []
    groups += [{"params": others, "weight_decay": 0.0}] if others else []
    match settings:
        case schema.AdamW(lr=lr, betas=betas, eps=eps):
            return AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=fused)
        case schema.Sgd(lr=lr, momentum=momentum, nesterov=nesterov):
            return SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=fused)
        case schema.OwnOptim(name=name, args=args, lr=lr):
            made: Optimizer = call(name, "optim", args, groups, lr=lr)
            return made
    raise TypeError(f"{type(settings).__name__}: not a kind of optimizer")


def learning_rate(
    step: int, steps: int, warmup: int, peak: float, *, start: float | None = None, end: float = 0.0,
    prefix: bool = True,
) -> float:  # fmt: skip
    """Return the learning rate of `step`, counted from 0: linear for `warmup` steps, then half a cosine to `end`.

    The first step of the warm-up has the learning rate `start`, and the first step after it would continue the line to
    `peak`; if `start` is None, the line rises from 0 before the first step to `peak` in the last step of the warm-up.
    The cosine falls from `peak` in the steps after the warm-up or, if `prefix` is False, in all steps: those of the
    warm-up are then counted too, and the first one after it is already below `peak`. With a `start`, these are the
    schedules of timm's `CosineLRScheduler`.
    """
    if step < warmup:
        return peak * (step + 1) / warmup if start is None else start + step * (peak - start) / warmup
    done, total = (step - warmup, steps - warmup) if prefix else (step, steps)
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * done / max(1, total)))


def seed_generators(value: int) -> None:
    """Seed the generators of torch (all devices), Python and numpy."""
    torch.manual_seed(value)
    random.seed(value)
    numpy.random.seed(value % 2**32)  # noqa: NPY002  # the global generator, which other packages may use


def generator_states(device: torch.device) -> Record:
    """Return the states of all generators that a training step may use, in types that a checkpoint can hold."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)  # noqa: NPY002
    found: Record = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words), gauss),
        "numpy": (torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)), position, has_gauss, cached),
    }
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_rng_state()
    return found


def restore_generators(states: Record, device: torch.device) -> None:
    """Restore the states that `generator_states` returned."""
    torch.set_rng_state(states["torch"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    keys, position, has_gauss, cached = states["numpy"]
    numpy.random.set_state(("MT19937", keys.numpy().astype(numpy.uint32), position, has_gauss, cached))  # noqa: NPY002
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])


@dataclass
class Progress:
    """The progress of a run. `step` is that in the epoch; `loss` and `correct` are sums over it in this process."""

    epoch: int = 0
    step: int = 0
    loss: Tensor = field(default_factory=torch.Tensor)  # set by `start_epoch`
    correct: Tensor = field(default_factory=torch.Tensor)
    images: int = 0  # trained on, over all processes
    seconds: float = 0.0  # in the training loop, including evaluation and checkpoints
    training_seconds: float = 0.0  # in training steps
    history: list[Record] = field(default_factory=list)
    environments: list[Record] = field(default_factory=list)  # of the segments that led here

    @property
    def best(self) -> Record | None:
        """The metrics of the epoch with the best accuracy so far; the first one if several are equal."""
        best = None
        for line in self.history:
            if line["accuracy"] is not None and (best is None or line["accuracy"] > best["accuracy"]):
                best = line
        return best

    def start_epoch(self, device: torch.device) -> None:
        """Reset the step and the sums."""
        self.step = 0
        self.loss = torch.zeros((), device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)


class Session:
    """A network in training, with its optimizer and everything else that a checkpoint contains."""

    def __init__(self, model: nn.Module, settings: Settings, here: Machine) -> None:
        train, device = settings.train, here.device
        form = torch.channels_last if train.channels_last else torch.preserve_format
        model = model.to(device=device, memory_format=form)  # type: ignore[call-overload]
        self.model: nn.Module = model
        self.settings, self.here = settings, here
        self.identity = recipe.identity(settings)
        self.optimizer = build_optimizer(model, settings.optim)
        self.average: AveragedModel | None = None
        if train.ema is not None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(train.ema), use_buffers=True)
            self.average.eval()
        self.precision = PRECISIONS.get(train.amp)
        self.scaler = torch.amp.GradScaler(device.type) if train.amp == "fp16" else None
        self.forward: nn.Module = DistributedDataParallel(model) if here.world > 1 else model
        if train.compile:  # training steps only: evaluation would need a second graph
            self.forward = torch.compile(self.forward)  # type: ignore[assignment]
        self.progress = Progress()
        self.progress.start_epoch(device)
        self.gradient_norm: Tensor | None = None
        """Norm of the gradient of the last step that measured it, before clipping."""

    @property
    def evaluated(self) -> nn.Module:
        """The network to evaluate: with averaged weights if `train.ema` is set."""
        return self.model if self.average is None else self.average.module

    @property
    def parameters(self) -> int:
        """The number of trainable parameters."""
        count = 0
        for parameter in self.model.parameters():
            count += parameter.numel() if parameter.requires_grad else 0
        return count

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context with the mixed precision of the settings."""
        return torch.autocast(self.here.device.type, self.precision) if self.precision else nullcontext()

    def micro_batches(self, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split a batch into the micro-batches of `train.accumulation_steps`, which have equal sizes."""
        count = self.settings.train.accumulation_steps or 1
        return list(zip(images.chunk(count), labels.chunk(count), strict=True)) if count > 1 else [(images, labels)]

    def step(self, images: Tensor, labels: Tensor, lr: float, measure: bool = False) -> None:
        """Take a step of the optimizer, and add its loss and correct predictions to the progress."""
        batches, clip = [(images, labels)], self.settings.optim.clip
        if self.settings.train.accumulation_steps:
            batches = self.micro_batches(images, labels)
        for at, (some, theirs) in enumerate(batches):
            with self._unsynchronized() if at < len(batches) - 1 else nullcontext():
                self._accumulate(some, theirs, len(batches))
        if self.scaler is not None and (measure or clip is not None):
            self.scaler.unscale_(self.optimizer)
        if clip is not None:
            self.gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        elif measure:
            self.gradient_norm = nn.utils.get_total_norm(
                [each.grad for each in self.model.parameters() if each.grad is not None]
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def _accumulate(self, images: Tensor, labels: Tensor, count: int) -> None:
        """Add the gradient of one of `count` micro-batches, whose mean loss is that of the batch."""
        with self.autocast():
            scores = self.forward(images)
            loss = F.cross_entropy(scores, labels, label_smoothing=self.settings.train.label_smoothing)
            loss = loss / count if count > 1 else loss
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        with torch.no_grad():
            self.progress.loss += loss
            self.progress.correct += (scores.argmax(1) == labels).sum()

    def _unsynchronized(self) -> AbstractContextManager[object]:
        """Return a context in which processes do not average their gradients; the last micro-batch averages them."""
        return self.forward.no_sync() if isinstance(self.forward, DistributedDataParallel) else nullcontext()

    def state(self) -> Record:
        """Return everything that the rest of the run depends on; it is complete only in the first process."""
        progress = self.progress
        states = generator_states(self.here.device)
        mine = {"generators": states, "loss": progress.loss, "right": progress.correct}
        if kept := histories(self.model):
            mine["histories"] = {name: history.state() for name, history in kept.items()}
        return {
            "format": checkpoints.FORMAT,
            "identity": self.identity,
            "epoch": progress.epoch,
            "step": progress.step,
            "images": progress.images,
            "seconds": progress.seconds,
            "training_seconds": progress.training_seconds,
            "history": json.dumps(progress.history),
            "environments": json.dumps(progress.environments),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "ranks": self.here.gather(mine),
        }

    def restore(self, state: Record) -> None:
        """Restore the state of a checkpoint.

        Raises an exception if it is not a state of this run; the session is then unusable until another one is
        restored.
        """
        if (identity := state.get("identity", self.identity)) != self.identity:
            raise ValueError(f"it belongs to the run {ascii(identity)[:40]}, not to {self.identity}")
        if len(state["ranks"]) != self.here.world:
            raise ValueError(f"it has the states of {len(state['ranks'])} processes, not of {self.here.world}")
        if state["epoch"] > self.settings.train.epochs:
            raise ValueError(f"epoch {state['epoch']}: the run has {self.settings.train.epochs}")
        mine, device = state["ranks"][self.here.rank], self.here.device
        if any(mine[name].numel() != 1 for name in ("loss", "right")):
            raise ValueError("its sums over the epoch are not single numbers")
        self.model.load_state_dict(state["model"])
        for name, history in histories(self.model).items():
            history.load(mine["histories"][name])
        self._restore_optimizer(state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(
            state["epoch"], state["step"], mine["loss"].to(device), mine["right"].to(device), state["images"],
            state["seconds"], state["training_seconds"], json.loads(state["history"]),
            json.loads(state.get("environments", "[]")),
        )  # fmt: skip
        restore_generators(mine["generators"], device)

    def _restore_optimizer(self, state: Record) -> None:
        """Restore the optimizer, whose own `load_state_dict` checks neither its options nor the shapes of its state."""
        for own, saved in zip(self.optimizer.state_dict()["param_groups"], state["param_groups"], strict=True):
            for name in (own.keys() & saved.keys()) - {"lr"}:
                if own[name] != saved[name]:
                    raise ValueError(f"the optimizer has {name}={ascii(saved[name])[:40]}, not {own[name]}")
        self.optimizer.load_state_dict(state)
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():
                if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape:
                    raise ValueError(f"{name} of the optimizer has another shape than its parameter")
