"""Tables that become lists where the terminal is narrow."""

import io

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from ghostnoise.terminal import MANY_ROWS, LiteralConsole, aligned, listed, needed_width, print_table

TEXT = "a claim that is long enough to be wrapped in a table"


def table():
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("name", no_wrap=True)
    made.add_column("what")
    made.add_column("se-\nconds", justify="right", no_wrap=True)
    made.add_row("first", TEXT, "1.5")
    made.add_row("[b]second", "", "20,000.25")
    return made


def printed(width, **options):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False,
                      markup=False)  # fmt: skip
    print_table(console, table(), **options)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 40, 50, 60, 80, 120])
def test_nothing_is_cut_off_at_any_width(width):
    lines = printed(width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    text = " ".join(" ".join(lines).split())
    for part in ("first", "second", "1.5", "20,000.25"):
        assert part in text
    assert width < needed_width(table()) or any("first" in line and "1.5" in line for line in lines)


def test_a_list_has_a_paragraph_for_each_row():
    assert printed(40) == [
        "name",
        "first",
        "  what: a claim that is long enough to",
        "  be wrapped in a table; se-conds: 1.5",
        "[b]second",
        "  se-conds: 20,000.25",
    ]
    assert printed(40, titles=2)[:2] == ["name what", f"first {TEXT}"]


@pytest.mark.parametrize("one_line", [False, True])
def test_without_a_terminal_the_table_is_as_wide_as_it_needs_to_be(monkeypatch, one_line):
    monkeypatch.delenv("COLUMNS", raising=False)
    console = Console(file=io.StringIO(), width=20)
    print_table(console, table(), one_line=one_line)
    text = console.file.getvalue()
    assert "20,000.25" in text
    assert (TEXT in text) == one_line


@pytest.mark.parametrize("width", [30, 120])
def test_names_are_shown_literally_as_a_table_and_as_a_list(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    made = Table(box=box.SIMPLE_HEAD)
    for heading in ("name", "[red]what"):
        made.add_column(heading, no_wrap=True)
    made.add_row("[b]first[/b]", "\\[x] \x1b[31m and more text")
    console = LiteralConsole(file=io.StringIO(), width=width)
    print_table(console, made)
    text = " ".join(console.file.getvalue().split())
    for part in ("[red]what", "[b]first[/b]", "\\[x] \\x1b[31m and more text"):
        assert part in text
    assert "\x1b" not in text


def test_long_tables_look_like_those_of_rich():
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    made.add_column("name", no_wrap=True)
    made.add_column("number", justify="right", no_wrap=True)
    made.add_column("status", min_width=11)
    for at in range(5):
        made.add_row("x" * at, str(10**at), "ü, 表" if at else "")
    console = LiteralConsole(file=io.StringIO(), width=80)
    console.print(made)
    assert aligned(made) == [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_each_row_of_a_long_table_is_a_line(monkeypatch):
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    made.add_column("a", no_wrap=True)
    made.add_column("b")
    for at in range(MANY_ROWS + 1):
        made.add_row(f"{at}", "[b]\x1b[31m word" * 10)
    console = LiteralConsole(file=io.StringIO(), width=100)
    print_table(console, made)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == MANY_ROWS + 1 + 4
    assert "\x1b" not in console.file.getvalue()
    assert lines[-2].startswith(f" {MANY_ROWS} [b]\\x1b[31m word[b]")


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_are_broken_between_words_in_a_terminal_only(terminal, monkeypatch):
    console = LiteralConsole(file=io.StringIO(), width=24)
    monkeypatch.setattr(LiteralConsole, "is_terminal", terminal)
    console.print(TEXT, soft_wrap=True)
    lines = console.file.getvalue().splitlines()
    assert " ".join(map(str.strip, lines)) == TEXT
    assert (len(lines) > 1) == terminal


def test_a_list_leaves_out_values_that_are_missing():
    made = Table()
    for name in ("method", "accuracy", "p"):
        made.add_column(name, no_wrap=True)
    made.add_row("GNI", "90.00 ± 0.10", "–")
    console = LiteralConsole(file=io.StringIO(), width=20)
    console.print(*listed(made, 20))
    assert console.file.getvalue().split("\n")[:2] == ["GNI", "  accuracy: 90.00 ±"]
    assert "p:" not in console.file.getvalue()
