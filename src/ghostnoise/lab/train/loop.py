"""The training loop: steps, evaluation, epochs, checkpoints, and the end of a run, as a stream of events."""

import math
import time
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from typing import Any

import torch
import torch.nn.functional as F

from ghostnoise.lab.data import Source
from ghostnoise.lab.events import Epoch, Event, Saved, Step
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.store.folder import RunFolder
from ghostnoise.lab.store.record import finite
from ghostnoise.lab.train import metering
from ghostnoise.lab.train.machine import Clock, peak_memory
from ghostnoise.lab.train.session import Session, learning_rate

Record = dict[str, Any]
CHECKED_EVERY = 32  # steps between two checks that the loss is finite, which wait for the GPU


class Loop:
    """The training loop of a run; `status` tells how it ended: "finished", "diverged" or "stopped".

    A step is reported after `step_seconds`, and if `log_steps` is not 0, also after each so many steps, with the norm
    of its gradient and the memory. `keep_best` also saves the weights with the best accuracy.
    """

    def __init__(
        self, session: Session, source: Source, folder: RunFolder, clock: Clock, *, step_seconds: float = math.inf,
        log_steps: int = 0, keep_best: bool = False,
    ) -> None:  # fmt: skip
        self.session, self.source, self.folder, self.clock = session, source, folder, clock
        self.step_seconds, self.log_steps, self.keep_best = step_seconds, log_steps, keep_best
        settings = session.settings
        self.batch_size, self.epochs, self.steps = settings.train.batch_size, settings.train.epochs, source.steps
        self.warmup = round(settings.optim.warmup_epochs * self.steps)
        self.evaluate_every = settings.train.evaluate_every or 1
        self.earlier, self.began = session.progress.seconds, time.perf_counter()
        self.status, self.signal = "", 0
        self.speed, self.since = 0.0, 0.0
        self.shown = -math.inf if step_seconds < math.inf else math.inf

    @property
    def done(self) -> int:
        """Steps that are done."""
        return self.session.progress.epoch * self.steps + self.session.progress.step

    def run(self) -> Iterator[Event]:
        """Train until the last epoch, a signal, or a loss that is not finite."""
        progress = self.session.progress
        if progress.history and progress.history[-1]["train_loss"] is None:
            self.status = "diverged"
        while not self.status and progress.epoch < self.epochs:
            yield from self.train_epoch()
            if not self.status:
                yield from self._end_epoch()
        self.status = self.status or "finished"

    def train_epoch(self) -> Generator[Event]:
        """Train for the remaining steps of the epoch, and set `status` if the run ends with it."""
        session, progress, optim = self.session, self.session.progress, self.session.settings.optim
        session.model.train()
        images, spent, self.since = progress.images, progress.training_seconds, time.perf_counter()
        for inputs, labels in self.source.batches(progress.epoch, progress.step):
            lr = learning_rate(
                self.done, self.epochs * self.steps, self.warmup, optim.lr, start=optim.warmup_lr,
                end=optim.min_lr or 0.0, prefix=optim.warmup_prefix is not False,
            )  # fmt: skip
            logged = self.log_steps > 0 and (self.done + 1) % self.log_steps == 0
            session.step(inputs, labels, lr, measure=logged)
            progress.step += 1
            progress.images += self.batch_size
            if progress.step % CHECKED_EVERY == 0 and not self._finite():
                break
            now = time.perf_counter()
            if logged or now >= self.shown + self.step_seconds:
                self.shown = now
                speed = (progress.images - images) / max(progress.training_seconds - spent + now - self.since, 1e-9)
                yield self._step_event(lr, speed, logged)
            if progress.step < self.steps:  # after the last step a checkpoint is saved anyway
                save, signal = self.clock.tick()
                if save or signal:
                    self._pause()
                    yield from self._save()
                    self.since = time.perf_counter()
                if signal:
                    self.status, self.signal = "stopped", signal
                    return
        is_finite = self._finite()  # also waits for the GPU
        self._pause()
        self.speed = (progress.images - images) / max(progress.training_seconds - spent, 1e-9)
        if not is_finite:
            self.status = "diverged"
            yield self._record({"train_loss": None, "train_accuracy": None, "loss": None, "accuracy": None})
            yield from self._save()

    def _step_event(self, lr: float, speed: float, logged: bool) -> Step:
        progress, here = self.session.progress, self.session.here
        loss = progress.loss.item() / progress.step
        accuracy = 100 * progress.correct.item() * here.world / (progress.step * self.batch_size)
        total = self.epochs * self.steps
        if not logged:
            return Step(progress.epoch + 1, self.done, total, loss, accuracy, speed, lr)
        norm = None if self.session.gradient_norm is None else self.session.gradient_norm.item()
        return Step(progress.epoch + 1, self.done, total, loss, accuracy, speed, lr, norm, peak_memory(here.device))

    def _end_epoch(self) -> Iterator[Event]:
        """Evaluate if it is time, record the metrics, and save a checkpoint."""
        session, progress, meter = self.session, self.session.progress, self.session.settings.meter
        loss, correct = session.here.all_reduce(torch.stack([progress.loss, progress.correct.float()])).tolist()
        trained, epoch = self.steps * self.batch_size, progress.epoch + 1
        due = epoch % self.evaluate_every == 0 or epoch == self.epochs
        held_out, accuracy = evaluate(session, self.source) if due else (None, None)
        event = self._record(
            {
                "train_loss": loss / (self.steps * session.here.world),
                "train_accuracy": 100 * correct / trained,
                "loss": held_out,
                "accuracy": accuracy,
                "images_per_second": round(self.speed, 1),
            }
        )
        yield event
        if meter is not None and (epoch in (1, self.epochs) or epoch % meter.every == 0):
            read = metering.measure(session, self.source, progress.epoch)
            if session.here.first:
                self.folder.record_noise(epoch, read)
        progress.epoch = epoch
        progress.start_epoch(session.here.device)
        yield from self._save(best=event.best and self.keep_best)

    def _record(self, metrics: Record) -> Epoch:
        progress = self.session.progress
        shared = {
            "epoch": progress.epoch + 1,
            "step": self.done,
            "lr": self.session.optimizer.param_groups[0]["lr"],
            "split": self.session.settings.data.evaluate,
        }
        line = finite(shared | metrics | {"seconds": round(self.earlier + time.perf_counter() - self.began, 3)})
        progress.history.append(line)
        if self.session.here.first:
            self.folder.record(line)
        return Epoch(line, line["accuracy"] is not None and progress.best is line)

    def _save(self, best: bool = False) -> Iterator[Event]:
        self.session.progress.seconds = self.earlier + time.perf_counter() - self.began
        state = self.session.state()
        if self.session.here.first:
            if best:  # before the checkpoint: a run that resumes from it has the best weights up to there
                checkpoints.save(self.folder.path / "checkpoints", self.done, checkpoints.weights(state), "best")
            yield Saved(self.folder.save(self.done, state), self.done)
        self.clock.reset()

    def _finite(self) -> bool:
        """Return whether the loss of the epoch is finite in all processes."""
        return math.isfinite(self.session.here.all_reduce(self.session.progress.loss.clone()).item())

    def _pause(self) -> None:
        """Add the time of the steps since the last pause, so that a checkpoint has the time of its images."""
        self.session.progress.training_seconds += time.perf_counter() - self.since

    def result(self) -> Record:
        """Return the result of a run that finished or diverged."""
        session, progress = self.session, self.session.progress
        last, best = progress.history[-1], progress.best or {"accuracy": None, "epoch": None}
        return {
            "status": self.status,
            "split": last["split"],
            "epochs": progress.epoch,
            "steps": last["step"],
            "train_loss": last["train_loss"],
            "train_accuracy": last["train_accuracy"],
            "loss": last["loss"],
            "accuracy": last["accuracy"],
            "best_accuracy": best["accuracy"],
            "best_epoch": best["epoch"],
            "parameters": session.parameters,
            "weights_sha256": checkpoints.weights_sha256(session.evaluated.state_dict()),
            "images_per_second": round(progress.images / max(progress.training_seconds, 1e-9), 1),
            "seconds": round(progress.seconds, 3),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        }


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
