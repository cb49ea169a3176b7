import os
import subprocess
import sys
from pathlib import Path

import pytest

from ghostnoise.version import __version__

ROOT = Path(__file__).parents[1]


def build(folder, compiler, *command, **environment):
    command = [sys.executable, "setup.py", "-q", *(command or ["build_ext", "--build-lib", str(folder)])]
    environment = {**os.environ, "CXX": compiler, **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_without_a_compiler_the_build_succeeds(tmp_path, compiler):
    done = build(tmp_path, compiler)
    assert done.returncode == 0
    assert "installs without its native CPU library" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("_library*"))


def test_a_library_that_is_required_but_not_built_is_an_error(tmp_path):
    done = build(tmp_path, "false", GHOSTNOISE_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert "native CPU library" in done.stderr


def test_a_wheel_without_the_library_is_for_every_platform(tmp_path):
    command = ["egg_info", "--egg-base", str(tmp_path), "build", "--build-base", str(tmp_path / "build")]
    command += ["bdist_wheel", "--dist-dir", str(tmp_path), "--bdist-dir", str(tmp_path / "bdist")]
    done = build(tmp_path, "false", *command)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("*.whl")] == [f"ghostnoise-{__version__}-py3-none-any.whl"]
