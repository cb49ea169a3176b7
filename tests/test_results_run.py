"""`make results`: missing runs are trained in a clone of HEAD, and records and pages of the tree are extended."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ghostnoise.lab.store import records
from support.experiment import BASE

ROOT = Path(__file__).parents[1]
SMALL = """
[grid]
seeds = [0]
[[grid.methods]]
label = "GNI"
"""


def git(*words):
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path):
    """A clone of this repository with a small recipe, and a list with it and with experiments that cannot run."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tree = tmp_path / "tree"
    git("clone", "--quiet", str(ROOT), str(tree))
    git("-C", str(tree), "config", "user.name", "test")
    git("-C", str(tree), "config", "user.email", "test@example.org")
    shutil.copytree(
        ROOT / "src", tree / "src", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    shutil.rmtree(tree / "results")
    (tree / "results").mkdir()
    shutil.copy(ROOT / "results" / "run.sh", tree / "results")
    shutil.copy(ROOT / ".gitignore", tree)
    (tree / "src/ghostnoise/lab/recipes/small.toml").write_text(BASE + SMALL)
    (tree / "results" / "order.txt").write_text("# first\n\nfig1 --seeds 0\nno-such-recipe\nsmall\n")
    for page in (tree / "README.md", *(tree / "docs").rglob("*.md")):
        page.write_text("text\n")
    git("-C", str(tree), "add", "-A")
    git("-C", str(tree), "commit", "--quiet", "-m", "a small experiment")
    return tree


def run(tree):
    environment = {**os.environ, "RESULTS_PYTHON": sys.executable, "GHOSTNOISE_DATA": str(tree / "none")}
    done = subprocess.run(
        ["sh", "results/run.sh"], cwd=tree, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_results_are_run_once_from_a_commit(tree):
    (tree / "src/ghostnoise/lab/recipes/small.toml").write_text("a tree under edit is not imported")
    done = run(tree)
    assert "uncommitted changes are not used" in done.stdout
    assert "its images were not found" in done.stderr
    assert "recipe 'no-such-recipe': not found" in done.stderr
    path = tree / "results" / "small" / "records.jsonl"
    (record,) = records.load(path).runs.values()
    assert record.environment["commit"] == git("-C", str(tree), "rev-parse", "HEAD")
    assert record.environment["threads"] == 1
    page = (tree / "results" / "small" / "README.md").read_text()
    assert f"{record.accuracy:.2f}" in page
    assert record.environment["commit"][:10] in page
    assert not git("-C", str(tree), "status", "--porcelain", ".results")
    content = path.read_bytes()
    shutil.rmtree(tree / ".results" / "runs")  # the records alone are enough
    again = run(tree)
    assert "imported 1 run, 0 already there" in again.stdout
    assert "1 finished (1 of them earlier)" in again.stdout
    assert path.read_bytes() == content
    assert (tree / "results" / "small" / "README.md").read_text() == page
