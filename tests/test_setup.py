import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def build(folder, compiler):
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)]
    environment = {**os.environ, "CXX": compiler}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_without_a_compiler_the_build_succeeds(tmp_path, compiler):
    done = build(tmp_path, compiler)
    assert done.returncode == 0
    assert "installs without its native CPU library" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("_library*"))
