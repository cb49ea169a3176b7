"""`ghostnoise advise` as a user calls it."""

import importlib

import pytest

import ghostnoise
from ghostnoise import cli


def test_advice_in_words(nets, capsys):
    assert cli.main(["advise", f"{nets}:net", "--data", "digits", "--ghost-size", "8"]) == 0
    said = capsys.readouterr().out
    assert "First ghost size to try: " in said
    assert "not measured" in said
    assert "Now (batch norm over batches of 256 samples): " in said
    assert "Running statistics: in 1 of 1 layer they had never been updated" in " ".join(said.split())


@pytest.mark.parametrize("columns", ["50", "80"])
def test_prose_is_wrapped_and_code_is_not(nets, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    words = ["advise", f"{nets}:bare", "--data", "digits", "--modules", "2", "--channel-dim", "1"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    code = [line for line in lines if line.startswith(("import ", "from ", "ghostnoise.convert("))]
    assert len(code) == 3
    assert [lines[lines.index(code[0]) - 1], lines[lines.index(code[-1]) + 1]] == ["", ""]
    known = {"model": importlib.import_module(nets).bare()}
    for line in code:
        exec(line, known)
    assert any(isinstance(module, ghostnoise.GhostNoise) for module in known["model"].modules())
    assert all(len(line) <= int(columns) for line in lines[1:] if line not in code)


def test_a_mistake_is_one_line_and_exit_code_2(nets, capsys):
    assert cli.main(["advise", f"{nets}:net"]) == 2
    error = capsys.readouterr().err
    assert "without --data" in error
    assert error.count("\n") == 1


def test_options_of_meter_alone_are_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["advise", "digits", "--law-size", "3"])
    assert "unrecognized arguments: --law-size" in capsys.readouterr().err
