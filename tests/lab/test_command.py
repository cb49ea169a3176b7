"""The lab's commands as a user calls them: exit codes, one line for a mistake, nothing left behind."""

import json
import os
import subprocess
import sys

import pytest

from ghostnoise import cli

SHORT = ["train.epochs=1", "train.batch_size=64", "data.limit=256", "optim.warmup_epochs=0", "--device", "cpu"]


def test_train_takes_options_and_overrides_in_any_order(tmp_path, capsys):
    words = "train digits train.epochs=1 --runs RUNS data.limit=256 --quiet --seed 3 train.batch_size=64 --keep-malloc"
    arguments = f"{words} --test optim.warmup_epochs=0 --channels-last".split()
    arguments[arguments.index("RUNS")] = str(tmp_path)
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("test accuracy")
    (folder,) = (tmp_path / "digits").iterdir()
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["seed"] == 3
    assert settings["data"]["evaluate"] == "test"
    assert settings["train"]["channels_last"] is True
    assert settings["train"]["batch_size"] == 64


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "digit"], "did you mean digits?"),
        (["train", "digits", "norm.ghost_sise=4"], "norm.ghost_sise: unknown; did you mean norm.ghost_size?"),
        (["train", "digits", "norm.method=gby"], "norm.method='gby': must be"),
        (["train", "digits", "norm.method=gbn", "norm.ghost_size=512"], "ghost size not fitting"),
        (["train", "digits", "train.batch_size=4096"], "larger than the training set of 1293 images"),
        (["train", "digits", "--device", "tpu"], "train.device='tpu'"),
        (["train", "digits", "--amp", "fp16", "--device", "cpu"], "needs a GPU"),
        (["train", "digits", "model.name=resnet17"], "resnet1"),
        (["train", "digits", "model.width=16", "model.name=mlp", "model.widths=[4]"], "widths"),
        (["train", "table1"], "ghostnoise data get cifar100"),
        (["recipes", "digit"], "did you mean digits?"),
        (["data", "get"], "get without a name"),
        (["data", "verify", "cifar"], "cifar10"),
        (["data", "verify", "mnist"], "train-images-idx3-ubyte"),
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


def test_debug_shows_the_traceback(tmp_path):
    from ghostnoise.lab.errors import UserError

    with pytest.raises(UserError):
        cli.main(["train", "digit", "--debug"])


def test_unknown_options_are_refused(capsys):
    for arguments in (["train", "digits", "--unknown"], ["train", "digits", "--epochs=3"], ["recipes", "a", "b"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        assert exit_.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err


def test_recipes_and_data_are_listed(capsys, tmp_path):
    assert cli.main(["recipes"]) == 0
    assert "table2-c10" in capsys.readouterr().out
    assert cli.main(["recipes", "digits"]) == 0
    assert 'method = "gni"' in capsys.readouterr().out
    assert cli.main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    assert "fashion-mnist" in capsys.readouterr().out


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "pydantic" else real(name, *more)
    )
    assert cli.main(["train", "digits"]) == 2
    assert capsys.readouterr().err == "ghostnoise train: pydantic missing; pip install 'ghostnoise[lab]'\n"


@pytest.mark.slow
def test_two_processes_train_together_and_resume_to_the_bit(tmp_path):
    """Through torchrun: two runs end alike, one of them stopped in the middle by a signal to all."""
    import signal
    import time

    def start(runs):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                   "ghostnoise", "train", "digits", "train.epochs=6", "train.batch_size=64", "--runs", str(runs),
                   "--checkpoint-seconds", "0.05", "--quiet"]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}  # torchrun leaves its logs
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def finish(process):
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors

    def results(runs):
        (folder,) = (runs / "digits").iterdir()
        return json.loads((folder / "result.json").read_text())

    finish(start(tmp_path / "whole"))
    stopped = start(tmp_path / "stopped")
    while stopped.poll() is None and not list(tmp_path.glob("stopped/digits/*/checkpoints/*.pt")):
        time.sleep(0.01)
    stopped.send_signal(signal.SIGTERM)
    stopped.communicate(timeout=240)
    finish(start(tmp_path / "stopped"))
    whole, resumed = results(tmp_path / "whole"), results(tmp_path / "stopped")
    for name in ("weights_sha256", "accuracy", "train_loss", "identity"):
        assert whole[name] == resumed[name]
    assert whole["status"] == "finished"
