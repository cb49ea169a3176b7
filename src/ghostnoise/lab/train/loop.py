"""The training loop: steps, evaluation, epochs, checkpoints, and the end of a run."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ghostnoise.lab.data import Source
from ghostnoise.lab.store import RunFolder
from ghostnoise.lab.store.folder import finite
from ghostnoise.lab.train import metering
from ghostnoise.lab.train.display import Display, Sink
from ghostnoise.lab.train.session import Progress, Session, learning_rate, set_learning_rate
from ghostnoise.lab.train.stop import Clock

Record = dict[str, Any]
CHECKED_EVERY = 32  # steps between two checks that the loss is finite, which wait for the GPU


@dataclass(frozen=True)
class Ending:
    """How the loop ended: "finished", "diverged" or "stopped" by a signal."""

    status: str
    signal: int = 0


class Loop:
    """The training loop of a run."""

    def __init__(
        self, session: Session, source: Source, folder: RunFolder, clock: Clock, display: Display, sinks: list[Sink],
        saved: Callable[[Path], object] = lambda folder: None,
    ) -> None:  # fmt: skip
        self.session, self.source, self.folder, self.clock = session, source, folder, clock
        self.display, self.sinks, self.saved = display, sinks, saved
        settings = session.settings
        self.batch_size, self.epochs, self.steps = settings.train.batch_size, settings.train.epochs, source.steps
        self.warmup = round(settings.optim.warmup_epochs * self.steps)
        self.evaluate_every = settings.train.evaluate_every or 1
        self.peak, self.split = settings.optim.lr, settings.data.evaluate
        self.earlier, self.began = session.progress.seconds, time.perf_counter()
        self.speed = 0.0

    def run(self) -> Ending:
        """Train until the last epoch, a signal, or a loss that is not finite."""
        progress = self.session.progress
        if progress.history and progress.history[-1]["train_loss"] is None:
            return Ending("diverged")
        while progress.epoch < self.epochs:
            ending = self.train_epoch()
            if ending is not None:
                return ending
            self._end_epoch()
        return Ending("finished")

    def train_epoch(self) -> Ending | None:
        """Train for the remaining steps of the epoch; return an `Ending` if the run ends with it."""
        session, progress = self.session, self.session.progress
        session.model.train()
        segment = Segment(progress)
        for images, labels in self.source.batches(progress.epoch, progress.step):
            set_learning_rate(session.optimizer, self._learning_rate())
            session.step(images, labels)
            progress.step += 1
            progress.images += self.batch_size
            segment.images += self.batch_size
            if progress.step % CHECKED_EVERY == 0 and not self._finite():
                segment.pause()
                return self._diverge()
            if self.display.due():
                self._show(segment)
            if progress.step < self.steps:  # after the last step a checkpoint is saved anyway
                save, signal = self.clock.tick()
                if save or signal:
                    segment.pause()
                    self._save()
                    segment.resume()
                if signal:
                    return Ending("stopped", signal)
        is_finite = self._finite()  # also waits for the GPU
        segment.pause()
        self.speed = segment.speed
        return None if is_finite else self._diverge()

    def _end_epoch(self) -> None:
        """Evaluate if it is time, record the metrics, and save a checkpoint."""
        session, progress = self.session, self.session.progress
        loss, correct = session.here.all_reduce(torch.stack([progress.loss, progress.correct.float()])).tolist()
        trained = self.steps * self.batch_size
        due = (progress.epoch + 1) % self.evaluate_every == 0 or progress.epoch + 1 == self.epochs
        held_out, accuracy = evaluate(session, self.source) if due else (None, None)
        self._record(
            {
                "train_loss": loss / (self.steps * session.here.world),
                "train_accuracy": 100 * correct / trained,
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
        """Record that the loss is not finite; earlier metrics are kept."""
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

    def _learning_rate(self) -> float:
        progress, optim = self.session.progress, self.session.settings.optim
        done = progress.epoch * self.steps + progress.step
        return learning_rate(
            done, self.epochs * self.steps, self.warmup, self.peak, start=optim.warmup_lr, end=optim.min_lr or 0.0,
            prefix=optim.warmup_prefix is not False,
        )  # fmt: skip

    def _finite(self) -> bool:
        """Return whether the loss of the epoch is finite in all processes."""
        return math.isfinite(self.session.here.all_reduce(self.session.progress.loss.clone()).item())

    def _seconds(self) -> float:
        return self.earlier + time.perf_counter() - self.began

    def _show(self, segment: "Segment") -> None:
        progress, world = self.session.progress, self.session.here.world
        seen = progress.step * self.batch_size / world
        loss, accuracy = progress.loss.item() / progress.step, 100 * progress.correct.item() / seen
        self.display.step(progress.epoch, progress.step, loss, accuracy, segment.speed)


@torch.no_grad()
def evaluate(session: Session, source: Source) -> tuple[float, float]:
    """Return the mean cross entropy and the accuracy in percent on the held-out images of all processes."""
    model, here = session.evaluated, session.here
    here.broadcast_buffers(model.buffers())
    training = model.training
    model.eval()
    totals = torch.zeros(3, device=here.device)
    for images, labels in source.evaluation():
        with session.autocast():
            scores = model(images)
        loss = F.cross_entropy(scores.float(), labels, reduction="sum")
        correct = (scores.argmax(1) == labels).sum()
        totals += torch.stack([loss, correct.float(), loss.new_tensor(len(labels))])
    model.train(training)
    loss_sum, correct_sum, count = here.all_reduce(totals).tolist()
    return loss_sum / count, 100 * correct_sum / count


class Segment:
    """A timer of training steps, which is paused while checkpoints are saved."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.images, self.spent, self.since = 0, 0.0, time.perf_counter()

    def pause(self) -> None:
        """Pause the timer, and add its time to the progress, so that a checkpoint has the time of its images."""
        now = time.perf_counter()
        passed, self.since = now - self.since, now
        self.spent += passed
        self.progress.training_seconds += passed

    def resume(self) -> None:
        """Start the timer again."""
        self.since = time.perf_counter()

    @property
    def speed(self) -> float:
        """Images per second so far."""
        return self.images / max(self.spent + time.perf_counter() - self.since, 1e-9)
