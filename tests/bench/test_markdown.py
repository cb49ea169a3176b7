"""Tables of benchmarks in Markdown, from the JSON that a benchmark writes."""

import json

import pytest

from ghostnoise.bench import run
from ghostnoise.bench.markdown import markdown, profile
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


def test_rows_are_selected_by_name_and_those_without_the_quantity_are_left_out(path):
    assert [line.split(" | ")[0] for line in markdown(path, "p50_ms", only=["64", "16x4"]).splitlines()[2:4]] == [
        "| 16x4x2x2 contiguous", "| 64x16",
    ]  # fmt: skip
    stored = records()
    for each in stored:
        if each["row"] == "64x16" or each["contender"] == "Composer":
            del each["p50_ms"]
    path.write_text(json.dumps({"records": stored}))
    lines = markdown(path, "p50_ms").splitlines()
    assert lines[0] == "| default / raised allocator | nn.BatchNorm2d | GBN-32 (native) | GBN-32 (aten) |"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| 8x4x2x2 contiguous", "| 16x4x2x2 contiguous"]
    with pytest.raises(UserError, match="has no records of these rows and this backend; check --only"):
        markdown(path, "p50_ms", only=["nothing"])
    with pytest.raises(UserError, match="its records have no ratio_peak"):
        markdown(path, "ratio_peak")


def test_contenders_are_selected_by_name(path):
    lines = markdown(path, "p50_ms", contenders=["Composer", "GBN-32 (native)"]).splitlines()
    assert lines[0] == "| default / raised allocator | GBN-32 (native) | Composer |"
    with pytest.raises(
        UserError, match=r"^--contender GBN-32: .* has none of this name; must be one of nn.BatchNorm2d,"
    ):
        markdown(path, contenders=["GBN-32"])


def test_the_summary_of_memory_has_saved_tables_and_peaks(tmp_path):
    stored = [
        SHARED | {"bench": "memory", "row": row, "contender": contender, "backend": backend, "kind": "", "n": 1,
                  "allocator": "default", "tables_saved": tables, "ratio_peak": peak}
        for row, contender, backend, tables, peak in (
            ("8x4x2x2", "nn.BatchNorm2d", "", 0.1, 1.0), ("8x4x2x2", "BN+GNI-32", "native", 2.0, 0.8),
            ("8x4", "BN+GNI-32", "native", 2.5, 1.3))
    ]  # fmt: skip
    path = run.write(tmp_path, "memory", stored, [])[0]
    assert markdown(path, backend="native").splitlines()[:4] == [
        "| default allocator | 8x4x2x2: tables saved | 8x4x2x2: peak ratio | 8x4: tables saved | 8x4: peak ratio |",
        "| --- | --- | --- | --- | --- |",
        "| nn.BatchNorm2d | 0.10 | 1.00 |  |  |",
        "| BN+GNI-32 (native) | 2.00 | 0.80 | 2.50 | 1.30 |",
    ]


def parts(allocator="default"):
    """Return the records of a layer with two parts and a function, and of a network."""
    found = [
        ("layer", "nn.BatchNorm1d", "step", "step", 0.1), ("layer", "BN", "step", "step", 0.3),
        ("layer", "BN", "part", "autograd.Function", 0.0512), ("layer", "BN", "part", "rest", 0.2488),
        ("layer", "BN", "function", "pool", 0.01), ("network", "nn.BatchNorm2d compiled", "step", "step", 0.1),
    ]  # fmt: skip
    return [
        SHARED | {"bench": "profile", "row": "8x4", "scope": scope, "contender": contender, "level": level, "kind": "",
                  "backend": "", "part": part, "p50_ms": taken, "ratio_p50": taken / 0.1, "allocator": allocator}
        for scope, contender, level, part, taken in found
    ]  # fmt: skip


def test_a_profile_has_a_table_of_parts_of_functions_and_of_networks(tmp_path):
    path = run.write(tmp_path, "profile", parts(), [])[0]
    assert profile(path).splitlines() == [
        "Microseconds of forward + backward and of its parts, with the ratio to `nn.BatchNorm*d`:",
        "",
        "| default allocator | step | autograd.Function | rest |",
        "| --- | --- | --- | --- |",
        "| 8x4, nn.BatchNorm1d | 100 (1.00) |  |  |",
        "| 8x4, BN | 300 (3.00) | 51.2 (0.51) | 249 (2.49) |",
        "",
        "Microseconds and ratios of the C++ functions as separate calls, which take longer than inside of the fused "
        "calls:",
        "",
        "| default allocator | pool |",
        "| --- | --- |",
        "| 8x4, BN | 10.0 (0.10) |",
        "",
        "Milliseconds of a training step and of its parts, with the ratio to the first step of a row:",
        "",
        "| default allocator | step |",
        "| --- | --- |",
        "| 8x4, nn.BatchNorm2d compiled | 0.1 (1.00) |",
        "",
        "AMD EPYC, 2 threads, torch 2.8, ghostnoise 0.1.0, 2026-01-31, n = 9.",
    ]


@pytest.mark.parametrize("missing", ["scope", "level", "part", "p50_ms", "ratio_p50"])
def test_a_profile_without_its_fields_is_refused(tmp_path, missing):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"records": [{k: v for k, v in each.items() if k != missing} for each in parts()]}))
    with pytest.raises(UserError, match=f"profile.json: its records have no {missing}; give a file that `ghostnoise"):
        profile(path)


def test_a_profile_of_another_benchmark_is_refused(path):
    with pytest.raises(UserError, match=r"layers\.json: its records have no level; give a file that `ghostnoise"):
        profile(path)


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
