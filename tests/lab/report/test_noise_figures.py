"""Figures of recorded noise in the paper's form."""

from dataclasses import replace

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import colors, noise_figures
from ghostnoise.lab.report.noise import digest
from support.readings import NASTY, connected, constant, convolutional


def test_the_figure_has_two_rows_and_a_column_for_each_reading():
    shown = {"epoch 1": digest(connected()), "epoch 9": digest(connected(1))}
    figure = noise_figures.figure(shown, 8)
    shift, scale = figure.axes[:2], figure.axes[2:]
    assert [axes.get_title() for axes in shift] == ["epoch 1", "epoch 9"]
    assert shift[0].get_xlim() == shift[1].get_xlim()
    assert shift[0].get_xlim()[0] == -shift[0].get_xlim()[1]
    assert scale[0].get_xlim() == scale[1].get_xlim()
    assert scale[0].get_xlim()[0] >= 0
    for axes in figure.axes:
        first, last = axes.lines[:2]
        assert [first.get_color(), last.get_color()] == [color.light for color in colors.ramp(2)]
        top = axes.get_ylim()[1]
        assert max(line.get_ydata().max() for line in axes.lines) <= top  # no peak is cut
    assert [line.get_label() for line in shift[1].lines[2:]] == ["shift: N(0, 1/8)"]
    assert [line.get_label() for line in scale[1].lines[2:]] == ["scale: χ²(8)/8, the paper’s", "scale: χ²(7)/8, exact"]
    laws, layers = figure.legends
    assert len(laws.get_texts()) == 3
    assert [text.get_text() for text in layers.get_texts()] == ["first.1", "second.1"]


def test_many_layers_have_a_bar_with_the_first_and_the_last():
    found = digest(convolutional(12))
    found = replace(found, layers=(*found.layers[:-1], constant(found.layers[-1])))
    figure = noise_figures.figure({"now": found}, 128)
    shift, scale, bar = figure.axes
    assert [len(axes.lines) for axes in (shift, scale)] == [11 + 1] * 2  # nothing varies in the last layer
    assert [line.get_label() for line in scale.lines[11:]] == ["fully connected, N = 128"]
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0", "11"]
    assert bar.get_ylabel() == "12 layers, first to last"


def test_write_writes_both_files_and_the_same_each_time(tmp_path):
    readings, law_size = {NASTY: convolutional()}, None
    paths = noise_figures.write(readings, law_size, tmp_path / "new" / "noise.of.2")
    assert [path.name for path in paths] == ["noise.of.2.png", "noise.of.2.pdf"]
    first = [path.read_bytes() for path in paths]
    assert first[0].startswith(b"\x89PNG")
    assert first[1].startswith(b"%PDF")
    noise_figures.write(readings, law_size, tmp_path / "new" / "noise.of.2")
    assert [path.read_bytes() for path in paths] == first


def test_names_of_layers_are_not_formulas_and_all_are_in_the_legend(tmp_path):
    names = ("_hidden", NASTY, "$")
    reading = connected(names=names)
    figure = noise_figures.figure({"now": digest(reading)}, 8)
    assert [text.get_text() for text in figure.legends[1].get_texts()] == [
        "_hidden.1",
        "…" + f"{NASTY}.1"[-23:],
        "$.1",
    ]
    assert not any(text.get_parse_math() for text in figure.legends[1].get_texts())
    noise_figures.write({"now": reading}, None, tmp_path / "figure")


def test_errors_are_one_line(tmp_path):
    with pytest.raises(UserError, match="there is no reading"):
        noise_figures.write({}, None, tmp_path / "figure")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*; give another folder"):
        noise_figures.write({"now": connected()}, None, tmp_path / "file" / "figure")
