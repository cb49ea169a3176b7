import subprocess
import sys

import pytest

from ghostnoise import cli


def test_doctor_prints_its_report(capsys):
    assert cli.main(["doctor"]) == 0
    assert "backends" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: command"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["bench"], "required: layers|net|memory|lab"),
        (["bench", "layers", "--rounds", "0"], "--rounds: 0: must be an integer of 1 or more"),
        (["bench", "layers", "--rounds", "many"], "--rounds: many: must be an integer"),
        (["bench", "layers", "--seconds", "-1"], "--seconds: -1: must be a number above 0"),
        (["bench", "layers", "--seconds", "inf"], "--seconds: inf: must be a number above 0"),
        (["bench", "layers", "--seconds", "x"], "--seconds: x: must be a number above 0"),
        (["bench", "layers", "--seconds", "1", "--rounds", "2"], "not allowed with argument"),
        (["bench", "net", "--allocator", "other"], "invalid choice: 'other'"),
        (["bench", "memory", "--rounds", "2"], "unrecognized arguments: --rounds 2"),
        (["bench", "memory", "--threads", "0"], "--threads: 0: must be an integer of 1 or more"),
    ],
)
def test_bad_arguments_get_one_line_and_exit_with_2(arguments, line, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert line in printed
    assert printed.count("\n") == 1
    assert printed.startswith("ghostnoise")
    assert "--help" in printed


def test_help_needs_no_torch():
    code = """
import sys
sys.modules["torch"] = None
from ghostnoise.cli import main
main(["bench", "layers", "--help"])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "--allocator" in done.stdout
    assert "--records" not in done.stdout  # for our own processes


def test_python_m_is_the_command_and_doctor_needs_torch_and_numpy_alone():
    code = """
import runpy, sys
for name in ("scipy", "sklearn", "matplotlib", "rich", "pandas", "ray", "triton"):
    sys.modules[name] = None
sys.argv = ["ghostnoise", "doctor"]
runpy.run_module("ghostnoise", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "aten      usable" in done.stdout


def test_interruption_ends_with_one_line(monkeypatch, capsys):
    from ghostnoise import doctor

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "report", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "ghostnoise: interrupted\n"
