"""Tables of benchmarks in Markdown, from the JSON that a benchmark writes."""

import json

import pytest

from ghostnoise.bench import run
from ghostnoise.bench.markdown import markdown
from ghostnoise.lab.errors import UserError

SHARED = {
    "bench": "layers", "n": 9, "device_name": "AMD EPYC", "threads": 2, "torch": "2.8", "ghostnoise": "0.1.0",
    "date": "2026-01-31",
}  # fmt: skip
ROWS = [("8x4x2x2 contiguous", "8x4x2x2", "contiguous"), ("16x4x2x2 contiguous", "16x4x2x2", "contiguous"),
        ("64x16", "64x16", "")]  # fmt: skip
CONTENDERS = [("nn.BatchNorm2d", "", "torch", 1.0), ("GBN-32", "native", "ours", 0.5), ("GBN-32", "aten", "ours", 2.0),
              ("Composer", "", "peer", 1.5)]  # fmt: skip


def records(allocators=("default", "raised")):
    return [
        SHARED | {"row": row, "shape": shape, "memory_format": form, "contender": contender, "backend": backend,
                  "kind": kind, "allocator": allocator, "ratio_p50": ratio * (at + 1), "p50_ms": 200.0 + at}
        for allocator in allocators for at, (row, shape, form) in enumerate(ROWS)
        for contender, backend, kind, ratio in CONTENDERS
    ]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return run.write(tmp_path, "layers", records(), [])[0]


def test_the_summary_of_layers_has_a_line_for_each_contender(path):
    assert markdown(path, backend="native").splitlines() == [
        "| default / raised allocator | mean, contiguous | worst image | 64x16 |",
        "| --- | --- | --- | --- |",
        "| GBN-32 (native) | 0.71 / 0.71 | 1.00 / 1.00 | 1.50 / 1.50 |",
        "| Composer | 2.12 / 2.12 | 3.00 / 3.00 | 4.50 / 4.50 |",
        "",
        "AMD EPYC, 2 threads, torch 2.8, ghostnoise 0.1.0, 2026-01-31, n = 9.",
    ]
    assert "GBN-32 (aten) | 2.83 / 2.83" in markdown(path)


def test_a_quantity_has_a_line_for_each_row(path):
    lines = markdown(path, "p50_ms").splitlines()
    assert lines[0] == "| default / raised allocator | nn.BatchNorm2d | GBN-32 (native) | GBN-32 (aten) | Composer |"
    assert lines[2].startswith("| 8x4x2x2 contiguous | 200 / 200 |")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"records": 3}', '{"records": [1]}', '{"records": []}', "[" * 9999]
)
def test_what_is_not_a_benchmark_is_refused(tmp_path, content):
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(UserError, match="give a file that `ghostnoise bench` wrote"):
        markdown(tmp_path / "file.json")


def test_an_unknown_quantity_and_missing_numbers_are_refused(tmp_path, path):
    with pytest.raises(UserError, match="--value colour: must be one of ratio_p50"):
        markdown(path, "colour")
    incomplete = [{key: value for key, value in each.items() if key != "ratio_p50"} for each in records()]
    path.write_text(json.dumps({"records": incomplete}))
    with pytest.raises(UserError, match="its records have no 'ratio_p50'"):
        markdown(path)
