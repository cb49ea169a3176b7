"""The page: well-formed, self-contained, and safe against arbitrary text in recipes and run folders."""

import json
from datetime import UTC, datetime

import pytest

from ghostnoise.lab.report import page
from ghostnoise.lab.report.files import ExperimentReport
from support.html_page import check, read
from support.run_folders import experiment, fill, points, write

NASTY = """</script><script>alert("1")</script><img src='x' onerror="alert(2)">&amp;"""
PROVENANCE = page.Provenance("ghostnoise report 'a<b>'", datetime(2030, 1, 2, 3, 4, tzinfo=UTC))
GOOD = {"BN": {0: 90.0, 1: 90.4, 2: 90.2}, "GNI ghost_size=16": {0: 93.0, 1: 93.6}}


def made_of(tmp_path, **options):
    made = experiment(tmp_path, **options)

    def html(tag=""):
        report = ExperimentReport(made, tmp_path / "tiny", PROVENANCE, lambda line: None)
        return report.file("index.html", tag).decode()

    return made, html


@pytest.mark.parametrize("form", ["bars", "curves", "noise"])
def test_well_formed_and_self_contained(tmp_path, form):
    made, html = made_of(tmp_path, form=form)
    check(read(html()))  # before there is a run
    fill(tmp_path, made, GOOD)
    reader = read(html())
    check(reader)
    shown = " ".join(reader.texts)
    for words in (
        "noise helps",
        "GNI > BN",
        "Inconclusive",
        "93.30 ± 0.42 (2)",
        "90.1 ± 0.2",
        "4 missing",
        "2030-01-02",
    ):
        assert words in shown, words
    assert ("No run has recorded its noise" in shown) == (form == "noise")
    groups = json.loads(reader.scripts[0])["training"]["groups"]
    assert [len(group["runs"]) for group in groups] == [3, 2]
    assert groups[0]["curves"]["accuracy"]["runs"][0] == [88, 89, 90]


def test_text_of_recipes_and_runs_is_escaped(tmp_path):
    made, html = made_of(tmp_path, base=f"B{NASTY.replace('>', '')}", claim=NASTY, claims=[])
    first, second, *_ = points(made)
    write(tmp_path, first, 90.0, environment={"device_name": NASTY, "commit": NASTY})
    write(tmp_path, second, status="failed", failure=NASTY)
    reader = read(html())
    check(reader)
    shown = "".join(reader.texts)
    assert shown.count(NASTY) >= 3  # claim, device, failure
    assert "alert" not in reader.scripts[1]
    assert [group["label"] for group in json.loads(reader.scripts[0])["training"]["groups"]] == [
        f"B{NASTY.replace('>', '')}"
    ]


def test_only_a_served_page_may_ask_for_updates(tmp_path):
    _, html = made_of(tmp_path)
    policies = {
        tag: next(attrs["content"] for _, attrs in read(html(tag)).tags if "http-equiv" in attrs) for tag in ("", '"x"')
    }
    assert "connect-src" not in policies[""]
    assert "connect-src 'self'" in policies['"x"']


def test_environments_that_differ_are_pointed_out(tmp_path):
    made, html = made_of(tmp_path)
    for point, torch in zip(points(made), ("2.8", "2.9"), strict=False):
        write(tmp_path, point, environment={"torch": torch})
    assert "The runs differ in torch" in html()
    assert "2.8 (1 run)" in html()


def test_mixed_numerics_are_a_warning_on_the_page(tmp_path):
    made, html = made_of(tmp_path)
    bn, gni = (points(made, [name]) for name in ("BN", "GNI ghost_size=16"))
    for point in bn:
        write(tmp_path, point, environment={"numerics": 2})
    assert "Mixed numerics" not in html()
    write(tmp_path, gni[0])  # recorded before the number was: 1
    reader = read(html())
    check(reader)
    warnings = [attrs for tag, attrs in reader.tags if attrs.get("class") == "warning"]
    assert len(warnings) == 2  # summary and environment
    shown = "".join(reader.texts)
    assert (
        shown.count("Mixed numerics: the runs were computed with numerics 1 (1 run) and 2 instead of 1 (3 runs)") == 1
    )
    assert "The runs differ in numerics" in shown
    assert "inconclusive" in shown.lower()


def test_different_numbers_of_methods_are_no_warning(tmp_path, raised):
    made, html = made_of(tmp_path)
    raised("gni", 2)
    write(tmp_path, points(made, ["BN"])[0], environment={"numerics": 1})
    write(tmp_path, points(made, ["GNI ghost_size=16"])[0], environment={"numerics": 2})
    shown = html()
    assert "The runs differ in" not in shown
    assert "Mixed numerics" not in shown


def test_a_page_is_small(tmp_path):
    made, html = made_of(tmp_path)
    fill(tmp_path, made, GOOD)
    assert len(html().encode()) < 100_000


def test_times_that_cannot_be_compared_are_a_warning(tmp_path):
    made, html = made_of(tmp_path)
    fill(tmp_path, made, GOOD)
    assert "Accuracy against cost" in html()
    assert "different machines" not in html()
    for point in points(made, ["GNI ghost_size=4"]):
        write(tmp_path, point, environment={"device_name": f"machine {point.seed}"})
    assert "The runs come from different machines (machine 0, machine 1, machine 2)" in html()
