"""Compare the trainer with a plain loop that shares only the data and the network with it."""

import io
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from ghostnoise.lab import data, models
from ghostnoise.lab.config import recipe
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.train import Options, loop, train
from ghostnoise.lab.train.session import Session
from ghostnoise.lab.train.stop import Stop

SHORT = ["train.epochs=3", "train.batch_size=64", "data.limit=640", "train.device=cpu", "optim.warmup_epochs=1"]
CPU = torch.device("cpu")


def quiet(tmp_path, **more):
    return Options(runs=tmp_path, thresholds=False, quiet=True, console=Console(file=io.StringIO()), **more)


def plain_loop(settings, tmp_path, optimizer):
    """Train with torch's optimizers and schedulers; return the model, its accuracy, and the accuracy of one image."""
    batch, epochs = settings.train.batch_size, settings.train.epochs
    source = data.open_source(settings.data, tmp_path, batch_size=batch, seed=settings.seed, device=CPU)
    torch.manual_seed(settings.seed)
    model = models.build(settings.model, settings.norm, source.info.shape, source.info.classes)
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": settings.optim.weight_decay}, {"params": others, "weight_decay": 0}]
    updates = optimizer(groups, settings.optim.lr)
    warm, steps = source.steps, epochs * source.steps
    warming = LinearLR(updates, 1 / warm, 1.0, total_iters=warm - 1)
    schedule = SequentialLR(updates, [warming, CosineAnnealingLR(updates, T_max=steps - warm)], [warm])
    for epoch in range(epochs):
        for images, labels in source.batches(epoch):
            loss = F.cross_entropy(model(images), labels, label_smoothing=settings.train.label_smoothing)
            updates.zero_grad()
            loss.backward()
            if settings.optim.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optim.clip)
            updates.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        pairs = [(model(images).argmax(1), labels) for images, labels in source.evaluation()]
    right = sum(int((guess == label).sum()) for guess, label in pairs)
    return model, 100 * right / source.info.eval_size, 100 / source.info.eval_size


@pytest.mark.parametrize(
    ("overrides", "optimizer"),
    [
        (["norm.method=bn"], lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9)),
        (
            ["optim.clip=0.5", "train.label_smoothing=0.1"],
            lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
        ),
        (["optim.name=adamw", "optim.lr=0.002"], lambda groups, lr: torch.optim.AdamW(groups, lr=lr)),
    ],
    ids=["bn", "gni", "adamw"],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # raised by SequentialLR
def test_the_trainer_matches_a_plain_loop(tmp_path, overrides, optimizer):
    chosen = recipe.load("digits", [*SHORT, *overrides])
    outcome = train(chosen, quiet(tmp_path))
    model, accuracy, an_image = plain_loop(chosen.settings, tmp_path, optimizer)
    state = checkpoints.read(checkpoints.latest(outcome.folder / "checkpoints", pytest.fail))["model"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            state[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert outcome.result["accuracy"] == pytest.approx(accuracy, abs=an_image)


class Watch:
    """Simulated time of the loop: each step takes a second."""

    def __init__(self, monkeypatch):
        self.time, step = 0.0, Session.step
        monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: self.time))
        monkeypatch.setattr(Session, "step", lambda *given: (step(*given), self.advance(1)))

    def advance(self, seconds):
        self.time += seconds


def test_each_checkpoint_has_the_training_time_of_its_images(tmp_path, monkeypatch):
    """64 images per second at every checkpoint, also after a run was stopped and resumed."""
    watch, stop, seen = Watch(monkeypatch), Stop(), []

    def saved(folder):
        watch.advance(100)
        state = checkpoints.read(checkpoints.latest(folder / "checkpoints", pytest.fail))
        seen.append((state["images"], state["training_seconds"]))
        stop.signal = 15 * (len(seen) == 3)

    chosen, options = recipe.load("digits", SHORT), quiet(tmp_path, checkpoint_seconds=0, saved=saved, stop=stop)
    assert train(chosen, options).signal == 15
    result = train(chosen, options).result
    assert result["images_per_second"] == 64
    assert seen == [(64 * step, step) for step in range(1, result["steps"] + 1)]


def test_accumulated_steps_are_resumed_bit_by_bit(tmp_path):
    """Interrupted again and again: noise, running statistics and averaged weights continue as if it had not been."""
    overrides = [
        *SHORT, "train.accumulation_steps=4", "train.ema=0.9", "norm.method=gni", "norm.ghost_size=8",
        "optim.warmup_lr=1e-6", "optim.warmup_prefix=false", "optim.min_lr=1e-5", "data.split_seed=run", "seed=3",
    ]  # fmt: skip
    chosen = recipe.load("digits", overrides)
    whole = train(chosen, quiet(tmp_path / "whole")).result
    stop, stops = Stop(), 0

    def saved(folder):
        stop.signal = 15

    result = None
    while result is None:
        stop.signal = 0
        result = train(chosen, quiet(tmp_path / "stopped", checkpoint_seconds=0, saved=saved, stop=stop)).result
        stops += 1
    assert stops > whole["steps"] / 3
    timings = {"seconds", "images_per_second", "ended"}
    assert {key: value for key, value in result.items() if key not in timings} == {
        key: value for key, value in whole.items() if key not in timings
    }


@pytest.mark.parametrize(("size", "steps"), [(8, 32), (64, 9)], ids=["in the middle", "at the end"])
def test_a_run_that_diverges_counts_the_time_of_its_images(tmp_path, monkeypatch, size, steps):
    """The loss is checked after every 32 steps and after the last step of an epoch."""
    Watch(monkeypatch)
    overrides = [*SHORT, f"train.batch_size={size}", "optim.lr=1e12", "optim.warmup_epochs=0"]
    result = train(recipe.load("digits", overrides), quiet(tmp_path)).result
    assert (result["status"], result["steps"], result["images_per_second"]) == ("diverged", steps, size)
