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
RESULT = re.compile(r"loss (\d+\.\d+) -> (\d+\.\d+)")
RESULTS = {"timm_models.py": 3, "tabnet.py": 3}  # 1 for all others
RUNS = {
    "plain_pytorch.py": ["--steps 40"],
    "timm_models.py": ["--steps 10"],
    "tabnet.py": ["--steps 12 --batch-size 256 --virtual-batch-size 32"],
    "lightning_module.py": ["--steps 30"],
    "accelerate_loop.py": ["--steps 30"],
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
    results = [tuple(map(float, ends)) for ends in RESULT.findall(done.stdout)]
    assert len(results) == RESULTS.get(name, 1), done.stdout
    assert all(end < start for start, end in results), done.stdout
    assert not list(tmp_path.iterdir())
    ours = (name, str(Path(ghostnoise.__file__).parent))
    assert not [line for line in done.stderr.splitlines() if any(path in line for path in ours)]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_it_is_short_and_run_here(path):
    assert path.name in RUNS
    assert len(path.read_text().splitlines()) <= 60
