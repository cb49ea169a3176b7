"""`ghostnoise train` as a user calls it: exit codes, one line for a mistake, nothing left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ghostnoise import cli
from ghostnoise.lab.store.folder import RunFolder, history, read
from ghostnoise.text import install_command

SHORT = ["train.epochs=1", "train.batch_size=64", "data.limit=256", "optim.warmup_epochs=0", "--device", "cpu"]


def test_train_takes_options_and_overrides_in_any_order(tmp_path, capsys):
    words = "train digits train.epochs=1 --runs RUNS data.limit=256 --quiet --seed 3 train.batch_size=64 --keep-malloc"
    arguments = f"{words} --test optim.warmup_epochs=0 --channels-last".split()
    arguments[arguments.index("RUNS")] = str(tmp_path)
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("test accuracy")
    (folder,) = (tmp_path / "digits").iterdir()
    settings = read(folder).settings
    assert (settings.seed, settings.data.evaluate) == (3, "test")
    assert (settings.train.channels_last, settings.train.batch_size) == (True, 64)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "digit"], "did you mean digits?"),
        (["train", "digits", "norm.ghost_sise=4"], "norm.ghost_sise: unknown; did you mean norm.ghost_size?"),
        (["train", "digits", "norm.method=gby"], "norm.method='gby': must be"),
        (["train", "digits", "norm.method=gbn", "norm.ghost_size=512"], "larger than the batch"),
        (["train", "digits", "train.batch_size=4096"], "must be at most the number of training images, 1293"),
        (["train", "digits", "train.device=tpu"], "train.device='tpu'"),
        (["train", "digits", "train.device=gpu"], "'mps'; did you mean 'cuda'?"),
        (["train", "digits", "--amp", "fp16", "--device", "cpu"], "needs a GPU"),
        (["train", "digits", "model.name=resnet17"], "resnet1"),
        (["train", "digits", "model.width=16", "model.name=mlp", "model.widths=[4]"], "widths"),
        (["train", "table1"], "ghostnoise data get cifar100"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, arguments, line):
    monkeypatch.setenv("GHOSTNOISE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("GHOSTNOISE_RUNS", str(tmp_path / "runs"))
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", [["--workers", "-1"], ["--workers", "x"], ["--log-steps", "0"], ["--keep", "all"]])
def test_a_number_that_is_out_of_range_is_refused_before_anything_is_done(tmp_path, capsys, words):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", "digits", *words, "--runs", str(tmp_path / "runs")])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_train_logs_to_tensorboard_and_keeps_the_best_weights(tmp_path):
    words = ["--runs", str(tmp_path), "--quiet", "--log", "tensorboard", "--log-steps", "2", "--keep", "best"]
    assert cli.main(["train", "digits", *SHORT, *words]) == 0
    (folder,) = (tmp_path / "digits").iterdir()
    assert {path.name for path in folder.iterdir()} == {".lock", "run.json", "checkpoints", "tensorboard"}
    assert sorted(path.name[:4] for path in (folder / "checkpoints").iterdir()) == ["best", "fina"]


def test_a_run_starts_from_the_weights_of_another_one(tmp_path, capsys):
    """Their checksum is part of the identity, and a resumed run checks it."""
    runs = ["--runs", str(tmp_path / "runs"), "--quiet", "--threads", "1"]
    long = ["train.epochs=8", "train.batch_size=64", "optim.warmup_epochs=0", "--device", "cpu"]
    assert cli.main(["train", "digits", *long, *runs]) == 0
    (first,) = (tmp_path / "runs" / "digits").iterdir()
    weights = tmp_path / "first.pt"
    assert cli.main(["runs", "export-weights", first.name, str(weights), "--runs", str(tmp_path / "runs")]) == 0
    words = ["train", "digits", *long, "train.epochs=1", "optim.lr=1e-30", *runs]
    assert cli.main([*words, "--init-from", str(weights)]) == 0
    (second,) = (path for path in (tmp_path / "runs" / "digits").iterdir() if path != first)
    ours, theirs = (read(path) for path in (first, second))
    assert theirs.settings.model.init == ours.result["weights_sha256"]
    assert theirs.accuracy == pytest.approx(ours.accuracy, abs=10)
    assert theirs.accuracy > 80
    capsys.readouterr()
    assert cli.main([*words, "--init-from", str(tmp_path / "none.pt")]) == 2
    assert cli.main([*words, "model.name=mlp", "--init-from", str(weights)]) == 2
    assert cli.main([*words, "model.init=abc"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "none.pt: cannot be read (No such file or directory)" in errors[0]
    assert "Give weights of the same network" in errors[1]
    assert "model.init: set by --init-from" in errors[2]
    assert len(errors) == 3


def test_debug_shows_the_traceback():
    from ghostnoise.lab.errors import UserError

    with pytest.raises(UserError):
        cli.main(["train", "digit", "--debug"])


def test_unknown_options_are_refused(capsys):
    for arguments in (["train", "digits", "--unknown"], ["train", "digits", "--epochs=3"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        assert exit_.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err


def test_without_the_extra_the_error_names_what_to_install(monkeypatch, capsys):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "pydantic" else real(name, *more)
    )
    assert cli.main(["train", "digits"]) == 2
    assert capsys.readouterr().err == "ghostnoise train: pydantic not installed; run " + install_command("lab") + "\n"


TOGETHER = """
import glob, pathlib, sys
from ghostnoise import cli
from ghostnoise.lab.store.folder import RunFolder, history, read

