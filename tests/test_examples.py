"""The examples, run as a user would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ghostnoise

EXAMPLES = Path(__file__).parents[1] / "examples"
STARTUP = Path(__file__).parent / "startup"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RESULT = re.compile(r"(loss|distance|accuracy|length).* (\d+\.\d+) -> (\d+\.\d+)")
RISING = ("accuracy", "length")
RESULTS = {"timm_models.py": 3, "tabnet.py": 3}  # 1 for all others
RUNS = {
    "plain_pytorch.py": ["--steps 40"],
    "timm_models.py": ["--steps 10"],
    "tabnet.py": ["--steps 12 --batch-size 256 --virtual-batch-size 32"],
    "timm_training.py": ["--epochs 2"],
    "lightning_callback.py": ["--steps 30"],
    "hub.py": ["--steps 30"],
    "wandb_logging.py": ["--steps 21"],
    "accelerate_loop.py": ["--steps 30"],
    "corrupted_digits.py": ["--epochs 4"],
    "crossq_critic.py": ["--steps 2000"],
    "gradient_accumulation.py": ["--steps 30"],
    "ddp.py": ["--steps 30", "--steps 30 --scope global"],
}


def run(name, options, folder, scratch):
    launcher = TORCHRUN if name == "ddp.py" else ()
    paths = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment["TMPDIR"] = str(scratch)  # torchrun leaves its logs
    command = [sys.executable, *launcher, str(EXAMPLES / name), *options.split()]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=[] if name == "plain_pytorch.py" else pytest.mark.slow)
        for name in RUNS
        for options in RUNS[name]
    ],
)
def test_it_trains_leaves_no_file_and_warns_of_nothing_in_it(name, options, tmp_path, tmp_path_factory):
    done = run(name, options, tmp_path, tmp_path_factory.mktemp("scratch"))
    assert done.returncode == 0, done.stderr
    results = [(what, float(start), float(end)) for what, start, end in RESULT.findall(done.stdout)]
    assert len(results) == RESULTS.get(name, 1), done.stdout
    assert all((start < end) if what in RISING else (end < start) for what, start, end in results), done.stdout
    assert not list(tmp_path.iterdir())
    ours = (name, str(Path(ghostnoise.__file__).parent))
    assert not [line for line in done.stderr.splitlines() if any(path in line for path in ours)]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_it_is_short_and_run_here(path):
    assert path.name in RUNS
    assert len(path.read_text().splitlines()) <= 60


def test_weights_for_the_hub_load_into_plain_batch_norm(tmp_path, tmp_path_factory):
    """In a process without this library, from a local folder."""
    done = run("hub.py", f"--steps 2 --folder {tmp_path / 'stored'}", tmp_path, tmp_path_factory.mktemp("scratch"))
    assert done.returncode == 0, done.stderr
    assert "loaded into BatchNorm1d(96, " in done.stdout
    assert "same output: True" in done.stdout
    assert {path.name for path in (tmp_path / "stored").iterdir()} >= {"config.json", "model.safetensors"}
    code = """
import json, sys
sys.modules["ghostnoise"] = None
from safetensors.torch import load_file
from torch import nn
width = json.load(open("stored/config.json"))["width"]
model = nn.Module()
model.layers = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))
model.load_state_dict(load_file("stored/model.safetensors"), strict=True)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.slow
def test_the_schedule_of_a_callback_is_that_of_the_checkpoint(tmp_path):
    """A run that is resumed by Lightning continues with the ghost size at which it ended."""
    code = (
        (EXAMPLES / "lightning_callback.py").read_text().split("parser = argparse")[0]
        + """
digits = load_digits()
data = TensorDataset(torch.from_numpy(digits.data).float() / 8 - 1, torch.from_numpy(digits.target))
def fit(steps, path=None):
    callback = GhostSize(ghostnoise.LinearSchedule(16, 64, 8))
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_steps=steps, devices=1, callbacks=[callback], **quiet)
    trainer.fit(Classifier(), DataLoader(data, batch_size=128), ckpt_path=path)
    return trainer, callback.schedule
trainer, schedule = fit(3)
trainer.save_checkpoint("saved.ckpt")
assert schedule.ghost_size == 34, schedule
assert fit(5, "saved.ckpt")[1].ghost_size == 46
"""
    )
    environment = os.environ | {"PYTHONPATH": str(STARTUP), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
