"""What figures show: the form, the styles of series, the paper's numbers and the range of the axis."""

from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from ghostnoise.lab.report import charts, figures, measures
from support.run_folders import experiment, fill, findings

SIZES = {f"GNI ghost_size={size}": {0: 90.0 + size / 100, 1: 91.0, 2: 91.5} for size in (4, 16, 64)}


def with_sizes(tmp_path, form="bars", **options):
    made = experiment(tmp_path, form=form, **options)
    path = tmp_path / "tiny.toml"
    path.write_text(path.read_text().replace("[4, 16]", "[4, 16, 64]"))
    from ghostnoise.lab.config import grid

    made = grid.load(str(path))
    fill(tmp_path, made, {"BN": {0: 90.0, 1: 90.4, 2: 90.2}} | SIZES)
    return findings(tmp_path, made)


def curve(means, higher_is_better=True):
    points = [
        charts.ChartPoint(2**at, SimpleNamespace(), measures.summarized([mean - 0.1, mean, mean + 0.1]))
        for at, mean in enumerate(means)
    ]
    return charts.Chart(
        "", [charts.Series("XBN", "xbn", points=points)], "accuracy, %", "ghost size", True, higher_is_better
    )


def test_the_curve_over_the_ghost_size_is_first_where_the_grid_has_one(tmp_path):
    found = with_sizes(tmp_path)
    over, rows = charts.views(found)
    assert (over.form, over.x, over.log, rows.form) == ("curves", "ghost size", True, "rows")
    flat, gni = over.series
    assert flat.flat
    assert [point.x for point in gni.points] == [4, 16, 64]
    assert [series.label for series in rows.series] == ["BN", "GNI 4", "GNI 16", "GNI 64"]
    assert charts.first(found).form == "rows"  # the recipe asks for bars in files
    assert charts.gaps(found).form == "curves"


def test_two_sizes_make_no_curve(tmp_path):
    made = experiment(tmp_path)
    fill(tmp_path, made, SIZES)
    assert [chart.form for chart in charts.views(findings(tmp_path, made))] == ["rows"]


def test_series_of_one_method_have_its_colour_and_differ_in_style(tmp_path):
    series = [charts.Series(name, "gni") for name in ("GNI", "GNI shift")] + [charts.Series("BN", "bn")]
    charts._style(series)
    first, second, third = series
    assert first.color == second.color != third.color
    assert (first.marker, first.dash) == (third.marker, third.dash)
    assert first.marker != second.marker
    assert first.dash != second.dash
    five = [charts.Series(str(at), "xbn") for at in range(5)]
    charts._style(five)
    assert len({each.marker for each in five}) == len({str(figures.LINES[each.dash]) for each in five}) == 5


def test_a_number_of_the_paper_for_a_method_is_shown_once(tmp_path):
    found = with_sizes(tmp_path)
    for row in found.rows:
        object.__setattr__(row.score.runs[0], "paper", "91.2 ± 0.1")
    for chart in charts.views(found):
        papers = {series.label: [point.paper for point in series.points] for series in chart.series}
        assert sum(paper is not None for each in papers.values() for paper in each) == 2  # BN and GNI
    assert papers["GNI 64"] == [91.2]  # the cell with the highest mean


def test_a_cell_that_failed_is_named_and_does_not_set_the_axis():
    axes = Figure().add_subplot()
    figures._draw_curves(axes, curve([43.0, 90.0, 91.0, 91.5, 92.0, 92.0, 91.5, 91.0]))
    low, high = axes.get_ylim()
    assert 88 < low < 90
    assert 92 < high < 93
    assert [text.get_text() for text in axes.texts] == ["below: XBN 43.0 at 1"]


def test_many_cells_that_failed_are_named_within_the_axes():
    chart = curve([43.0, 44.0, *([90.0, 91.0, 91.5, 92.0] * 4)])
    chart.series[0].label = "XBN min_std 0.3"
    chart.series *= 3
    figure = Figure(figsize=(6.8, 3.9), layout="constrained")
    axes = figure.subplots()
    figures._draw_curves(axes, chart)
    figure.draw_without_rendering()
    (note,) = axes.texts
    assert note.get_text().replace("\n", " ").count("XBN min_std 0.3 43.0 at 1") == 3
    assert note.get_window_extent().x1 <= axes.get_window_extent().x1


def test_a_large_gap_is_left_out_and_a_small_one_is_not():
    shown, outside = charts.zoomed(curve([1.0, 9.0, 8.0, 8.5, 9.5, 8.0, 9.0, 30.0], higher_is_better=False))
    assert [summary.mean for _, _, summary in outside] == [30.0]
    assert shown[0] < 1.0
    assert 9.5 < shown[1] < 12


@pytest.mark.parametrize("means", [[90.0, 91.0, 91.5, 92.0, 92.0, 91.5, 91.0, 90.5], [43.0, 90.0, 91.0]])
def test_every_point_is_shown_where_none_failed_or_few_were_measured(means):
    axes = Figure().add_subplot()
    figures._draw_curves(axes, curve(means))
    assert axes.get_ylim()[0] < min(means)
    assert not axes.texts


def test_the_figure_explains_its_marks(tmp_path):
    chart = charts.views(with_sizes(tmp_path))[0]
    words = figures.explained(chart)
    assert words == (
        "small dots: seeds; bands: 95 % intervals of the mean (t); dotted: methods without a ghost size; ◇: the paper"
    )
    chart.series[1].points[0].summary = measures.summarized([90.0])
    assert figures.explained(chart).endswith("; hollow: fewer than 3 seeds, no interval drawn")


def test_bands_are_intervals_of_the_mean(tmp_path):
    axes = Figure().add_subplot()
    chart = curve([90.0, 91.0])
    figures._draw_curves(axes, chart)
    (band,) = axes.collections
    ends = band.get_paths()[0].vertices[:, 1]
    summary = chart.series[0].points[0].summary
    assert ends.min() == pytest.approx(summary.low)
    assert ends.max() == pytest.approx(chart.series[0].points[1].summary.high)
