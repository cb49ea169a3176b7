"""Tables of measured noise in a terminal, as CSV, and on the page."""

import csv
import dataclasses
import io
import json
from datetime import UTC, datetime
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report.files import NAMES, ExperimentReport
from ghostnoise.lab.report.noise_tables import bar, nearest, print_table
from ghostnoise.lab.report.notes import notes
from ghostnoise.lab.report.page import Provenance
from ghostnoise.meter.reading import Reading
from support.html_page import check, read
from support.readings import NASTY, connected, convolutional, record
from support.run_folders import experiment, points, write

PROVENANCE = Provenance("ghostnoise report tiny", datetime(2030, 1, 2, tzinfo=UTC))


def printed(readings, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_table(readings, console)
    return console.file.getvalue().splitlines()


def row_of(lines, name):
    (line,) = [line for line in lines if line.startswith(name)]
    return line.split()


def percent(share):
    return f"{100 * share:.1f}" if share < 0.9995 else f"{100 * share:.0f}"


@given(st.floats(0, 1), st.integers(1, 20))
def test_a_bar_is_as_long_as_its_share(share, width):
    made = bar(share, width)
    assert len(made) == width
    eighths = sum("▏▎▍▌▋▊▉█".index(sign) + 1 for sign in made.strip())
    assert abs(eighths - 8 * width * share) <= 0.5 + 1e-9
    assert bar(float("nan"), width) == " " * width
    assert bar(7.0, width) == "█" * width


def test_a_line_has_the_figures_of_its_layer():
    reading = connected()
    lines = printed({"epoch 3": reading})
    assert "ghost batches of 8 samples" in lines[0]
    assert "epoch 3" in lines[0]
    layer = reading["second.1"]
    row = layer.row()
    cells = [cell for cell in row_of(lines, "second.1") if not set(cell) & set("▏▎▍▌▋▊▉█")]
    law, distance = nearest(layer)
    assert cells == [
        "second.1", "1", "6", "100", f"{100 * row['gni_shift_std']:.1f}", f"{100 * row['gni_scale_std']:.1f}",
        f"{row['effective_size_shift']:.0f}", f"{row['effective_size_scale']:.0f}", law, f"{distance:.2f}"[1:],
        *(percent(row[f"{method}_relative"]) for method in ("bn", "gbn", "xbn", "gni")),
    ]  # fmt: skip
    assert [lines[2].split()[-3:], lines[3].split()[-4:]] == [["GBN-", "XBN-", "GNI-"], ["BN", "8", "8", "8"]]


def test_the_last_reading_is_shown():
    assert printed({"a": connected(), "b": connected(1)}) == printed({"b": connected(1)})


LONG = partial(connected, names=(NASTY, "a" * 200))


@pytest.mark.parametrize("measure", [connected, partial(convolutional, 12), LONG], ids=["flat", "deep", "long"])
def test_fits_and_cuts_nothing_but_the_beginnings_of_names(measure):
    reading = measure()
    lines = printed({"now": reading}, width=140)
    assert max(map(len, lines)) <= 100
    table = lines[5 : 5 + len(reading)]
    assert all("…" not in line[1:] for line in table)
    for layer, line in zip(reading.layers, table, strict=True):
        assert layer.name.endswith(line.removeprefix("…").split()[0])


@pytest.mark.parametrize("width", [40, 50, 80])
@pytest.mark.parametrize(
    "names",
    [
        [f"encoder.layer.{number}.attention.output.LayerNorm" for number in range(12)],
        [f"features.denseblock{number}.denselayer1.norm1" for number in range(3)],
        [f"{'a' * 60}{number}{'b' * 60}" for number in range(11)],
    ],
)
def test_long_names_stay_different(names, width):
    (first, *_) = connected().layers
    reading = Reading([dataclasses.replace(first, name=name, names=(name,)) for name in names])
    lines = printed({"after epoch 1": reading}, width)
    assert max(map(len, lines)) <= width
    tables = "\n".join(lines).split("─\n")[1:]
    for table in tables:
        shown = [line.split()[0] for line in table.splitlines()[: len(names)]]
        assert len(set(shown)) == len(names)


def test_running_statistics_that_were_never_updated_are_noted():
    reading = connected()
    text = " ".join(" ".join(printed({"at initialization": reading})).split())
    assert "Note: in all layers, the running statistics had never been updated before the first measured batch" in text
    first, second = (dataclasses.replace(layer, never_updated=False) for layer in reading.layers)
    assert not any("Note:" in line for line in printed({"x": Reading([first, second])}))
    text = " ".join(" ".join(printed({"x": Reading([first, reading.layers[1]])})).split())
    assert "Note: in 1 of 2 layers, " in text
    assert "first: second.1)" in text


@pytest.mark.parametrize("width", [40, 60, 80, 99])
def test_a_narrow_terminal_has_all_figures_in_several_tables(width):
    reading = connected()
    wide, narrow = printed({"now": reading}), printed({"now": reading}, width)
    assert max(map(len, narrow)) <= width
    signs = set("▏▎▍▌▋▊▉█")

    def cells(lines):
        found = [line.split()[1:] for line in lines if line.startswith("second.1")]
        return [cell for row in found for cell in row if not set(cell) & signs], len(found)

    assert cells(narrow)[0] == cells(wide)[0]
    assert cells(wide)[1] == 1 < cells(narrow)[1] or width == 99


def test_names_are_not_markup():
    assert any("[red].1" in line for line in printed({"now": connected(names=(NASTY,))}))


@pytest.mark.parametrize("measure", [connected, convolutional])
def test_the_nearest_law_is_that_of_the_smallest_distance_over_both_parts(measure):
    for layer in measure().layers:
        law, distance = nearest(layer)
        laws = ["fc", "fc-exact"] if layer.spatial == 1 else ["fc", "fc-exact", "conv", "conv-exact"]
        by_law = {
            each: max(layer.layer_distances["shift", each.removesuffix("-exact")], layer.layer_distances["scale", each])
            for each in laws
        }
        assert distance == min(by_law.values())
        assert by_law[law] == distance


def test_methods_without_a_gap_have_no_column():
    layers = [dataclasses.replace(layer, gaps={}, within=layer.within * np.nan) for layer in connected().layers]
    lines = printed({"now": Reading(layers)})
    assert "GBN" not in "".join(lines)


def test_no_reading_is_one_line():
    with pytest.raises(UserError, match="there is no reading"):
        printed({})


def report(tmp_path, warn=pytest.fail, **options):
    return ExperimentReport(experiment(tmp_path, **options), tmp_path / "tiny", PROVENANCE, warn)


@pytest.fixture
def folders(tmp_path):
    """Write finished runs; return their folders by the names of the runs."""
    return {point.name: write(tmp_path, point) for point in points(experiment(tmp_path))}


@pytest.fixture
def measured(folders, tmp_path):
    record(folders["BN seed 1"], e1=convolutional(), e20=convolutional(seed=1))
    record(folders["BN seed 2"], e1=convolutional(seed=2))
    record(folders["GNI ghost_size=16 seed 0"], e3=connected(names=(NASTY,)))
    return tmp_path


def test_without_noise_there_is_a_note_and_nothing_else(folders, tmp_path):
    made = report(tmp_path, form="noise")
    assert any(
        "No run has recorded its noise" in line and "[meter]" in line for line in notes(made.findings, made.noise)
    )
    html = read(made.file("index.html").decode())
    assert "noise" not in html.ids()
    made.write(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(NAMES)
    assert not any("recorded its noise" in line for line in report(tmp_path, form="bars").lines())


def test_the_figure_is_that_of_the_first_run_with_noise(measured):
    made = report(measured, form="noise")
    assert "The figure shows the noise of BN seed 1 after epochs 1 and 20." in notes(made.findings, made.noise)
    images = {form: report(measured, form=form).file("figure.png") for form in ("noise", "bars")}
    assert images["noise"] == made.file("figure.png") != images["bars"]


@pytest.mark.parametrize("form", ["noise", "bars"])
def test_the_page_has_a_section_for_the_first_run_of_each_method(measured, form):
    html = read(report(measured, form=form).file("index.html").decode())
    ids = html.ids()
    assert (ids.index("noise") < ids.index("figure")) == (form == "noise")
    hidden = {attrs["id"]: "hidden" in attrs for _, attrs in html.tags if attrs.get("class") == "noise-at"}
    assert hidden == {"noise-0-1": False, "noise-0-20": True, "noise-1-3": True}
    shown = "".join(html.texts)
    assert "BN seed 1 after epoch 20" in shown
    assert "BN seed 2 after" not in shown
    data = json.loads(html.scripts[0])["noise"]
    assert [(run["label"], [each["epoch"] for each in run["readings"]]) for run in data] == [
        ("BN seed 1", [1, 20]), ("GNI ghost_size=16 seed 0", [3]),
    ]  # fmt: skip
    for run in data:
        for reading in run["readings"]:
            for layer in reading["layers"]:
                for part in ("shift", "scale"):
                    line = layer[part]
                    assert 50 < len(line["x"]) == len(line["y"]) <= 100
                    low, high = run["within"][part]
                    assert low - 1e-5 <= line["x"][0] < line["x"][-1] <= high + 1e-5


def test_names_of_layers_are_escaped(measured):
    made = report(measured, form="noise")
    html = read(made.file("index.html").decode())
    assert f"{NASTY}.1" in "".join(html.texts)
    assert "img" not in {tag for tag, _ in html.tags}
    assert json.loads(html.scripts[0])["noise"][1]["readings"][0]["layers"][0]["name"] == f"{NASTY}.1"


def test_the_page_is_well_formed_and_links_to_the_csv(measured):
    made = report(measured)
    check(read(made.file("index.html").decode()), (*NAMES, "noise.csv"))
    made.write(measured / "out")
    assert (measured / "out" / "noise.csv").read_bytes() == made.file("noise.csv")


def test_the_csv_has_every_layer_of_every_reading(measured, folders):
    rows = list(csv.DictReader(io.StringIO(report(measured).file("noise.csv").decode())))
    assert [(row["method"], row["norm.ghost_size"], row["seed"], row["epoch"]) for row in rows] == [
        *[("BN", "", "1", "1")] * 2, *[("BN", "", "1", "20")] * 2, *[("BN", "", "2", "1")] * 2,
        ("GNI", "16", "0", "3"),
    ]  # fmt: skip
    assert rows[-1]["run"] == folders["GNI ghost_size=16 seed 0"].name
    expected = convolutional(seed=1).rows()[1]
    for name, value in expected.items():
        shown = rows[3][name]
        if value is None or value != value:
            assert shown == ""
        else:
            assert shown == str(value)


def test_a_damaged_reading_is_reported_and_the_others_are_shown(measured, folders):
    (folders["BN seed 1"] / "noise" / "epoch-0001.npz").write_bytes(b"no")
    lines = []
    made = report(measured, lines.append, form="noise")
    assert "after epoch 20." in notes(made.findings, made.noise)[-1]
    assert len(lines) == 1
    assert "epoch-0001.npz is damaged" in lines[0]


@pytest.mark.parametrize("size", ["0", "true", "2.5", '"8"'])
def test_the_size_of_the_law_is_an_integer_of_1_or_more(tmp_path, size):
    from ghostnoise.lab.config import grid
    from ghostnoise.lab.errors import UserError

    experiment(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(path.read_text() + f"law_size = {size}\n")
    with pytest.raises(UserError, match=r"report\.law_size"):
        grid.load(str(path))
    path.write_text(path.read_text().replace(f"law_size = {size}", "law_size = 8"))
    assert grid.load(str(path)).report.law_size == 8
