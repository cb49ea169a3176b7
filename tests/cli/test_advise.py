"""`ghostnoise advise` as a user calls it."""

import pytest

from ghostnoise import cli


def test_advice_in_words(nets, capsys):
    assert cli.main(["advise", f"{nets}:net", "--data", "digits", "--ghost-size", "8"]) == 0
    said = capsys.readouterr().out
    assert "First size to try: ghostnoise.convert(model" in said
    assert "not measured" in said


def test_a_mistake_is_one_line_and_exit_code_2(nets, capsys):
    assert cli.main(["advise", f"{nets}:net"]) == 2
    error = capsys.readouterr().err
    assert "without --data" in error
    assert error.count("\n") == 1


def test_options_of_meter_alone_are_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["advise", "digits", "--law-size", "3"])
    assert "unrecognized arguments: --law-size" in capsys.readouterr().err
