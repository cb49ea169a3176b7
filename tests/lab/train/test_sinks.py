"""What the terminal, TensorBoard and Weights & Biases get, and that none of them ends a run."""

import json
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ghostnoise.lab.config import recipe
from ghostnoise.lab.events import Ended, Epoch, Saved, Started, Step
from ghostnoise.lab.run import Run
from ghostnoise.lab.store.folder import history, read
from ghostnoise.lab.sweep import run as sweeping
from ghostnoise.lab.sweep.run import Options, sweep
from ghostnoise.lab.train import sinks
from ghostnoise.lab.train.machine import Stop
from ghostnoise.lab.train.sinks import Logs
from support import experiment, jobs
from support.training import trained

SHORT = ["train.epochs=2", "train.batch_size=64", "data.limit=640", "train.device=cpu", "optim.warmup_epochs=0"]
pytestmark = pytest.mark.usefixtures("one_thread")


def logged(runs, *names, every=3, warn=pytest.fail, **options):
    """Train with logs, and return the outcome."""
    chosen = recipe.load("digits", [*SHORT, *options.pop("overrides", [])])
    outcome = trained(chosen, runs, log_steps=every, **options)
    logs, planned = Logs(names, every, warn), Run.planned(chosen.name, chosen.settings)
    for event in outcome.events:
        logs.take(planned, event)
    logs.close()
    return outcome


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_tensorboard_gets_settings_and_the_curves_by_epoch_and_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome = logged(tmp_path, "tensorboard", overrides=["train.epochs=3", "train.evaluate_every=2"])
    epochs = [event.line for event in outcome.events if isinstance(event, Epoch)]
    for name in ("accuracy", "loss", "train_loss", "lr", "images_per_second"):
        expected = {line["step"]: line[name] for line in epochs if line[name] is not None}
        assert len(expected) == (2 if name in ("accuracy", "loss") else 3)
        assert scalars(outcome.folder, name) == pytest.approx(expected, rel=1e-6)
    steps = {event.done: event for event in outcome.events if isinstance(event, Step) and event.done % 3 == 0}
    assert len(steps) == 9
    for name in ("loss", "accuracy", "gradient_norm", "memory", "images_per_second", "lr"):
        expected = {done: getattr(event, name) for done, event in steps.items()}
        assert scalars(outcome.folder, f"step/{name}") == pytest.approx(expected, rel=1e-6)
    events = EventAccumulator(str(outcome.folder / "tensorboard")).Reload()
    (text,) = events.Tensors("settings/text_summary")
    assert b"norm.method = gni" in text.tensor_proto.string_val[0]


def test_a_resumed_run_replaces_what_tensorboard_had_after_its_checkpoint(tmp_path):
    stop = Stop()

    def saved(folder):
        stop.signal = 15

    assert logged(tmp_path, "tensorboard", stop=stop, saved=saved).signal == 15
    outcome = logged(tmp_path, "tensorboard")
    steps = scalars(outcome.folder, "step/loss")
    assert list(steps) == [3, 6, 9, 12, 15, 18]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """W&B without a server; its own settings and caches are in a temporary folder."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    return wandb


BLOCK = 32768


def records_of(folder):
    """The records in the file that W&B writes offline: the format of LevelDB's log, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    content, at, whole, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the only, or the last part of a record
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            found.append(record)
            whole = b""
    return found


def items(record):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.item}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:unclosed:ResourceWarning")
def test_weights_and_biases_gets_the_same_in_offline_mode(tmp_path, offline):
    outcome = logged(tmp_path, "wandb")
    offline.teardown()  # its service writes the file when it ends
    found = records_of(outcome.folder)
    (started,) = (record.run for record in found if record.HasField("run"))
    assert started.project == "ghostnoise"
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["norm.method"] == "gni"
    assert config["environment.threads"] == 1
    history_ = [items(record.history) for record in found if record.HasField("history")]
    steps = {line["step"]: line for line in history_ if "step/loss" in line}
    assert list(steps) == [3, 6, 9, 12, 15, 18]
    assert all(line["step/gradient_norm"] > 0 and line["step/memory"] > 0 for line in steps.values())
    accuracies = [line["accuracy"] for line in history_ if "accuracy" in line]
    assert accuracies == [line["accuracy"] for line in history(outcome.run)]


class Broken:
    """A sink that fails in one of its methods."""

    where = ""

    def __init__(self, started, settings):
        self.fail("made")

    def step(self, done, values):
        self.fail("step")

    def close(self, result):
        self.fail("close")

    def fail(self, name):
        if name == self.where:
            raise OSError("no space\nor no network")


@pytest.mark.parametrize("where", ["made", "step", "close"])
def test_a_sink_that_fails_ends_no_run_and_is_warned_about_once(tmp_path, monkeypatch, where):
    warned = []
    monkeypatch.setattr(Broken, "where", where)
    monkeypatch.setitem(sinks.SINKS, "tensorboard", Broken)
    outcome = logged(tmp_path, "tensorboard", warn=warned.append)
    assert outcome.result["status"] == "finished"
    assert warned == ["--log tensorboard: OSError: no space; the run continues without it"]


def test_a_sink_that_is_not_installed_ends_no_run(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert logged(tmp_path, "wandb", warn=warned.append).result["status"] == "finished"
    (line,) = warned
    assert line.startswith("--log wandb: not installed (")
    assert line.endswith("[wandb]', or leave it out")


def test_a_sweep_logs_each_of_its_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "make_runner", lambda options, place, runs: jobs.Inline(place))
    from ghostnoise.lab.config import grid

    made = grid.load(experiment.write(tmp_path), ["train.device=cpu"], seeds=[0], only=["BN", "GBN"])
    warned = []
    options = Options(runs=tmp_path / "runs", logs=["tensorboard"], log_steps=2, quiet=True)
    monkeypatch.setattr(Options, "warn", lambda self, text: warned.append(text))
    assert sweep(made, options).code == 0
    assert warned == []
    folders = list(Path(tmp_path / "runs" / "small").iterdir())
    assert len(folders) == 3
    for folder in folders:
        assert scalars(folder, "accuracy") == pytest.approx({3: read(folder).accuracy}, rel=1e-6)
        assert list(scalars(folder, "step/gradient_norm")) == [2]


def test_logs_keep_runs_apart_and_close_what_did_not_end():
    """As with a sweep of several workers that is stopped."""
    seen = []

    class Recording:
        def __init__(self, started, settings):
            self.name = started.run.identity

        def step(self, done, values):
            seen.append((self.name, done, values))

        def close(self, result):
            seen.append((self.name, "closed", dict(result)))

    runs = [Run("digits", name, {}, folder=Path(name)) for name in ("a", "b")]
    logs = Logs(["tensorboard"], 1, pytest.fail)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sinks.SINKS, "tensorboard", Recording)
        for run in runs:
            logs.take(run, Started(run, "", 0, 2))
    logs.take(runs[0], Epoch({"epoch": 1, "step": 2, "accuracy": 5.0, "loss": None}, True))
    logs.take(runs[0], Saved(Path("a"), 2))
    logs.take(runs[0], Ended("finished", replace(runs[0], result={"accuracy": 5.0})))
    logs.close()
    assert seen == [("a", 2, {"accuracy": 5.0}), ("a", "closed", {"accuracy": 5.0}), ("b", "closed", {})]
