import argparse

import pytest

from ghostnoise import cli
from ghostnoise.cli import options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", [3]), ("0..4", [0, 1, 2, 3, 4]), ("0-4", [0, 1, 2, 3, 4]), ("0,3,7", [0, 3, 7]), ("0..2,7", [0, 1, 2, 7]),
        ("7, 1-3,2", [7, 1, 2, 3]), ("2..2", [2]), ("0-1,4..5", [0, 1, 4, 5]), ("1,1,1", [1]),
    ],
)  # fmt: skip
def test_seeds_are_parsed(text, expected):
    assert options.seeds(text) == expected


@pytest.mark.parametrize(
    ("text", "rule", "remedy"),
    [
        *(
            (text, "must be integers of 0 or more and ranges, separated by", "give for example 0..4, 0-4 or 0,3,7")
            for text in ("", "a", "1..", "..3", "-1", "1-", "1--3", "1...3", "0-2-4", "1,,2", "0.5", "9" * 30, "٣")
        ),
        ("4..1", "must not end before it begins", "give 1..4"),
        ("0,4-1", "must not end before it begins", "give 1..4"),
        ("0..100000", "must have at most 100,000 seeds", "give a shorter one"),
    ],
)  # fmt: skip
def test_invalid_seeds_are_refused_with_rule_and_remedy(text, rule, remedy):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        options.seeds(text)
    message = str(error.value)
    assert message.startswith(repr(text))
    assert rule in message
    assert message.endswith(remedy)
    assert "\n" not in message


@pytest.mark.parametrize("command", ["sweep", "report", "watch"])
@pytest.mark.parametrize("seeds", ["0..4", "0-4", "0,1,2,3,4", "0..2,3-4"])
def test_every_command_with_seeds_has_the_same_grammar(monkeypatch, command, seeds):
    given = []
    monkeypatch.setattr(f"ghostnoise.cli.{command}.run", lambda parsed: given.append(parsed.seeds) or 0)
    assert cli.main([command, "demo", "--seeds", seeds]) == 0
    assert given == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("command", ["sweep", "report", "watch"])
def test_invalid_seeds_are_one_line_and_exit_code_2(capsys, command):
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "demo", "--seeds", "3-1"])
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "--seeds: '3-1': the range 3-1 must not end before it begins; give 1..3" in printed


@pytest.mark.parametrize(
    ("parse", "good", "expected"),
    [
        (options.positive, "3", 3),
        (options.seconds, "0.5", 0.5),
        (options.port, "0", 0),
        (options.port, "65535", 65535),
    ],
)
def test_numbers_are_parsed(parse, good, expected):
    assert parse(good) == expected


@pytest.mark.parametrize(
    ("parse", "bad"),
    [
        *((options.positive, bad) for bad in ("0", "-1", "1.5", "many", "")),
        *((options.seconds, bad) for bad in ("0", "-1", "inf", "nan", "x", "")),
        *((options.port, bad) for bad in ("-1", "65536", "x", "", "²")),
    ],
)
def test_numbers_out_of_range_are_refused(parse, bad):
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        parse(bad)
