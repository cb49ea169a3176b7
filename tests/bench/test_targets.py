"""The table of targets, from a list of them and the JSON that benchmarks write."""

import json

import pytest

from bench.test_markdown import records
from ghostnoise.bench import markdown, run
from ghostnoise.bench.targets import targets
from ghostnoise.lab.errors import UserError

LISTED = """
[[target]]
text = "images"
must = 1.0
aim = 0.5
file = "layers.json"
contender = "GBN-32 (native)"
rows = ["8x4x2x2 contiguous", "16x4x2x2 contiguous"]

[[target]]
text = "their mean"
must = 0.7
aim = 0.6
file = "layers.json"
contender = "GBN-32 (native)"
rows = ["8x4x2x2 contiguous", "16x4x2x2 contiguous"]
statistic = "mean"

[[target]]
text = "relative to another"
must = 1.1
aim = 1.0
file = "layers.json"
contender = "GBN-32 (native)"
over = "GBN-32 (aten)"
rows = ["64x16"]
"""


@pytest.fixture
def path(tmp_path):
    run.write(tmp_path, "layers", records(("default",)), [])
    return tmp_path / "targets.toml"


def test_missed_targets_are_in_bold(path):
    path.write_text(LISTED)
    assert targets(path).splitlines() == [
        "| quantity | must | aim | measured |",
        "| --- | --- | --- | --- |",
        "| images | 1.00 | 0.50 | 1.00 |",
        "| their mean | 0.70 | 0.60 | **0.71** |",
        "| relative to another | 1.10 | 1.00 | 1.00 |",
    ]


def test_without_rows_all_rows_that_have_both_contenders_count(path):
    listed = """
[[target]]
text = "every row"
must = 1.0
file = "layers.json"
contender = "GBN-32 (native)"
"""
    path.write_text(listed)
    found = [each for each in markdown.read(path.parent / "layers.json") if each["contender"] == "GBN-32"]
    worst = max(each["ratio_p50"] for each in found if each["backend"] == "native")
    assert f"{worst:.2f}" in targets(path)
    path.write_text(listed + 'over = "another"\n')
    with pytest.raises(UserError, match=r"no row has GBN-32 \(native\) and another"):
        targets(path)


def test_a_file_is_read_once_and_only_the_default_allocator_counts(path, monkeypatch):
    run.write(path.parent, "layers", records(("default", "raised")), [])
    stored = json.loads((path.parent / "layers.json").read_text())
    for each in stored["records"]:
        each["ratio_p50"] *= 9 if each["allocator"] == "raised" else 1
    (path.parent / "layers.json").write_text(json.dumps(stored))
    path.write_text(LISTED)
    files = []
    monkeypatch.setattr("ghostnoise.bench.targets.read", lambda file: files.append(file.name) or markdown.read(file))
    assert "| images | 1.00 | 0.50 | 1.00 |" in targets(path)
    assert files == ["layers.json"]


def test_a_target_may_have_no_aim(path):
    path.write_text(LISTED.replace("aim = 0.5\n", ""))
    assert "| images | 1.00 |  | 1.00 |" in targets(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('rows = ["64x16"]', 'rows = ["9x9"]', "no row 9x9; there are 8x4x2x2 contiguous"),
        ('over = "GBN-32 (aten)"', 'over = "nobody"', "64x16 has no nobody; it has nn.BatchNorm2d"),
        ("must = 1.1\n", "", "'must'"),
        ('file = "layers.json"', 'file = "other.json"', "other.json"),
        ("[[target]]", "[target", "cannot be read"),
    ],
)
def test_wrong_lists(path, old, new, message):
    path.write_text(LISTED.replace(old, new))
    with pytest.raises(UserError, match=message):
        targets(path)


def test_another_value_can_be_measured(path):
    path.write_text(LISTED.split("[[target]]")[1].join(["[[target]]", 'value = "p50_ms"\n']))
    assert targets(path).splitlines()[2] == "| images | 1.00 | 0.50 | **201** |"
