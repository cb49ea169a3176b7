"""The page: well-formed, alone, and safe against whatever recipes and run folders hold."""

import json
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from ghostnoise.lab.report import page
from ghostnoise.lab.report.markup import json_in_html
from ghostnoise.lab.report.writing import NAMES, Report
from lab.report.folders import experiment, fill, points, write

VOID = {"meta", "link", "br", "input", "img", "hr"}
NASTY = """</script><script>alert("1")</script><img src='x' onerror="alert(2)">&amp;"""
MADE = page.Made("ghostnoise report 'a<b>'", datetime(2030, 1, 2, 3, 4, tzinfo=UTC))
GOOD = {"BN": {0: 90.0, 1: 90.4, 2: 90.2}, "GNI ghost_size=16": {0: 93.0, 1: 93.6}}


class Reader(HTMLParser):
    """Checks that tags nest; keeps tags, ids, texts and scripts."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts, self.scripts = [], [], [], []

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)

    def ids(self):
        return [attrs["id"] for _, attrs in self.tags if "id" in attrs]


def read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def made_of(tmp_path, **options):
    made = experiment(tmp_path, **options)
    return (
        made,
        lambda tag="": Report(made, tmp_path / "tiny", MADE, lambda line: None).file("index.html", tag).decode(),
    )


def check(reader):
    ids = reader.ids()
    assert len(set(ids)) == len(ids)
    assert len(reader.scripts) == 3
    assert [tag for tag, _ in reader.tags].count("h1") == 1
    assert not {"iframe", "object", "embed", "base", "img"} & {tag for tag, _ in reader.tags}
    for tag, attrs in reader.tags:
        assert not any(name.startswith("on") for name in attrs)
        assert "src" not in attrs
        if "href" in attrs:
            assert attrs["href"] in ("data:,", *(name for name in NAMES if name != "index.html")) or attrs[
                "href"
            ].startswith("#")
        if tag == "label" and "for" in attrs:
            assert attrs["for"] in ids
    (policy,) = [attrs["content"] for _, attrs in reader.tags if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy


@pytest.mark.parametrize("form", ["bars", "curves", "noise"])
def test_well_formed_and_alone(tmp_path, form):
    made, html = made_of(tmp_path, form=form)
    check(read(html()))  # before there is a run
    fill(tmp_path, made, GOOD)
    reader = read(html())
    check(reader)
    shown = " ".join(reader.texts)
    for words in ("noise helps", "GNI > BN", "Supported", "93.30 ± 0.42 (2)", "90.1 ± 0.2", "4 missing", "2030-01-02"):
        assert words in shown, words
    assert ("No run has recorded its noise" in shown) == (form == "noise")
    data = json.loads(reader.scripts[0])
    assert [len(group["runs"]) for group in data["training"]] == [3, 2]
    assert data["training"][0]["runs"][0]["accuracy"] == [88.0, 89.0, 90.0]


def test_whatever_a_recipe_or_a_run_says_is_text(tmp_path):
    made, html = made_of(tmp_path, base=f"B{NASTY.replace('>', '')}", claim=NASTY, claims=[])
    first, second, *_ = points(made)
    write(tmp_path, first, 90.0, environment={"device_name": NASTY, "commit": NASTY})
    write(tmp_path, second, status="failed", failure=NASTY)
    reader = read(html())
    check(reader)
    shown = "".join(reader.texts)
    assert shown.count(NASTY) >= 3  # claim, device, failure
    assert "alert" not in reader.scripts[2]
    assert [group["label"] for group in json.loads(reader.scripts[0])["training"]] == [f"B{NASTY.replace('>', '')}"]


def test_only_a_served_page_may_ask_for_news(tmp_path):
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


def test_embedded_json_cannot_end_its_script():
    nasty = {"a": "</script><!-- & \u2028"}
    made = json_in_html(nasty)
    assert not set("<>&\u2028") & set(made)
    assert json.loads(made) == nasty


def test_the_figure_is_written_in_every_form(tmp_path):
    for form in ("bars", "curves", "noise"):
        made, _ = made_of(tmp_path, form=form)
        for filled in (False, True):
            if filled and form == "bars":
                fill(tmp_path, made, GOOD)
            path = Report(made, tmp_path / "tiny", MADE, lambda line: None).write(tmp_path / f"out-{form}")
            assert sorted(each.name for each in path.parent.iterdir()) == sorted(NAMES)
            assert path.with_name("figure.png").read_bytes().startswith(b"\x89PNG")
            assert path.with_name("figure.pdf").read_bytes().startswith(b"%PDF")
