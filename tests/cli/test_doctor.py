import subprocess
import sys

from ghostnoise import cli


def test_it_prints_the_report(capsys):
    assert cli.main(["doctor"]) == 0
    assert "cpu operators" in capsys.readouterr().out


def test_it_runs_as_a_module_and_needs_only_torch_and_numpy():
    code = """
import runpy, sys
for name in ("scipy", "sklearn", "matplotlib", "rich", "pandas", "ray", "triton"):
    sys.modules[name] = None
sys.argv = ["ghostnoise", "doctor"]
runpy.run_module("ghostnoise", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "cuda operators" in done.stdout
