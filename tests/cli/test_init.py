import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ghostnoise
from ghostnoise import cli

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nothing"], "unknown command 'nothing': the commands are meter, advise, methods, "),
        (["sweeep"], "unknown command 'sweeep': did you mean sweep?"),
        (["trian", "digits"], "unknown command 'trian': did you mean train? See ghostnoise --help"),
        (["digits"], "unknown command 'digits': it is a recipe; did you mean ghostnoise train digits?"),
        (["help"], "did you mean ghostnoise --help?"),
        (["export"], "did you mean ghostnoise runs export?"),
        (["train", "digits", "--sede", "3"], "unrecognized arguments: --sede 3; did you mean --seed?"),
        (["train", "digits", "--device", "gpu"], "--device: gpu: must be auto, cpu, cuda or mps; did you mean cuda?"),
        (["sweep", "demo", "--device", "GPU"], "did you mean cuda?"),
        (["meter", "digits", "--device", "cuda:1"], "did you mean cuda? The environment variable CUDA_VISIBLE_DEVICES"),
        (["advise", "digits", "--device", "metal"], "did you mean mps?"),
        (["train", "digits", "--device", "toaster"], "must be auto, cpu, cuda or mps; leave it out for auto"),
        (["--debug", "doctor"], "unrecognized arguments: --debug; write --debug after the command"),
        (["--verison"], "unrecognized arguments: --verison; did you mean --version?"),
        (["train"], "required: recipe; for example ghostnoise train demo (`ghostnoise recipes` lists all); see"),
        (["train", "digits", "--epochs", "3"], "unrecognized arguments: --epochs 3; did you mean train.epochs=3?"),
        (["sweep", "demo", "--lr=0.2"], "unrecognized arguments: --lr=0.2; did you mean optim.lr=0.2?"),
        (["train", "digits", "--ghost-size"], "did you mean norm.ghost_size=...?"),
        (["train", "digits", "--resume"], "the same command resumes an interrupted run, without an option; see"),
        (["methods", "foo"], "ghostnoise methods: unrecognized arguments: foo; see ghostnoise methods --help"),
        (["bench"], "required: layers|flex|net|recipe|memory|profile|lab"),
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


def test_without_arguments_it_prints_the_commands_in_groups(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    for title, commands in cli.GROUPS.items():
        for name, about in commands.items():
            assert f"{name} {about}" in " ".join(printed.partition(f"{title}:")[2].split())
    assert max(map(len, printed.splitlines())) <= 80
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert capsys.readouterr().out == printed


def test_settings_that_are_suggested_exist():
    from ghostnoise.lab.config.overrides import keys

    assert {setting.removesuffix("=") for setting in cli.SETTINGS.values()} <= set(keys())


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal of POSIX")
def test_an_error_in_a_narrow_terminal_is_broken_between_words():
    import pty
    import struct
    import termios
    from fcntl import ioctl

    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    command = [sys.executable, "-m", "ghostnoise", "trian", "digits"]
    subprocess.run(command, stderr=theirs, stdin=theirs, check=False)
    os.close(theirs)
    lines = os.read(ours, 10_000).decode().splitlines()
    os.close(ours)
    assert lines == ["ghostnoise: unknown command", "  'trian': did you mean train?", "  See ghostnoise --help"]


HELP = """
import sys
for name in ("torch", "numpy", "rich", "pydantic", "filelock", "sklearn", "matplotlib", "scipy", "ray"):
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
        assert re.search(rf"^    {name}\s", done.stdout, re.MULTILINE)  # a long name has a line of its own
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


def test_the_version_needs_no_package(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"ghostnoise {ghostnoise.__version__}\n"


@pytest.mark.parametrize("words", [["train", "digits"], ["sweep", "demo", "--dry-run"], ["doctor"]])
def test_a_line_is_printed_before_torch_is_imported(words):
    """The import is blocked, so the line can only have been printed before."""
    code = f"import sys; sys.modules['torch'] = None; del sys.modules['torch']\n{BLOCKED}\ncli.main({words!r})"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(Path(ghostnoise.__file__).parent.parent)  # without tests/startup, which loads torch
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (
        done.stderr.splitlines()[0]
        == f"ghostnoise {words[0]}: loading PyTorch, which takes a few seconds, and longer the first time ..."
    )
    assert "torch is imported" in done.stderr
    assert done.stdout == ""


BLOCKED = """
import importlib.abc
from ghostnoise import cli
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.exit("torch is imported")
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize("guide", sorted(GUIDES.glob("*.md")), ids=lambda path: path.stem)
def test_flags_in_guides_exist(guide):
    """Every option after `ghostnoise COMMAND` in a guide is an option of that command."""
    calls = re.findall(r"ghostnoise (\w+)\b([^`\n#|&]*)", guide.read_text())
    for command, rest in calls:
        if command in cli.COMMANDS:
            wrong = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)) - options_of(command)
            assert not wrong, (guide.name, command, wrong)


def test_every_flag_of_the_cluster_guide_is_one_of_sweep():
    text = (GUIDES / "cluster.md").read_text()
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert {"--runner", "--address", "--cpus-per-run", "--gpus-per-run", "--storage", "--threads"} <= flags
    assert flags <= options_of("sweep")


def options_of(command):
    parser = argparse.ArgumentParser()
    module = importlib.import_module(f"ghostnoise.cli.{command}")
    module.add_arguments(parser)
    subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parsers = [parser, *(each for action in subparsers for each in action.choices.values())]
    return {name for each in parsers for action in each._actions for name in action.option_strings} | {"--debug"}


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
    assert (
        done.stderr == "ghostnoise methods: loading PyTorch, which takes a few seconds, and longer the first time ...\n"
    )
