"""The files of a report: all are written, each completely, and with a notice where it is needed."""

import csv
import io
from datetime import UTC, datetime

import pytest
from matplotlib.figure import Figure

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import figures
from ghostnoise.lab.report.files import NAMES, ExperimentReport
from ghostnoise.lab.report.page import Provenance
from support.run_folders import evaluate_only, experiment, fill, findings, points, write

PROVENANCE = Provenance("ghostnoise report tiny", datetime(2030, 1, 2, tzinfo=UTC))
GOOD = {"BN": {0: 90.0, 1: 90.4, 2: 90.2}, "GNI ghost_size=16": {0: 93.0, 1: 93.6}}


def report(made, tmp_path):
    return ExperimentReport(made, tmp_path / "tiny", PROVENANCE, lambda line: None)


def test_the_figure_is_written_in_every_form(tmp_path):
    for form in ("bars", "curves", "noise"):
        made = experiment(tmp_path, form=form)
        for filled in (False, True):
            if filled and form == "bars":
                fill(tmp_path, made, GOOD)
            path = report(made, tmp_path).write(tmp_path / f"out-{form}")
            assert sorted(each.name for each in path.parent.iterdir()) == sorted(NAMES)
            assert path.with_name("figure.png").read_bytes().startswith(b"\x89PNG")
            assert path.with_name("figure.pdf").read_bytes().startswith(b"%PDF")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    made = experiment(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file: .*; give another folder with --out"):
        report(made, tmp_path).write(tmp_path / "file")
    (tmp_path / "out" / "table.tex").mkdir(parents=True)  # a folder cannot be replaced by a file
    with pytest.raises(UserError, match=r"cannot write .*out: .*; give another folder with --out"):
        report(made, tmp_path).write(tmp_path / "out")
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.endswith(".part")]


def test_every_file_with_means_reports_mixed_numerics(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, GOOD, environment={"numerics": 1})
    before = report(made, tmp_path)
    assert not any("numerics" in line for line in before.lines())
    same = {name: before.file(name) for name in ("table.md", "table.tex", "figure.png")}
    assert b"umerics" not in same["table.md"] + same["table.tex"]
    write(tmp_path, next(point for point in points(made, ["GNI ghost_size=16"]) if point.seed == 2), 93.1,
          environment={"numerics": 2})  # fmt: skip
    after = report(made, tmp_path)
    words = "Mixed numerics: the runs were computed with numerics 1 (5 runs) and 2 instead of 1 (1 run)"
    (line,) = [line for line in after.lines() if line.startswith(words)]
    assert "rerun `ghostnoise sweep tiny`" in line
    for name in ("table.md", "table.tex"):
        assert words in after.file(name).decode()
    assert after.file("figure.png") != same["figure.png"]
    rows = {row["norm.ghost_size"]: row for row in csv.DictReader(io.StringIO(after.file("table.csv").decode()))}
    assert (rows[""]["numerics"], rows["16"]["numerics"], rows["4"]["numerics"]) == ("1", "1 2", "")
    assert (rows[""]["note"], rows["16"]["note"]) == ("", "numerics 1 and 2 instead of 1")
    assert rows["4"]["note"] == "3 missing"


@pytest.mark.parametrize("evaluated", [(3,), (2, 3)])
def test_epochs_that_were_not_evaluated_are_no_gap_in_the_curves(tmp_path, evaluated):
    """A single point is a marker, which a line would not show."""
    made = experiment(tmp_path, form="noise", seeds="[0]")
    for point in points(made):
        evaluate_only(write(tmp_path, point), evaluated)
    axes = Figure().add_subplot()
    figures._draw_training(axes, findings(tmp_path, made))
    assert len(axes.lines) == 3
    for line in axes.lines:
        assert list(line.get_xdata()) == list(evaluated)
        assert list(line.get_ydata()) == [90.0 - 3 + epoch for epoch in evaluated]
        assert (line.get_marker() == "o") == (len(evaluated) == 1)


@pytest.mark.parametrize("form", ["bars", "curves", "noise"])
def test_long_labels_leave_room_for_the_axes(tmp_path, form):
    """Matplotlib warns if they do not, and warnings are errors."""
    label, other = "L" * 300, "L" * 299 + "M"
    more = "".join(
        f'[[grid.methods]]\nlabel = "{name}"\nset = {{ norm.method = "gbn", norm.ghost_size = {size} }}\n'
        for name, size in ((label, 4), (other, 8))
    )
    made = experiment(tmp_path, form=form, more=more)
    fill(tmp_path, made, {**GOOD, label: {0: 91.0, 1: 92.0}, other: {0: 90.0, 1: 91.0}})
    assert figures.draw(findings(tmp_path, made), "png").startswith(b"\x89PNG")
