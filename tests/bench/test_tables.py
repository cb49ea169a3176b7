import io

import pytest
from rich.console import Console

from ghostnoise.bench import tables


def record(row, contender, ratio, **more):
    size, _, form = row.partition(" ")
    return {
        "bench": "layers", "row": row, "shape": size, "memory_format": form or "contiguous", "contender": contender,
        "kind": "ours", "backend": "", "ratio_p50": ratio, "ratio_best": ratio, "allocator": "default", "n": 3,
        "p20_ms": 1.0, "p50_ms": 2.0, "p80_ms": 3.0, "over_limit": 4.0,
    } | more  # fmt: skip


def text(table, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def unwrapped(printed):
    return " ".join(printed.split())


def line_of(printed, contender):
    (line,) = [line for line in printed.splitlines() if line.strip().startswith(contender)]
    return line.split()[1:]


def test_the_summary_has_geometric_means_the_worst_and_single_rows():
    records = [
        record("2x3x4x4 contiguous", "GBN", 0.5), record("2x3x8x8 contiguous", "GBN", 2.0),
        record("2x3x4x4 channels_last", "GBN", 3.0), record("9x9", "GBN", 7.0), record("9x9", "other", 150.4),
    ]  # fmt: skip
    printed = text(tables.summary_table(records))
    assert line_of(printed, "GBN") == ["1.00", "3.00", "3.00", "7.00"]
    assert line_of(printed, "other") == ["150"]


def test_there_is_no_summary_of_a_single_row():
    assert tables.summary_table([record("9x9", "GBN", 1.0)]) is None


def test_a_row_is_a_line_for_each_contender():
    printed = text(tables.row_table([record("9x9", "BN", 1.0), record("9x9", "GBN", 0.5, backend="native")]))
    assert "9x9: ratios to BN" in printed
    assert line_of(printed, "BN") == ["1.00", "2.00", "3.00", "1.00", "1.00", "4.00", "3"]
    assert "GBN (native)" in printed


def part(contender, level, name, taken):
    return {
        "bench": "profile", "row": "256x512x4x4 channels_last", "scope": "layer", "contender": contender,
        "level": level, "part": name, "p50_ms": taken, "ratio_p50": taken / 0.2,
    }  # fmt: skip


def test_a_profile_is_a_line_for_each_part_and_fits_a_terminal_of_80_columns():
    records = [part("nn.BatchNorm2d", "step", "step", 0.2)]
    for contender in ("BN", "GBN-32", "XBN-32", "BN+GNI-32"):
        records += [part(contender, "step", "step", 0.5), part(contender, "part", "normalize", 0.04)]
        records.append(part(contender, "part", "rest", 0.46))
    records += [part("XBN-32", "part", "normalize_backward", 0.9876)]
    printed = text(tables.row_table(records))
    assert "256x512x4x4 channels_last: µs of a step and its parts (ratio to nn.BatchNorm2d, 200 µs)" in unwrapped(
        printed
    )
    assert line_of(printed, "step") == ["500", "(2.50)"] * 4
    assert line_of(printed, "normalize ") == ["40.0", "(0.20)"] * 4
    assert line_of(printed, "normalize_backward") == ["988", "(4.94)"]
    assert printed.index("normalize_backward") < printed.index("rest")
    assert "…" not in printed


@pytest.mark.parametrize("backend", ["aten", "native", "triton"])
def test_tables_fit_a_terminal_of_80_columns(backend):
    rows = ["256x128x16x16 contiguous", "256x128x16x16 channels_last", "1024x1024", "256x64x512"]
    records = [record(row, "BN+AGNI-32", 12345.6, backend=backend, p80_ms=54321.0) for row in rows]
    for table in (tables.row_table(records[:1]), tables.summary_table(records)):
        assert "…" not in text(table)
