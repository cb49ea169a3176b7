"""The code of the tutorials, run as a reader would run it, with fewer steps and small data."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
STARTUP = Path(__file__).parent / "startup"
# Random images in place of CIFAR-10, which is not downloaded.
FAKE_DATA = """
from torchvision import datasets
datasets.CIFAR10 = lambda root, train, download, transform: datasets.FakeData(64, (3, 32, 32), 10, transform)
"""
SMALLER = {
    "cifar10": ("EPOCHS, BATCH = 20, 256", "EPOCHS, BATCH = 2, 32"),
    "layer-norm": ("STEPS = 300", "STEPS = 5"),
    "noise": ("STEPS = 100", "STEPS = 5"),
    "several-gpus": ("range(30)", "range(5)"),
}
PRINTED = {
    "cifar10": ["gni     32", "epoch 2: loss ", "test accuracy "],
    "layer-norm": ["4 layers: gni, ghost size 12", "after LayerNorm", "test accuracy "],
    "noise": ["8: a shift of ", "First ghost size to try: "],
    "several-gpus": ["2 processes, local scope: loss "],
}


def code(name):
    """Return the Python code of a tutorial, with fewer steps."""
    text = "\n".join(
        re.findall(r"^```python\n(.*?)^```", (TUTORIALS / f"{name}.md").read_text(), re.DOTALL | re.MULTILINE)
    )
    old, new = SMALLER[name]
    assert text.count(old) == 1, f"{name}: {old}"
    return text.replace(old, new)


def run(name, folder, *words, launcher=(), before=""):
    (folder / "tutorial.py").write_text(before + code(name))
    paths = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [sys.executable, *launcher, "tutorial.py", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def check(done, name):
    assert done.returncode == 0, done.stderr
    for text in PRINTED[name]:
        assert text in done.stdout


def test_every_tutorial_is_run():
    written = {path.stem for path in TUTORIALS.glob("*.md") if "```python\n" in path.read_text()}
    doctests = {path.stem for path in TUTORIALS.glob("*.md") if ">>> " in path.read_text()}
    assert written - doctests == set(SMALLER)


@pytest.mark.parametrize("name", ["noise", "layer-norm"])
def test_digits(name, capsys):
    with torch.random.fork_rng():
        exec(compile(code(name), f"{name}.md", "exec"), {"__name__": "tutorial"})
    printed = capsys.readouterr().out
    for text in PRINTED[name]:
        assert text in printed


@pytest.mark.slow
def test_cifar10(tmp_path):
    check(run("cifar10", tmp_path, before=FAKE_DATA), "cifar10")
    assert (tmp_path / "cifar10.pt").exists()


@pytest.mark.slow
def test_several_processes(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    check(run("several-gpus", tmp_path, launcher=torchrun), "several-gpus")
    assert "global scope: loss " in run("several-gpus", tmp_path, "global", launcher=torchrun).stdout


@pytest.mark.slow
def test_the_example_of_a_new_method(tmp_path):
    """Its source, in a copy of the library, passes the test that the page has for it."""
    page = (ROOT / "docs" / "adding-a-method.md").read_text()
    source, test = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names = re.findall(r"^## The (?:source file|test): `(.+)`$", page, re.MULTILINE)
    assert names == ["src/ghostnoise/methods/leave_out_batch_norm.py", "tests/methods/test_leave_out_batch_norm.py"]
    package = tmp_path / "ghostnoise"
    for path in (ROOT / "src" / "ghostnoise").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = package / path.relative_to(ROOT / "src" / "ghostnoise")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    (package / "methods" / "leave_out_batch_norm.py").write_text(source)
    (tmp_path / "test_example.py").write_text(test)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    options = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path))
    done = subprocess.run([sys.executable, "-m", "pytest", *options, "test_example.py"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    index = tmp_path / "README.md"
    index.write_text((ROOT / "docs" / "methods" / "README.md").read_text())
    for words in (("methods", "--write", str(index)), ("train", "digits", "norm.method=lobn", "norm.ghost_size=16")):
        ran = subprocess.run([sys.executable, "-m", "ghostnoise", *words], cwd=tmp_path, env=environment,
                             capture_output=True, text=True, timeout=300)  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "| `lobn` | [Leave-one-ghost-out batch normalization](leave-out-batch-norm.md) |" in index.read_text()
