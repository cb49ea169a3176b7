"""One run in this process: its files, its output and its errors."""

import io
import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ghostnoise.lab.config import recipe
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.train import Options, train
from ghostnoise.lab.train import run as running
from ghostnoise.version import NUMERICS

SHORT = ["train.epochs=2", "train.batch_size=64", "data.limit=256", "train.device=cpu", "optim.warmup_epochs=0"]


pytestmark = pytest.mark.usefixtures("one_thread")


def options(path, **more):
    said, warned = io.StringIO(), io.StringIO()
    console, errors = Console(file=said, width=200), Console(file=warned, width=200)
    return Options(runs=path, thresholds=False, console=console, errors=errors, **more)


def printed(chosen):
    return chosen.console.file.getvalue(), chosen.errors.file.getvalue()


def run(path, *overrides, **more):
    return train(recipe.load("digits", [*SHORT, *overrides]), options(path, **more))


def lines(outcome):
    return [json.loads(line) for line in (outcome.folder / "metrics.jsonl").read_text().splitlines()]


def test_the_folder_has_everything(tmp_path):
    outcome = run(tmp_path)
    result = json.loads((outcome.folder / "result.json").read_text())
    assert result == outcome.result
    assert result["status"] == "finished"
    assert outcome.folder == tmp_path / "digits" / result["identity"]
    assert [line["epoch"] for line in lines(outcome)] == [1, 2]
    assert result["accuracy"] == lines(outcome)[-1]["accuracy"]
    assert result["best_accuracy"] == max(line["accuracy"] for line in lines(outcome))
    settings = json.loads((outcome.folder / "settings.json").read_text())
    assert settings["norm"]["method"] == "gni"
    assert settings["train"]["device"] == "cpu"
    assert json.loads((outcome.folder / "environment.json").read_text())["torch"] == torch.__version__
    assert len(list((outcome.folder / "checkpoints").iterdir())) == 2


def test_weights_sha256_identifies_the_weights_of_the_last_checkpoint(tmp_path):
    outcome = run(tmp_path)
    state = checkpoints.latest(outcome.folder / "checkpoints", pytest.fail).state
    again = run(tmp_path / "again")
    assert again.result["weights_sha256"] == outcome.result["weights_sha256"]
    other = checkpoints.latest(again.folder / "checkpoints", pytest.fail).state
    assert all(torch.equal(value, other["model"][name]) for name, value in state["model"].items())


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
    assert other.result["identity"] != plain.result["identity"]
    assert other.result["weights_sha256"] != plain.result["weights_sha256"]
    losses = [line["train_loss"] for line in lines(other)]
    assert losses[-1] < losses[0]


def test_in_one_process_the_global_scope_is_the_local_one(tmp_path):
    own, everyone = (run(tmp_path, "train.epochs=1", f"norm.scope={scope}") for scope in ("local", "global"))
    assert own.result["identity"] != everyone.result["identity"]
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
    assert compiled.result["identity"] != run(tmp_path).result["identity"]
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
    accuracies = [line["accuracy"] for line in lines(outcome)]
    assert lines(outcome)[-1]["train_accuracy"] > 60 > max(accuracies)


def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(tmp_path):
    chosen = options(tmp_path)
    outcome = train(recipe.load("digits", [*SHORT, "optim.lr=1e12", "train.epochs=5"]), chosen)
    assert outcome.result["status"] == "diverged"
    assert outcome.result["accuracy"] is None
    assert lines(outcome)[-1]["train_loss"] is None
    assert "diverged" in printed(chosen)[0]
    again = options(tmp_path)
    assert train(recipe.load("digits", [*SHORT, "optim.lr=1e12", "train.epochs=5"]), again).result == outcome.result


def test_a_diverged_run_without_its_result_ends_the_same_way(tmp_path):
    outcome = run(tmp_path, "optim.lr=1e12")
    before = lines(outcome)
    (outcome.folder / "result.json").unlink()
    again = run(tmp_path, "optim.lr=1e12")
    assert again.result["status"] == "diverged"
    assert again.result["weights_sha256"] == outcome.result["weights_sha256"]
    assert lines(again) == before


