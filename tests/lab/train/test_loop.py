"""Compare the trainer with a plain loop that shares only the data and the network with it."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from ghostnoise import cli
from ghostnoise.lab import data, models
from ghostnoise.lab.config import recipe
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.store.folder import history, read
from ghostnoise.lab.train import loop
from ghostnoise.lab.train.machine import Stop
from ghostnoise.lab.train.session import Session
from support.html_page import read as read_page
from support.training import trained

SHORT = ["train.epochs=3", "train.batch_size=64", "data.limit=640", "train.device=cpu", "optim.warmup_epochs=1"]
CPU = torch.device("cpu")


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
    outcome = trained(chosen, tmp_path)
    model, accuracy, an_image = plain_loop(chosen.settings, tmp_path, optimizer)
    state = checkpoints.weights_of(outcome.folder, pytest.fail)[0]
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
        monkeypatch.setattr(Session, "step", lambda *given, **more: (step(*given, **more), self.advance(1)))

    def advance(self, seconds):
        self.time += seconds


def test_each_checkpoint_has_the_training_time_of_its_images(tmp_path, monkeypatch):
    """64 images per second at every checkpoint, also after a run was stopped and resumed."""
    watch, stop, seen = Watch(monkeypatch), Stop(), []

    def saved(folder):
        watch.advance(100)
        state = checkpoints.latest(folder / "checkpoints", pytest.fail).state
        seen.append((state["images"], state["training_seconds"]))
        stop.signal = 15 * (len(seen) == 3)

    chosen, more = recipe.load("digits", SHORT), {"checkpoint_seconds": 0, "saved": saved, "stop": stop}
    assert trained(chosen, tmp_path, **more).signal == 15
    result = trained(chosen, tmp_path, **more).result
    assert result["images_per_second"] == 64
    assert seen == [(64 * step, step) for step in range(1, result["steps"] + 1)]


def test_accumulated_steps_are_resumed_bit_by_bit(tmp_path):
    """Interrupted again and again: noise, running statistics and averaged weights continue as if it had not been."""
    overrides = [
        *SHORT, "train.accumulation_steps=4", "train.ema=0.9", "norm.method=gni", "norm.ghost_size=8",
        "optim.warmup_lr=1e-6", "optim.warmup_prefix=false", "optim.min_lr=1e-5", "data.split_seed=run", "seed=3",
    ]  # fmt: skip
    chosen = recipe.load("digits", overrides)
    whole = trained(chosen, tmp_path / "whole").result
    stop, stops = Stop(), 0

    def saved(folder):
        stop.signal = 15

    result = None
    while result is None:
        stop.signal = 0
        result = trained(chosen, tmp_path / "stopped", checkpoint_seconds=0, saved=saved, stop=stop).result
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
    result = trained(recipe.load("digits", overrides), tmp_path).result
    assert (result["status"], result["steps"], result["images_per_second"]) == ("diverged", steps, size)


def metrics(folder):
    return history(read(folder))


def evaluated(folder):
    """Return the epochs that were evaluated, and check that the others have training metrics only."""
    lines = metrics(folder)
    for line in lines:
        assert (line["loss"] is None) == (line["accuracy"] is None)
        assert line["train_loss"] > 0
        assert line["images_per_second"] > 0
    return [line["epoch"] for line in lines if line["accuracy"] is not None]


FIVE = [*SHORT, "train.epochs=5", "data.limit=256"]


@pytest.mark.parametrize(
    ("every", "epochs"),
    [(None, [1, 2, 3, 4, 5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (5, [5]), (60, [5])],
)
def test_how_often_a_run_is_evaluated_changes_only_the_evaluations(tmp_path, every, epochs):
    settings = [*FIVE, "train.ema=0.9"]
    whole = trained(recipe.load("digits", settings), tmp_path / "whole")
    chosen = recipe.load("digits", [*settings, *([] if every is None else [f"train.evaluate_every={every}"])])
    rare = trained(chosen, tmp_path / "rare")
    assert evaluated(rare.folder) == epochs
    assert rare.folder.name == whole.folder.name
    for name in ("status", "weights_sha256", "loss", "accuracy", "train_loss", "train_accuracy", "steps"):
        assert rare.result[name] == whole.result[name], name
    lines = {line["epoch"]: line for line in metrics(whole.folder)}
    for line in metrics(rare.folder):
        names = [
            "train_loss",
            "train_accuracy",
            "lr",
            *(["loss", "accuracy"] if line["epoch"] in epochs else []),
        ]
        assert [line[name] for name in names] == [lines[line["epoch"]][name] for name in names]
    assert rare.result["best_accuracy"] == max(lines[epoch]["accuracy"] for epoch in epochs)
    assert rare.result["best_epoch"] in epochs


@pytest.mark.parametrize("stopped_after", [1, 3, 6, 8])
def test_a_stopped_run_resumes_with_another_evaluate_every(tmp_path, stopped_after):
    """The same weights and metrics; before the stop every second epoch is evaluated, and after it every third."""
    whole = trained(recipe.load("digits", FIVE), tmp_path / "whole")
    stop, count = Stop(), []

    def saved(folder):
        count.append(folder)
        stop.signal = 15 * (len(count) >= stopped_after)

    more = {"checkpoint_seconds": 0, "saved": saved, "stop": stop}
    first = trained(recipe.load("digits", [*FIVE, "train.evaluate_every=2"]), tmp_path / "parts", **more)
    assert first.signal == 15
    done = len(metrics(first.folder))
    second = trained(recipe.load("digits", [*FIVE, "train.evaluate_every=3"]), tmp_path / "parts")
    assert second.folder == first.folder
    assert second.result["weights_sha256"] == whole.result["weights_sha256"]
    assert second.result["accuracy"] == whole.result["accuracy"]
    assert evaluated(second.folder) == [
        epoch for epoch in range(1, 6) if epoch == 5 or epoch % (2 if epoch <= done else 3) == 0
    ]
    assert [line["train_loss"] for line in metrics(second.folder)] == [
        line["train_loss"] for line in metrics(whole.folder)
    ]
    assert read(second.folder).settings.train.evaluate_every == 3


def test_a_finished_run_is_not_trained_again_for_another_evaluate_every(tmp_path):
    first = trained(recipe.load("digits", [*FIVE, "train.evaluate_every=5"]), tmp_path)
    again = trained(recipe.load("digits", FIVE), tmp_path)
    assert again.result == first.result
    assert len(list((tmp_path / "digits").iterdir())) == 1


def test_only_evaluated_epochs_are_printed(tmp_path):
    printed = trained(recipe.load("digits", [*FIVE, "train.evaluate_every=2"]), tmp_path).printed.splitlines()
    assert [line[:9] for line in printed[1:-1]] == ["epoch 2/5", "epoch 4/5", "epoch 5/5"]
    assert re.match(r"validation accuracy [\d.]+ % \(best [\d.]+ % after epoch [245]\), ", printed[-1])


def test_a_run_that_diverges_before_its_first_evaluation(tmp_path):
    overrides = [*FIVE, "optim.lr=1e12", "optim.warmup_epochs=2", "train.evaluate_every=5"]
    outcome = trained(recipe.load("digits", overrides), tmp_path)
    assert (outcome.result["status"], outcome.result["accuracy"]) == ("diverged", None)
    assert (outcome.result["best_accuracy"], outcome.result["best_epoch"]) == (None, None)
    last = outcome.printed.splitlines()[-1]
    assert last.startswith("diverged: the loss was not finite after ")
    assert "best" not in last


def test_runs_and_report_accept_epochs_without_an_evaluation(tmp_path, capsys):
    path = tmp_path / "tiny.toml"
    path.write_text(recipe.read("digits") + "[grid]\nseeds = [0, 1]\n[[grid.methods]]\nlabel = 'GNI'\n")
    words = [*FIVE, "train.evaluate_every=3"]
    for seed in (0, 1):
        trained(recipe.load(str(path), [*words, f"seed={seed}"]), tmp_path / "runs")
    place = ["--runs", str(tmp_path / "runs")]
    assert cli.main(["runs", "train.evaluate_every=3", *place]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 runs"
    out = tmp_path / "out"
    assert cli.main(["report", str(path), *FIVE, *place, "--out", str(out)]) == 0
    (group,) = json.loads(read_page((out / "index.html").read_text(encoding="utf-8")).scripts[0])["training"]["groups"]
    curve = group["curves"]["accuracy"]
    assert curve["x"] == [3, 5]
    assert [[value is None for value in run] for run in curve["runs"]] == 2 * [[False, False]]
    assert "(2)" in (out / "table.md").read_text(encoding="utf-8")
