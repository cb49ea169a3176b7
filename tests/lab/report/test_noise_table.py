"""Measured noise in a terminal."""

import dataclasses
import io
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report.noise_table import bar, nearest, terminal
from ghostnoise.meter.reading import Reading
from lab.report.readings import NASTY, connected, convolutional


def printed(readings, width=100):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    terminal(readings, console)
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


def test_names_are_no_markup():
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


def test_nothing_to_show_is_one_line():
    with pytest.raises(UserError, match="there is no reading"):
        printed({})