code = cli.main(sys.argv[1:])
names = [pathlib.Path(path).read_text() for path in glob.glob("/proc/self/task/*/comm")]
assert not any("gloo" in name for name in names), "these threads would still run when the interpreter exits"
sys.exit(code)
"""


def together(folder, *arguments):
    """Start two processes that train digits together."""
    script = folder / "together.py"
    script.write_text(TOGETHER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
               "train", "digits", "train.epochs=6", "train.batch_size=64", "--quiet", *arguments]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}  # torchrun leaves its logs
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stopped_and_resumed(folder, runs):
    """Stop a run at its first checkpoint by a signal to all, and resume it; return what both printed."""
    often = ("--runs", str(runs), "--checkpoint-seconds", "0.05")
    first = together(folder, *often)
    while first.poll() is None and not list(runs.glob("digits/*/checkpoints/*.pt")):
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    said = [first.communicate(timeout=240)]
    second = together(folder, *often)
    said.append(second.communicate(timeout=240))
    told = "\n".join(f"run {number}: {out}{errors}" for number, (out, errors) in enumerate(said))
    assert "stopped; " in said[0][0], told
    assert second.returncode == 0, told
    return told


def result(runs):
    (folder,) = (runs / "digits").iterdir()
    return {"identity": folder.name} | read(folder).result


@pytest.mark.slow
def test_two_processes_train_together_stop_and_resume(tmp_path):
    """Through torchrun."""
    told = stopped_and_resumed(tmp_path, tmp_path / "runs")
    found = result(tmp_path / "runs")
    assert (found["status"], found["epochs"], found["steps"]) == ("finished", 6, 120), told
    (folder,) = (tmp_path / "runs" / "digits").iterdir()
    assert [environment["processes"] for environment in read(folder).environments] == [2, 2], told
    assert len(history(read(folder))) == 6, told


@pytest.mark.slow
def test_two_processes_accumulate_the_gradients_of_their_micro_batches(tmp_path):
    """With batch norm at micro-batches of 16 samples, it does not matter which process has which of them."""
    overrides = ["norm.method=bn", "train.epochs=1", "optim.warmup_epochs=0", "data.limit=128", "data.evaluate=test"]
    done = together(tmp_path, *overrides, "train.accumulation_steps=2", "--runs", str(tmp_path / "two"))
    out, errors = done.communicate(timeout=240)
    assert done.returncode == 0, out + errors
    alone = ["train", "digits", "train.batch_size=64", *overrides, "train.accumulation_steps=4", "--quiet"]
    assert cli.main([*alone, "--runs", str(tmp_path / "one")]) == 0
    two, one = result(tmp_path / "two"), result(tmp_path / "one")
    assert two["steps"] == one["steps"] == 2
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)


@pytest.mark.slow
def test_two_processes_resume_to_the_bit(tmp_path):
    """Two runs end alike, one of them stopped in the middle."""
    whole = together(tmp_path, "--runs", str(tmp_path / "whole"))
    out, errors = whole.communicate(timeout=240)
    told = stopped_and_resumed(tmp_path, tmp_path / "stopped")
    told += f"whole: {out}{errors}"
    assert whole.returncode == 0, told
    first, second = result(tmp_path / "whole"), result(tmp_path / "stopped")
    for name in ("status", "weights_sha256", "accuracy", "train_loss", "identity"):
        assert first[name] == second[name], told


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["a flipped bit", "the state of the second process"])
def test_two_processes_meet_a_damaged_checkpoint(tmp_path, damage):
    """The first process sets it aside with one line, and both restore the one before it."""
    from ghostnoise.lab.store import checkpoints

    whole = together(tmp_path, "--runs", str(tmp_path / "whole"))
    out, errors = whole.communicate(timeout=240)
    assert whole.returncode == 0, out + errors
    runs = tmp_path / "damaged"
    often = ("--runs", str(runs), "--checkpoint-seconds", "0.02")
    first = together(tmp_path, *often)
    while first.poll() is None and len(list(runs.glob("digits/*/checkpoints/*.pt"))) < 2:
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=240)
    (folder,) = runs.glob("digits/*/checkpoints")
    last, before = checkpoints.saved(folder)
    if damage == "a flipped bit":
        content = bytearray(last.read_bytes())
        content[len(content) // 2] ^= 1
        last.write_bytes(content)
    else:
        state = checkpoints.read(last.read_bytes())
        state["ranks"][1]["generators"] = {}
        step = int(last.name.split("-")[1])
        last.unlink()
        last = checkpoints.save(folder, step, state)
    second = together(tmp_path, *often)
    out, errors = second.communicate(timeout=240)
    assert second.returncode == 0, out + errors
    (line,) = (line for line in errors.splitlines() if "warning" in line)
    assert line.startswith(f"warning: {last} is damaged (")
    assert last.with_suffix(".damaged").exists()
    assert before.name not in errors
    assert result(runs)["weights_sha256"] == result(tmp_path / "whole")["weights_sha256"]


@pytest.mark.slow
def test_the_first_of_two_processes_fails_with_one_line(tmp_path):
    """The other one has one line too, and no traceback."""
    short = ("train.epochs=1", "data.limit=256", "optim.warmup_epochs=0", "--runs", str(tmp_path / "runs"))
    first = together(tmp_path, *short)
    first.communicate(timeout=240)
    (folder,) = (tmp_path / "runs" / "digits").iterdir()
    (folder / "run.json").unlink()
    other = RunFolder(folder, pytest.fail)
    other.own()
    second = together(tmp_path, *short)
    _, errors = second.communicate(timeout=240)
    other.release()
    assert second.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("ghostnoise")]
    assert any(line.endswith("another process is training this run; wait for it, or stop it") for line in lines), errors
    assert not [line for line in lines if "unexpected" in line]
    assert len(lines) <= 2


@pytest.mark.slow
def test_two_processes_end_alike_however_often_they_evaluate(tmp_path):
    """An evaluation copies the statistics of the first process to the other one, and must not change the training."""
    found = []
    for every in ("1", "4"):
        runs = tmp_path / every
        method = ("norm.method=brn", "train.ema=0.9", "data.limit=512", f"train.evaluate_every={every}")
        process = together(tmp_path, *method, "--runs", str(runs))
        out, errors = process.communicate(timeout=240)
        assert process.returncode == 0, out + errors
        found.append(result(runs))
    for name in ("weights_sha256", "accuracy", "loss", "train_loss", "identity"):
        assert found[0][name] == found[1][name]


@pytest.mark.parametrize(
    ("method", "batch", "size", "warned"),
    [("gbn", 120, 64, True), ("gbn", 128, 64, False), ("gbn", 64, 64, False), ("gni", 120, 64, False)],
)
def test_ghost_batches_that_become_the_whole_batch_are_warned_about(tmp_path, capsys, method, batch, size, warned):
    words = ["train", "digits", f"norm.method={method}", f"norm.ghost_size={size}", *SHORT, f"train.batch_size={batch}"]
    assert cli.main([*words, "--runs", str(tmp_path), "--quiet"]) == 0
    expected = (
        "warning: GBN-64 with batches of 120: each batch is a single ghost batch of 120 samples, as in batch norm; use "
        "norm.ghost_size=60 or less, or a batch size of 128 or more per process\n"
    )
    assert capsys.readouterr().err == (expected if warned else "")
