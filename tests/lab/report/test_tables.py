"""Tables in every format: complete, and escaped for the programs that read them."""

import csv
import io

import pytest

from ghostnoise.lab.report import tables
from ghostnoise.terminal import LiteralConsole
from support.run_folders import experiment, fill, findings, points, write

GOOD = {"BN": {0: 90.0, 1: 90.4, 2: 90.2}, "GNI ghost_size=16": {0: 93.0, 1: 93.6}}


@pytest.fixture
def found(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, GOOD)
    return findings(tmp_path, made)


def test_markdown(found):
    head, line, *rows = tables.markdown(found).splitlines()
    assert head.startswith("| method | ghost\\_size | test accuracy, % ± std (n) | paper | difference to BN")
    assert line == "| " + " | ".join(["---"] * 6) + " |"
    assert rows[0] == "| BN | – | 90.20 ± 0.20 (3) | 90.1 ± 0.2 | – |  |"
    assert "| 93.30 ± 0.42 (2) | – | +3.10 \\[" in rows[2]
    assert rows[2].endswith(" (n = 2) | 1 missing |")  # fewer pairs than runs of BN
    assert rows[1].endswith("| – | – | – | 3 missing |")


def test_numbers_in_csv_have_all_digits(found):
    rows = list(csv.DictReader(io.StringIO(tables.comma_separated(found))))
    assert [row["norm.ghost_size"] for row in rows] == ["", "4", "16"]
    assert float(rows[2]["mean"]) == 93.3
    assert float(rows[2]["difference"]) == pytest.approx(3.1, abs=1e-12)
    assert (rows[1]["n"], rows[1]["mean"], rows[1]["missing"]) == ("0", "", "3")
    assert rows[2]["baseline"] == "BN"
    assert float(rows[2]["low"]) < 3.1 < float(rows[2]["high"])
    assert not any(None in row or None in row.values() for row in rows)


def test_latex_has_as_many_columns_as_it_says(found):
    lines = tables.latex(found).splitlines()
    columns = len(lines[0].partition("{tabular}")[2].strip("{}"))
    rows = [line for line in lines if line.endswith("\\\\")]
    assert len(rows) == 4
    assert {line.count(" & ") for line in rows} == {columns - 1}
    assert "$\\pm$" in rows[1]


NASTY = "=A|B_{1} & <b>\\x% #1$ ~^[link](u)"


def test_labels_are_escaped_in_every_format(tmp_path):
    made = experiment(tmp_path, base=NASTY, claims=[])
    for point in points(made):
        write(tmp_path, point)
    found = findings(tmp_path, made)
    row = tables.markdown(found).splitlines()[2]
    assert row.startswith("| =A\\|B\\_{1} & \\<b\\>\\\\x% \\#1$ \\~^\\[link\\](u) |")
    cell = tables.latex(found).splitlines()[4].partition(" & --")[0]
    assert cell == (
        r"=A\textbar{}B\_\{1\} \& \textless{}b\textgreater{}\textbackslash{}x\% \#1\$ "
        r"\textasciitilde{}\textasciicircum{}[link](u)"
    )
    assert list(csv.reader(io.StringIO(tables.comma_separated(found))))[1][0] == "'" + NASTY
    console = LiteralConsole(file=io.StringIO(), width=200)
    console.print(tables.terminal(found))
    assert NASTY in console.file.getvalue()


def test_columns_without_a_value_are_left_out(tmp_path):
    made = experiment(tmp_path, claims=[])
    for point in points(made, ["BN"]):
        write(tmp_path, point)
    headings, rows = tables.lines(findings(tmp_path, made))
    assert headings == ["method", "ghost_size", "test accuracy, % ± std (n)", "paper", "note"]
    assert {len(row) for row in rows} == {5}


def test_differences_and_means_without_an_interval_say_why(tmp_path):
    made = experiment(tmp_path)
    fill(
        tmp_path,
        made,
        {"BN": {0: 90.0, 1: 90.4}, "GNI ghost_size=4": {0: 91.0}, "GNI ghost_size=16": {0: 91.0, 1: 91.4}},
    )
    bn, one, same = findings(tmp_path, made).rows
    assert tables.difference_text(one.difference) == "+1.00 (n = 1)"
    assert tables.difference_text(same.difference) == "+1.00 (no spread)"
    assert [tables.mean_interval_text(row.score) for row in (bn, one)] == ["87.66 to 92.74", "n = 1"]


def test_a_row_that_is_not_decided_has_its_note_and_the_papers_number(tmp_path):
    made = experiment(tmp_path, more='[select]\naxes = ["norm.ghost_size"]\n')
    fill(tmp_path, made, {"BN": GOOD["BN"]})
    found = findings(tmp_path, made)
    found.rows[1].paper = "91.2"
    names, _, undecided = list(csv.reader(io.StringIO(tables.comma_separated(found))))
    assert len(undecided) == len(names)
    row = dict(zip(names, undecided, strict=True))
    assert (row["method"], row["paper"], row["n"]) == ("GNI", "91.2", "")
    assert row["note"] == "not tested yet: 6 tuning runs not finished"