def test_a_finished_run_is_reported(tmp_path):
    first = run(tmp_path)
    chosen = options(tmp_path)
    second = train(recipe.load("digits", SHORT), chosen)
    assert second.result == first.result
    assert "is finished" in printed(chosen)[0]


def test_quiet_is_one_line(tmp_path):
    chosen = options(tmp_path, quiet=True)
    train(recipe.load("digits", SHORT), chosen)
    said, warned = printed(chosen)
    assert said.count("\n") == 1
    assert "validation accuracy" in said
    assert warned == ""


def test_a_line_for_each_epoch(tmp_path):
    chosen = options(tmp_path)
    train(recipe.load("digits", SHORT), chosen)
    said = printed(chosen)[0].splitlines()
    assert [line[:9] for line in said[1:3]] == ["epoch 1/2", "epoch 2/2"]
    assert "digits-net" in said[0]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome = run(tmp_path, tensorboard=True)
    events = EventAccumulator(str(outcome.folder / "tensorboard")).Reload()
    values = [event.value for event in events.Scalars("accuracy")]
    assert values == pytest.approx([line["accuracy"] for line in lines(outcome)])


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

    class Counting(Console):
        def print(self, *texts, **more):
            gc.collect()
            counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))

    chosen = Options(runs=tmp_path, thresholds=False, console=Counting(file=io.StringIO()))
    train(recipe.load("digits", [*SHORT, "train.epochs=6", "train.ema=0.9"]), chosen)
    epochs = counts[1:7]
    assert max(epochs[1:]) <= epochs[1] + 2


def test_only_a_smoke_run_uses_random_images_for_a_missing_data_set(tmp_path):
    chosen = options(tmp_path, data=tmp_path / "nothing")
    chosen_again = recipe.load("cpu-mlp", ["train.device=cpu"], smoke=True)
    outcome = train(chosen_again, chosen)
    assert outcome.result["status"] == "finished"
    assert "using random images of its shape (results are meaningless)" in printed(chosen)[1]
    resolved = recipe.resolve(chosen_again.settings, device="cpu", processes=1, stand_in=True)
    again = train(chosen_again.with_settings(resolved), options(tmp_path, data=tmp_path / "nothing"))
    assert again.result == outcome.result, "as a sweep passes it to its workers"
    with pytest.raises(UserError, match="ghostnoise data get cifar10"):
        train(recipe.load("cpu-mlp", ["train.device=cpu"]), options(tmp_path, data=tmp_path / "nothing"))
    assert Path(tmp_path / "cpu-mlp").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_runs_with_smoke(tmp_path, name):
    chosen = recipe.load(name, ["train.device=cpu"], smoke=True)
    assert train(chosen, options(tmp_path, data=tmp_path / "nothing")).result["status"] == "finished"


def recorded_with(folder, numerics):
    """Make a run's files look as if they were made with another numerics number."""
    path = folder / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"numerics": numerics}))


def test_a_run_of_another_numerics_number_is_trained_again(tmp_path):
    first = run(tmp_path)
    environment = json.loads((first.folder / "environment.json").read_text())
    assert (environment["numerics"], environment["threads"]) == (NUMERICS, 1)
    assert environment["commit"]
    recorded_with(first.folder, NUMERICS + 1)
    chosen = options(tmp_path)
    again = train(recipe.load("digits", SHORT), chosen)
    assert again.folder == first.folder
    assert again.result["weights_sha256"] == first.result["weights_sha256"]
    assert printed(chosen)[1].startswith(f"warning: {first.folder} was trained with numerics {NUMERICS + 1}, and this ")
    moved = json.loads((first.folder / "earlier" / f"numerics-{NUMERICS + 1}" / "result.json").read_text())
    assert moved == first.result
    assert json.loads((first.folder / "environment.json").read_text())["numerics"] == NUMERICS
