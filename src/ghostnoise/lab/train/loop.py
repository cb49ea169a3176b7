"""The training loop: steps, epochs, checkpoints, and how a run ends."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ghostnoise.lab.data import Source
from ghostnoise.lab.store import RunFolder
from ghostnoise.lab.store.folder import finite
from ghostnoise.lab.train import metering, optimizer
from ghostnoise.lab.train.clock import Clock
from ghostnoise.lab.train.display import Display
from ghostnoise.lab.train.evaluation import evaluate
from ghostnoise.lab.train.session import Progress, Session

Record = dict[str, Any]
LOOKED_AT_EVERY = 32  # steps between two looks at whether the loss is finite: a GPU is waited for


class Sink(Protocol):
    """Where else a line of metrics goes."""

    def record(self, line: Record) -> None:
        """Take a line."""


@dataclass(frozen=True)
class Ending:
    """How the loop ended: "finished", "diverged" or "stopped" by a signal."""

    status: str
    signal: int = 0


class Loop:
    """A run's loop over what it has in memory, its data and its folder."""

    def __init__(
        self, session: Session, source: Source, folder: RunFolder, clock: Clock, display: Display, sinks: list[Sink],
        saved: Callable[[Path], object] = lambda folder: None,
    ) -> None:  # fmt: skip
        self.session, self.source, self.folder, self.clock = session, source, folder, clock
        self.display, self.sinks, self.saved = display, sinks, saved
        settings = session.settings
        self.batch_size, self.epochs, self.steps = settings.train.batch_size, settings.train.epochs, source.steps
        self.warmup = round(settings.optim.warmup_epochs * self.steps)
        self.peak, self.split = settings.optim.lr, settings.data.evaluate
        self.earlier, self.began = session.progress.seconds, time.perf_counter()
        self.speed = 0.0

    def run(self) -> Ending:
        """Train to the end, or until a signal or a loss that is not finite."""
        progress = self.session.progress
        if progress.history and progress.history[-1]["train_loss"] is None:
            return Ending("diverged")
        while progress.epoch < self.epochs:
            ending = self.train_epoch()
            if ending is not None:
                return ending
            self._close()
        return Ending("finished")

    def train_epoch(self) -> Ending | None:
        """The rest of the epoch's steps; an ending if there are no more epochs."""
        session, progress = self.session, self.session.progress
        session.model.train()
        segment = Segment(progress)
        for images, labels in self.source.batches(progress.epoch, progress.step):
            optimizer.set_rate(session.optimizer, self._rate())
            session.step(images, labels)
            progress.step += 1
            progress.images += self.batch_size
            segment.images += self.batch_size
            if progress.step % LOOKED_AT_EVERY == 0 and not self._finite():
                segment.pause()
                return self._diverge()
            if self.display.due():
                self._show(segment)
            if progress.step < self.steps:  # after the last one there is a checkpoint anyway
                save, signal = self.clock.tick()
                if save or signal:
                    segment.pause()
                    self._save()
                    segment.go_on()
                if signal:
                    return Ending("stopped", signal)
        finite = self._finite()  # waits for a GPU too
        segment.pause()
        self.speed = segment.speed
        return None if finite else self._diverge()

    def _close(self) -> None:
        """Evaluate at the end of an epoch, record it, save."""
        session, progress = self.session, self.session.progress
        loss, right = session.here.add(torch.stack([progress.loss, progress.right.float()])).tolist()
        trained = self.steps * self.batch_size
        held_out, accuracy = evaluate(session, self.source)
        self._record(
            {
                "train_loss": loss / (self.steps * session.here.world),
                "train_accuracy": 100 * right / trained,
                "loss": held_out,
                "accuracy": accuracy,
                "images_per_second": round(self.speed, 1),
            }
        )
        if metering.due(session.settings.meter, progress.epoch + 1, self.epochs):
            read = metering.measure(session, self.source, progress.epoch)
            if session.here.first:
                self.folder.record_noise(progress.epoch + 1, read)
        progress.epoch += 1
        progress.start_epoch(session.here.device)
        self._save()

    def _diverge(self) -> Ending:
        """Record that the loss is not finite any more; the history stays."""
        self._record({"train_loss": None, "train_accuracy": None, "loss": None, "accuracy": None})
        self._save()
        return Ending("diverged")

    def _record(self, metrics: Record) -> None:
        progress = self.session.progress
        shared = {
            "epoch": progress.epoch + 1,
            "step": progress.epoch * self.steps + progress.step,
            "lr": self.session.optimizer.param_groups[0]["lr"],
            "split": self.split,
        }
        line = finite(shared | metrics | {"seconds": round(self._seconds(), 3)})
        progress.history.append(line)
        if self.session.here.first:
            self.folder.record(line)
            for sink in self.sinks:
                sink.record(line)
        if line["accuracy"] is not None:
            self.display.epoch(line, best=progress.best is line)

    def _save(self) -> None:
        progress = self.session.progress
        progress.seconds = self._seconds()
        state = self.session.state()
        if self.session.here.first:
            self.folder.save(progress.epoch * self.steps + progress.step, state)
            self.saved(self.folder.path)
        self.clock.reset()

    def _rate(self) -> float:
        progress = self.session.progress
        done = progress.epoch * self.steps + progress.step
        return optimizer.rate(done, self.epochs * self.steps, self.warmup, self.peak)

    def _finite(self) -> bool:
        """Whether the epoch's loss is finite in all processes."""
        return math.isfinite(self.session.here.add(self.session.progress.loss.clone()).item())

    def _seconds(self) -> float:
        return self.earlier + time.perf_counter() - self.began

    def _show(self, segment: "Segment") -> None:
        progress, world = self.session.progress, self.session.here.world
        seen = progress.step * self.batch_size / world
        loss, accuracy = progress.loss.item() / progress.step, 100 * progress.right.item() / seen
        self.display.step(progress.epoch, progress.step, loss, accuracy, segment.speed)


class Segment:
    """Time spent in training steps, without the checkpoints between them."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.images, self.spent, self.since = 0, 0.0, time.perf_counter()

    def pause(self) -> None:
        """Stop the watch, and add what it shows to the progress: a checkpoint has the images, and so their time."""
        now = time.perf_counter()
        passed, self.since = now - self.since, now
        self.spent += passed
        self.progress.training_seconds += passed

    def go_on(self) -> None:
        """Start it again."""
        self.since = time.perf_counter()

    @property
    def speed(self) -> float:
        """Images a second so far."""
        return self.images / max(self.spent + time.perf_counter() - self.since, 1e-9)
