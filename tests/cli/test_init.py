import subprocess
import sys
from pathlib import Path

import pytest

from ghostnoise import cli


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: command"),
        (["nothing"], "unknown command 'nothing': the commands are train, sweep, runs, "),
        (["sweeep"], "unknown command 'sweeep': did you mean sweep?"),
        (["--debug", "doctor"], "unrecognized arguments: --debug"),
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


HELP = """
import sys
for name in ("torch", "numpy", "rich", "pydantic", "filelock", "sklearn", "matplotlib", "plotly", "scipy", "ray"):
    sys.modules[name] = None
from ghostnoise import cli
for words in ([], *([name] for name in cli.COMMANDS), ["bench", "layers"]):
    try:
        cli.main([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0, words
"""


def test_help_of_every_command_needs_no_package():
    done = subprocess.run([sys.executable, "-c", HELP], check=True, capture_output=True, text=True)
    assert "--allocator" in done.stdout
    assert "--to " not in done.stdout  # for our own processes
    for name, description in cli.COMMANDS.items():
        assert f"    {name} " in done.stdout
        assert f"usage: ghostnoise {name} " in done.stdout
        assert f"{description[0].upper()}{description[1:]}" in " ".join(done.stdout.split())


def test_only_the_module_of_the_used_command_is_imported():
    code = """
import sys
from ghostnoise import cli
try:
    cli.main(["watch", "--help"])
except SystemExit:
    pass
used = {name for name in cli.COMMANDS if f"ghostnoise.cli.{name}" in sys.modules}
assert used == {"watch", "report"}, used  # the two select runs in the same way
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_command_has_a_module_and_the_reverse():
    folder = Path(cli.__file__).parent
    shared = {"__init__", "console", "options"}
    assert {path.stem for path in folder.glob("*.py")} - shared == set(cli.COMMANDS)


def test_an_interruption_is_one_line(monkeypatch, capsys):
    from ghostnoise import doctor

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "report", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "ghostnoise: interrupted\n"


@pytest.mark.parametrize(
    "error", [ValueError("first\x1b[31m\nsecond"), RecursionError(), MemoryError(), KeyError("x"), OSError(5, "no")]
)
def test_an_unexpected_error_is_one_line_and_exits_with_70(error, monkeypatch, capsys):
    from ghostnoise.cli import doctor

    def fail(options):
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert cli.main(["doctor"]) == 70
    printed = capsys.readouterr().err
    assert printed.startswith(f"ghostnoise doctor: unexpected error ({type(error).__name__}: ")
    assert printed.endswith("repeat the command with --debug for the traceback, and report it if the input is valid\n")
    assert printed[:-1].isprintable()
    with pytest.raises(type(error)):
        cli.main(["doctor", "--debug"])


def test_a_reader_that_ends_early_is_no_error(tmp_path):
    command = f"{sys.executable} -m ghostnoise methods; echo $? > {tmp_path}/code"
    done = subprocess.run(["sh", "-c", f"({command}) | true"], capture_output=True, text=True)
    assert done.stderr == ""
