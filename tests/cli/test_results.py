"""`ghostnoise results` as a user calls it."""

import json

import pytest

from ghostnoise import cli
from support.records import experiment_with_runs

BENCH = [
    {"bench": "net", "row": row, "contender": contender, "backend": "native", "kind": "ours", "allocator": allocator,
     "ratio_p50": ratio, "n": 9, "device_name": "AMD EPYC", "threads": 2, "torch": "2.8", "ghostnoise": "0.1.0",
     "date": "2026-01-31"}
    for allocator in ("default", "raised")
    for row, contender, ratio in (("ResNet-20", "GNI-16", 0.94), ("ResNet-20", "GBN-16", 0.97), ("MLP", "GNI-16", 123))
]  # fmt: skip


@pytest.fixture
def there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experiment_with_runs(tmp_path)
    assert cli.main(["runs", "export", "tiny"]) == 0
    (tmp_path / "results" / "tiny" / "README.md").write_text(
        "<!-- generated: table tiny.toml --only BN --seeds 0,1 -->\n<!-- end generated -->\n"
    )
    capsys.readouterr()
    return tmp_path


def test_pages_are_written_and_checked(there, capsys):
    page = there / "results" / "tiny" / "README.md"
    before = page.read_text()
    assert cli.main(["results", "--check"]) == 1
    assert page.read_text() == before
    out = capsys.readouterr().out
    assert "out of date: results/tiny/README.md" in out
    assert "1 file out of date; `ghostnoise results` rebuilds them" in out
    assert cli.main(["results"]) == 0
    assert "wrote: results/tiny/README.md" in capsys.readouterr().out
    assert "| BN | 90.07 ± 0.10 (2) |" in page.read_text()
    assert cli.main(["results", "--check"]) == 0
    assert capsys.readouterr().out == "all files are up to date\n"


def test_tables_of_benchmarks_are_rendered_from_their_json(there):
    (there / "results" / "bench").mkdir()
    (there / "results" / "bench" / "net.json").write_text(json.dumps({"bench": "net", "records": BENCH}))
    (there / "docs").mkdir()
    page = there / "docs" / "performance.md"
    page.write_text("<!-- generated: bench results/bench/net.json --value ratio_p50 -->\n<!-- end generated -->\n")
    assert cli.main(["results"]) == 0
    assert page.read_text().splitlines()[1:-1] == [
        "| default / raised allocator | GNI-16 (native) | GBN-16 (native) |",
        "| --- | --- | --- |",
        "| ResNet-20 | 0.94 / 0.94 | 0.97 / 0.97 |",
        "| MLP | 123 / 123 |  |",
        "",
        "AMD EPYC, 2 threads, torch 2.8, ghostnoise 0.1.0, 2026-01-31, n = 9.",
    ]


def test_a_profile_is_rendered_from_its_json(there):
    records = [
        each | {"scope": "network", "level": level, "part": part, "p50_ms": taken, "ratio_p50": taken / 10}
        for each in BENCH[:1]
        for level, part, taken in (("step", "step", 10.0), ("part", "convolutions", 8.0), ("part", "rest", 2.0))
    ]
    (there / "results" / "profile.json").write_text(json.dumps({"bench": "profile", "records": records}))
    page = there / "README.md"
    page.write_text("<!-- generated: profile results/profile.json -->\n<!-- end generated -->\n")
    assert cli.main(["results"]) == 0
    assert page.read_text().splitlines()[3:-1] == [
        "| default allocator | step | convolutions | rest |",
        "| --- | --- | --- | --- |",
        "| ResNet-20, GNI-16 | 10.0 (1.00) | 8.0 (0.80) | 2.0 (0.20) |",
        "",
        "AMD EPYC, 2 threads, torch 2.8, ghostnoise 0.1.0, 2026-01-31, n = 9.",
    ]


@pytest.mark.parametrize(
    ("marker", "line"),
    [
        ("table tiny.toml --what 3", "unrecognized arguments: --what"),
        ("table", "the following arguments are required: recipe"),
        ("table tini", "recipe 'tini': not found"),
        ("bench none.json", "give a file that `ghostnoise bench` wrote"),
        ("bench tiny.toml", "give a file that `ghostnoise bench` wrote"),
        ("profile none.json", "give a file that `ghostnoise bench` wrote"),
        ("profile results/net.json", "its records have no level; give a file that `ghostnoise bench profile` wrote"),
        ("bench results/net.json --only nothing", "has no records of these rows and this backend; check --only"),
    ],
)
def test_mistakes_are_one_line(there, capsys, marker, line):
    (there / "results" / "net.json").write_text(json.dumps({"bench": "net", "records": BENCH}))
    (there / "README.md").write_text(f"<!-- generated: {marker} -->\n<!-- end generated -->\n")
    assert cli.main(["results"]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert "README.md, line 1: " in err
    assert err.count("\n") == 1


def test_another_folder_is_refused(tmp_path, capsys):
    assert cli.main(["results", "--root", str(tmp_path)]) == 2
    assert "has no folder results; run this from the folder that contains it" in capsys.readouterr().err
