"""A report of runs that have recorded their noise."""

import csv
import io
import json
from datetime import UTC, datetime

import pytest

from ghostnoise.lab.report import watch
from ghostnoise.lab.report.page import Made
from ghostnoise.lab.report.sections import notes
from ghostnoise.lab.report.writing import NAMES, Report
from lab.report.folders import experiment, points, write
from lab.report.readings import NASTY, connected, convolutional, record
from lab.report.test_page import check, read

MADE = Made("ghostnoise report tiny", datetime(2030, 1, 2, tzinfo=UTC))


def report(tmp_path, warn=pytest.fail, **options):
    return Report(experiment(tmp_path, **options), tmp_path / "tiny", MADE, warn)


@pytest.fixture
def folders(tmp_path):
    """The run folders by the names of their runs."""
    return {point.name: write(tmp_path, point) for point in points(experiment(tmp_path))}


@pytest.fixture
def measured(folders, tmp_path):
    record(folders["BN seed 1"], e1=convolutional(), e20=convolutional(seed=1))
    record(folders["BN seed 2"], e1=convolutional(seed=2))
    record(folders["GNI ghost_size=16 seed 0"], e3=connected(names=(NASTY,)))
    return tmp_path


def test_without_noise_there_is_a_note_and_nothing_else(folders, tmp_path):
    made = report(tmp_path, form="noise")
    assert any("No run has recorded its noise" in line and "[meter] every" in line for line in notes(made.findings, []))
    html = read(made.file("index.html").decode())
    assert "noise" not in html.ids()
    made.write(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(NAMES)
    assert not any("noise" in line for line in notes(report(tmp_path, form="bars").findings, []))


def test_the_figure_is_that_of_the_first_run_with_noise(measured):
    made = report(measured, form="noise")
    assert "The figure shows the noise of BN seed 1 after epochs 1 and 20." in notes(made.findings, [])
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


def test_names_of_layers_are_text(measured):
    made = report(measured, form="noise")
    html = read(made.file("index.html").decode())
    assert f"{NASTY}.1" in "".join(html.texts)
    assert "img" not in {tag for tag, _ in html.tags}
    assert json.loads(html.scripts[0])["noise"][1]["readings"][0]["layers"][0]["name"] == f"{NASTY}.1"


def test_the_page_is_well_formed_and_links_to_the_csv(measured, monkeypatch):
    monkeypatch.setattr("lab.report.test_page.NAMES", (*NAMES, "noise.csv"))
    made = report(measured)
    check(read(made.file("index.html").decode()))
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
        told = rows[3][name]
        if value is None or value != value:
            assert told == ""
        else:
            assert told == str(value)


def test_a_damaged_reading_is_said_and_the_others_shown(measured, folders):
    (folders["BN seed 1"] / "noise" / "epoch-0001.npz").write_bytes(b"no")
    lines = []
    made = report(measured, lines.append, form="noise")
    assert "after epoch 20." in notes(made.findings, [])[-1]
    assert len(lines) == 1
    assert "epoch-0001.npz is damaged" in lines[0]


def test_a_served_page_has_news_when_noise_is_recorded(measured, folders):
    before = watch.state(measured / "tiny")
    assert watch.state(measured / "tiny") == before
    record(folders["BN seed 0"], e1=convolutional())
    assert watch.state(measured / "tiny") != before


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
