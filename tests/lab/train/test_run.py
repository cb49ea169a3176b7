"""One run in this process: its files, its output and its errors."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from ghostnoise.lab.config import recipe
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.events import Epoch, Started, Step
from ghostnoise.lab.store import checkpoints, record
from ghostnoise.lab.store.folder import history, read
from ghostnoise.lab.store.scan import look
from ghostnoise.lab.train import Options, train
from ghostnoise.lab.train import run as running
from ghostnoise.lab.train.machine import Stop
from ghostnoise.version import NUMERICS
from support.training import planned, trained

TIMINGS = ("seconds", "images_per_second")
SHORT = ["train.epochs=2", "train.batch_size=64", "data.limit=256", "train.device=cpu", "optim.warmup_epochs=0"]


pytestmark = pytest.mark.usefixtures("one_thread")


def load(*overrides):
    return recipe.load("digits", [*SHORT, *overrides])


def run(path, *overrides, **more):
    return trained(load(*overrides), path, **more)


def test_the_folder_has_everything(tmp_path):
    """A run that has ended is one file, the record, beside its weights."""
    outcome = run(tmp_path)
    stored = read(outcome.folder)
    assert (stored.status, stored.result) == ("finished", outcome.result)
    assert outcome.folder == tmp_path / "digits" / outcome.run.identity == stored.folder
    assert [line["epoch"] for line in outcome.lines] == [1, 2]
    assert outcome.result["accuracy"] == outcome.lines[-1]["accuracy"]
    assert outcome.result["best_accuracy"] == max(line["accuracy"] for line in outcome.lines)
    assert all({"lr", "seconds", "images_per_second"} <= line.keys() for line in outcome.lines)
    assert stored.settings == outcome.run.settings
    assert (stored.settings.norm.method, stored.settings.train.device) == ("gni", "cpu")
    assert [environment["torch"] for environment in stored.environments] == [torch.__version__]
    assert record.parse((outcome.folder / "run.json").read_bytes(), "digits").result == outcome.result
    assert {path.name for path in outcome.folder.iterdir()} == {".lock", "run.json", "checkpoints"}
    assert [path.name[:6] for path in (outcome.folder / "checkpoints").iterdir()] == ["final-"]


def test_settings_and_environment_are_written_and_the_run_is_locked_before_the_first_event(tmp_path):
    events = train(planned(load()), Options(runs=tmp_path, thresholds=False))
    started = next(events)
    assert isinstance(started, Started)
    stored = look(started.run.folder, pytest.fail)
    assert stored.status == "running"
    assert stored.settings == started.run.settings
    assert stored.environment["torch"] == torch.__version__
    events.close()
    assert look(started.run.folder, pytest.fail).status == "interrupted"


def test_the_events_tell_all_of_a_run_and_can_be_pickled(tmp_path):
    events = run(tmp_path, step_seconds=0, log_steps=2).events
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Started", *2 * ["Step", "Step", "Step", "Epoch", "Saved"], "Ended"]
    steps = [event for event in events if isinstance(event, Step)]
    assert [(step.epoch, step.done, step.total) for step in steps] == [(1 + k // 3, k + 1, 6) for k in range(6)]
    assert [step.gradient_norm is not None and step.memory > 10**6 for step in steps] == 3 * [False, True]
    epochs = [event for event in events if isinstance(event, Epoch)]
    assert [epoch.line["accuracy"] for epoch in epochs] == [
        line["accuracy"] for line in history(read(events[-1].run.folder))
    ]
    assert steps[2].accuracy == epochs[0].line["train_accuracy"]
    again = pickle.loads(pickle.dumps(events))
    assert again[-1].run.result == events[-1].run.result


def test_the_gradient_norm_is_that_before_clipping(tmp_path):
    """And measuring it changes no weight."""
    plain, measured, clipped = (
        run(tmp_path / name, *overrides, log_steps=steps)
        for name, overrides, steps in (("plain", (), 0), ("measured", (), 1), ("clipped", ("optim.clip=1e-4",), 1))
    )
    assert plain.result["weights_sha256"] == measured.result["weights_sha256"]
    norms = [[event.gradient_norm for event in each.events if isinstance(event, Step)] for each in (measured, clipped)]
    assert norms[0][0] == pytest.approx(norms[1][0])
    assert min(norms[1]) > 1e-2


def test_another_seed_is_another_run(tmp_path):
    assert run(tmp_path).result["weights_sha256"] != run(tmp_path, "seed=1").result["weights_sha256"]
    assert len(list((tmp_path / "digits").iterdir())) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.amp=bf16"],
        ["train.channels_last=true"],
        ["train.ema=0.9"],
        ["train.label_smoothing=0.1", "optim.clip=0.5"],
        ["optim.name=adamw", "optim.lr=0.001"],
        ["norm.method=bn"],
        ["train.accumulation_steps=2"],
        ["optim.warmup_epochs=1", "optim.warmup_lr=0.01", "optim.warmup_prefix=false", "optim.min_lr=0.01"],
        ["data.evaluate=test", "data.augment=flip-crop", "data.padding=1"],
    ],
    ids=lambda each: each[0],
)
def test_settings_are_used_and_learn(tmp_path, overrides):
    plain = run(tmp_path, "train.epochs=4")
    other = run(tmp_path, "train.epochs=4", *overrides)
    assert other.run.identity != plain.run.identity
    assert other.result["weights_sha256"] != plain.result["weights_sha256"]
    losses = [line["train_loss"] for line in other.lines]
    assert losses[-1] < losses[0]


def test_in_one_process_the_global_scope_is_the_local_one(tmp_path):
    own, everyone = (run(tmp_path, "train.epochs=1", f"norm.scope={scope}") for scope in ("local", "global"))
    assert own.run.identity != everyone.run.identity
    assert own.result["weights_sha256"] == everyone.result["weights_sha256"]


def test_compiled_steps_are_the_same_steps(tmp_path, monkeypatch):
    """With a compiler backend that changes nothing: one graph, the same state_dict keys, the same noise."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend=backend))
    compiled = run(tmp_path, "train.compile=true")
    assert len(graphs) == 1
    assert compiled.run.identity != run(tmp_path).run.identity
    assert compiled.result["accuracy"] == pytest.approx(run(tmp_path).result["accuracy"], abs=5)
    assert compiled.result["train_loss"] == pytest.approx(run(tmp_path).result["train_loss"], rel=1e-3)


