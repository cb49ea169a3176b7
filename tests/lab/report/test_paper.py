"""Figures and tables in the paper's form: what is in which panel, its bands and its lines."""

import statistics
from datetime import UTC, datetime

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import paper
from ghostnoise.lab.report.files import NOISE, ExperimentReport
from ghostnoise.lab.report.page import Provenance
from support.run_folders import experiment, fill, findings

FOUR, SIXTEEN = "GNI ghost_size=4", "GNI ghost_size=16"
GOOD = {"BN": {0: 90.0, 1: 90.4, 2: 90.2}, FOUR: {0: 89.0, 1: 90.0, 2: 89.6}, SIXTEEN: {0: 93.0, 1: 93.6, 2: 93.2}}
MORE = """
[[grid.methods]]
label = "shift"
set = { norm.method = "gni", norm.components = "shift" }
axes = { norm.ghost_size = [4, 16] }
[[grid.methods]]
label = "DO"
set = { norm.method = "dropout", norm.p = 0.1 }
[[grid.methods]]
label = "GBN"
set = { norm.method = "gbn" }
axes = { norm.ghost_size = [4, 16] }
"""


def report(made, tmp_path):
    when = Provenance("ghostnoise report tiny", datetime(2030, 1, 2, tzinfo=UTC))
    return ExperimentReport(made, tmp_path / "tiny", when, lambda line: None)


@pytest.fixture
def figure(monkeypatch):
    """The figure that is drawn, instead of its file."""
    drawn = []
    monkeypatch.setattr(paper, "render", lambda figure, kind: drawn.append(figure) or b"")
    return drawn


def found(tmp_path, more="", **accuracies):
    made = experiment(tmp_path, form="curves", claims=[], more=more)
    values = {name.replace("_", " ghost_size=") if "_" in name else name: each for name, each in accuracies.items()}
    fill(tmp_path, made, GOOD | values)
    return findings(tmp_path, made)


def lines_of(axes):
    return {line.get_label(): [float(y) for y in line.get_ydata()] for line in axes.get_lines()}


def test_a_panel_has_means_with_bands_of_one_standard_deviation_and_the_lines(tmp_path, figure):
    paper.draw([found(tmp_path)], "png")
    (axes,) = [each for each in figure[0].axes if each.get_visible()]
    means = [statistics.fmean(GOOD[name].values()) for name in (FOUR, SIXTEEN)]
    lines = lines_of(axes)
    assert lines["GNI"] == pytest.approx(means)
    assert lines["BN"] == pytest.approx([statistics.fmean(GOOD["BN"].values())] * 2)
    (band,) = [each for each in axes.collections if each.get_paths()]
    ends = band.get_paths()[0].vertices[:, 1]
    deviations = [statistics.stdev(GOOD[name].values()) for name in (FOUR, SIXTEEN)]
    expected = [mean + sign * spread for mean, spread in zip(means, deviations, strict=True) for sign in (-1, 1)]
    assert {round(float(end), 6) for end in ends} == {round(end, 6) for end in expected}


def test_the_best_ghost_batch_norm_is_a_line_in_every_panel(tmp_path, figure):
    shown = found(tmp_path, MORE, GBN_4=dict.fromkeys(range(3), 91.5), GBN_16=dict.fromkeys(range(3), 92.0),
                  shift_4=dict.fromkeys(range(3), 91.0), shift_16=dict.fromkeys(range(3), 91.1))  # fmt: skip
    paper.draw([shown], "png")
    panels = {axes.get_title(): lines_of(axes) for axes in figure[0].axes if axes.get_visible()}
    assert list(panels) == ["GBN", "GNI", "components of GNI"]
    assert all(lines["best GBN"] == [92.0, 92.0] for lines in panels.values())
    assert {"GNI", "shift"} <= set(panels["components of GNI"])
    assert "shift" not in panels["GNI"]


def test_experiments_share_a_figure(tmp_path, figure):
    """Curves that two experiments have in common occur once."""
    (tmp_path / "other").mkdir()
    shown = [found(tmp_path), found(tmp_path / "other")]
    paper.draw(shown, "png")
    (axes,) = [each for each in figure[0].axes if each.get_visible()]
    assert [line.get_label() for line in axes.get_lines()].count("GNI") == 1
    assert len(paper.table(shown).splitlines()) == 4


def test_the_gains_set_the_range_and_a_cell_that_failed_does_not(tmp_path, figure):
    paper.draw([found(tmp_path, GNI_4={0: 10.0, 1: 11.0, 2: 12.0})], "png")
    (axes,) = [each for each in figure[0].axes if each.get_visible()]
    low, high = axes.get_ylim()
    assert low > 80
    assert high > 93


def test_one_table_of_several_experiments(tmp_path):
    heading, _, row = paper.table([found(tmp_path)]).splitlines()
    assert heading.startswith("| network | baseline")
    assert row.startswith("| tiny | 90.20 ± 0.20 (3) | 93.27 ± 0.31 (3) | 16 | +3.07 ")


def test_without_curves_there_is_an_error(tmp_path):
    made = experiment(tmp_path, form="curves", claims=[])
    with pytest.raises(UserError, match="needs finished runs over a ghost size or another axis"):
        paper.draw([findings(tmp_path, made)], "png")


def test_files_of_the_layout(tmp_path):
    made = experiment(tmp_path, form="curves", claims=[])
    fill(tmp_path, made, GOOD)
    paths = report(made, tmp_path).write_paper(tmp_path / "out", [])
    assert [path.name for path in paths] == ["paper.png", "paper.pdf", "paper.md"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_bytes().startswith(b"%PDF")


def test_a_report_without_noise_removes_the_noise_of_an_earlier_one(tmp_path):
    made = experiment(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / NOISE).write_text("of other runs")
    report(made, tmp_path).write(out)
    assert not (out / NOISE).exists()