def test_each_run_sets_whether_algorithms_are_deterministic(tmp_path, monkeypatch):
    """Also in a process with an earlier run of the other kind."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    modes = []

    def saved(folder):
        modes.append(torch.are_deterministic_algorithms_enabled())

    for wanted in ("true", "false"):
        run(tmp_path, "train.epochs=1", f"train.deterministic={wanted}", saved=saved)
    assert modes == [True, False]


def test_the_averaged_weights_are_evaluated(tmp_path):
    """With a decay near 1 the averaged weights stay near the initial ones, and so does their accuracy."""
    outcome = run(tmp_path, "train.ema=0.9999", "train.epochs=4")
    accuracies = [line["accuracy"] for line in outcome.lines]
    assert outcome.lines[-1]["train_accuracy"] > 60 > max(accuracies)


def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(tmp_path):
    outcome = run(tmp_path, "optim.lr=1e12", "train.epochs=5")
    assert outcome.result["status"] == "diverged"
    assert outcome.result["accuracy"] is None
    assert outcome.lines[-1]["train_loss"] is None
    assert "diverged" in outcome.printed
    assert run(tmp_path, "optim.lr=1e12", "train.epochs=5").result == outcome.result


def test_a_diverged_run_without_its_result_ends_the_same_way(tmp_path):
    outcome = run(tmp_path, "optim.lr=1e12")
    before = [{k: v for k, v in line.items() if k not in TIMINGS} for line in outcome.lines]
    (outcome.folder / "run.json").unlink()
    again = run(tmp_path, "optim.lr=1e12")
    assert again.result["status"] == "diverged"
    assert again.result["weights_sha256"] == outcome.result["weights_sha256"]
    assert [{k: v for k, v in line.items() if k not in TIMINGS} for line in again.lines] == before


def test_a_finished_run_is_reported(tmp_path):
    first, second = run(tmp_path), run(tmp_path)
    assert second.result == first.result
    assert "is finished" in second.printed
    (ended,) = second.events
    assert (ended.status, ended.early) == ("finished", True)


def test_quiet_is_one_line(tmp_path):
    outcome = run(tmp_path, quiet=True)
    assert outcome.printed.count("\n") == 1
    assert "validation accuracy" in outcome.printed
    assert outcome.warned == []


def test_a_line_for_each_epoch(tmp_path):
    said = run(tmp_path).printed.splitlines()
    assert [line[:9] for line in said[1:3]] == ["epoch 1/2", "epoch 2/2"]
    assert "digits-net" in said[0]


KEPT = {"weights": ["final"], "best": ["best", "final"], "checkpoints": ["final", "step", "step"]}


@pytest.mark.parametrize("keep", KEPT)
def test_what_is_kept_of_the_checkpoints(tmp_path, keep):
    """Weights have no state of the optimizer, and the best ones are those of the epoch in the result."""
    outcome = run(tmp_path, "train.epochs=4", "train.ema=0.5", keep=keep)
    folder = outcome.folder / "checkpoints"
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == KEPT[keep]
    for kind in ("final", "best"):
        for path in checkpoints.saved(folder, kind):
            state = checkpoints.read(checkpoints.intact(path))
            assert "optimizer" not in state
            assert state["epoch"] == (4 if kind == "final" else outcome.result["best_epoch"])
    (final,) = checkpoints.saved(folder, "final")
    weights = checkpoints.evaluated(checkpoints.read(checkpoints.intact(final)))
    assert checkpoints.weights_sha256(weights) == outcome.result["weights_sha256"]


def test_the_best_weights_of_a_resumed_run_are_those_of_an_uninterrupted_one(tmp_path):
    whole = run(tmp_path / "whole", "train.epochs=6", keep="best")
    stop, count = Stop(), []

    def saved(folder):
        count.append(folder)
        stop.signal = 15 * (len(count) == 3)

    assert run(tmp_path / "parts", "train.epochs=6", keep="best", saved=saved, stop=stop).signal == 15
    parts = run(tmp_path / "parts", "train.epochs=6", keep="best")
    first, second = (
        checkpoints.weights_sha256(checkpoints.weights_of(each.folder, pytest.fail, best=True)[0])
        for each in (whole, parts)
    )
    assert first == second
    assert len(parts.run.environments) == 2, "one for each segment"


def test_a_batch_larger_than_the_data(tmp_path):
    with pytest.raises(UserError, match=r"batch_size=512: must be at most the number of training images, 230"):
        run(tmp_path, "train.batch_size=512")
    assert not list(tmp_path.glob("**/*.part"))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UserError, match="a part of that path is a file"):
        run(tmp_path / "runs")


def test_a_full_disk_in_the_middle_keeps_the_checkpoints(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole", "train.epochs=4")
    real, count = os.fsync, []

    def fill(handle):
        count.append(handle)
        if len(count) > 14:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(UserError, match="the disk is full; make room and run the same command again"):
        run(tmp_path / "full", "train.epochs=4")
    assert not list(tmp_path.glob("**/*.part"))
    monkeypatch.setattr(os, "fsync", real)
    (folder,) = (tmp_path / "full" / "digits").iterdir()
    assert checkpoints.latest(folder / "checkpoints", pytest.fail) is not None
    again = run(tmp_path / "full", "train.epochs=4")
    assert again.result["weights_sha256"] == whole.result["weights_sha256"]


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_out_of_memory_suggests_a_batch_size(tmp_path, monkeypatch, error):
    def run_out(*arguments):
        raise error

    monkeypatch.setattr(running.models, "build", run_out)
    with pytest.raises(UserError, match=r"train\.batch_size=64: out of memory on cpu; try train\.batch_size=32"):
        run(tmp_path)


def test_other_errors_are_not_out_of_memory(tmp_path, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a defect")

    monkeypatch.setattr(running.models, "build", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        run(tmp_path)


@pytest.mark.slow
def test_memory_stays_flat_over_epochs(tmp_path):
    """The number of live tensors does not grow after the second epoch."""
    import gc

    counts = []

    for event in train(planned(load("train.epochs=6", "train.ema=0.9")), Options(runs=tmp_path, thresholds=False)):
        if isinstance(event, Epoch):
            gc.collect()
            counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
    epochs = counts[:6]
    assert max(epochs[1:]) <= epochs[1] + 2


def test_only_a_smoke_run_uses_random_images_for_a_missing_data_set(tmp_path):
    nothing = tmp_path / "nothing"
    chosen = recipe.load("cpu-mlp", ["train.device=cpu"], smoke=True)
    outcome = trained(chosen, tmp_path, data=nothing)
    assert outcome.result["status"] == "finished"
    assert "using random images of its shape (results are meaningless)" in outcome.warned[0]
    resolved = recipe.resolve(chosen.settings, device="cpu", processes=1, stand_in=True)
    again = trained(chosen.with_settings(resolved), tmp_path, data=nothing)
    assert again.result == outcome.result, "as a sweep passes it to its workers"
    with pytest.raises(UserError, match="ghostnoise data get cifar10"):
        trained(recipe.load("cpu-mlp", ["train.device=cpu"]), tmp_path, data=nothing)
    assert Path(tmp_path / "cpu-mlp").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_runs_with_smoke(tmp_path, name):
    chosen = recipe.load(name, ["train.device=cpu"], smoke=True)
    assert trained(chosen, tmp_path, data=tmp_path / "nothing").result["status"] == "finished"


def test_a_run_of_another_numerics_number_is_trained_again(tmp_path):
    first = run(tmp_path)
    (environment,) = first.run.environments
    assert (environment["numerics"], environment["threads"]) == (NUMERICS, 1)
    assert environment["commit"]
    path = first.folder / "run.json"
    path.write_text(path.read_text().replace(f'"numerics":{NUMERICS},', f'"numerics":{NUMERICS + 1},'))
    again = run(tmp_path)
    assert again.folder == first.folder
    assert again.result["weights_sha256"] == first.result["weights_sha256"]
    assert again.warned[0].startswith(f"{first.folder} was trained with numerics {NUMERICS + 1}, and this ")
    moved = first.folder / "earlier" / f"numerics-{NUMERICS + 1}" / "run.json"
    assert record.parse(moved.read_bytes(), "digits").result == first.result
    assert [each["numerics"] for each in read(first.folder).environments] == [NUMERICS]


def test_a_folder_that_is_deleted_while_its_run_is_trained_ends_the_run(tmp_path):
    with pytest.raises(UserError, match="was deleted while its run was trained; repeat the command"):
        run(tmp_path, saved=shutil.rmtree)
    assert run(tmp_path).result["status"] == "finished"
