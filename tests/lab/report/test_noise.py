"""Recorded noise: which files count, and a figure in the paper's form."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgba

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.report import noise
from ghostnoise.lab.report.noise_lines import digest
from lab.report.readings import NASTY, connected, constant, convolutional, record


def test_readings_are_found_by_epoch_and_other_files_left_alone(tmp_path):
    record(tmp_path, e100=connected(), e2=connected(1), e12345=connected(2))
    for name in (".epoch-0003.npz.part", "epoch-last.npz", "notes.txt"):
        (tmp_path / "noise" / name).write_bytes(b"")
    found = noise.recorded(tmp_path, pytest.fail)
    assert list(found) == [2, 100, 12345]
    assert found[2].rows() == connected(1).rows()
    assert noise.digests(tmp_path, pytest.fail) == noise.digests(tmp_path, pytest.fail)


def test_a_run_without_noise_has_no_readings(tmp_path):
    assert noise.recorded(tmp_path, pytest.fail) == {}
    assert noise.digests(tmp_path / "nowhere", pytest.fail) == {}


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "flipped", "zip"])
@pytest.mark.parametrize("read", [noise.recorded, noise.digests])
def test_a_damaged_file_is_said_and_left_out(tmp_path, damage, read):
    record(tmp_path, e1=connected(), e2=connected(1))
    path = tmp_path / "noise" / "epoch-0001.npz"
    whole = path.read_bytes()
    middle = len(whole) // 2
    content = {
        "empty": b"", "text": b"{}", "cut": whole[:middle], "zip": b"PK\x05\x06" + bytes(18),
        "flipped": whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 40]) + whole[middle + 40 :],
    }  # fmt: skip
    path.write_bytes(content[damage])
    lines = []
    assert list(read(tmp_path, lines.append)) == [2]
    assert len(lines) == 1
    assert str(path) in lines[0]
    assert path.read_bytes() == content[damage]


def test_a_file_that_has_changed_is_read_again(tmp_path):
    record(tmp_path, e1=connected(names=("a",)))
    assert [layer.name for layer in noise.digests(tmp_path, pytest.fail)[1].layers] == ["a.1"]
    record(tmp_path, e1=connected(names=("b", "c")))
    assert [layer.name for layer in noise.digests(tmp_path, pytest.fail)[1].layers] == ["b.1", "c.1"]


@given(st.sets(st.integers(1, 500), min_size=1, max_size=40), st.integers(2, 8))
def test_of_many_epochs_the_first_the_last_and_some_between_are_taken(epochs, most):
    taken = list(noise.spread(dict.fromkeys(epochs, 0), most))
    ordered = sorted(epochs)
    assert taken == [epoch for epoch in ordered if epoch in taken]
    assert len(taken) == min(most, len(epochs))
    assert (taken[0], taken[-1]) == (ordered[0], ordered[-1])
    steps = [ordered.index(b) - ordered.index(a) for a, b in itertools.pairwise(taken)]
    assert max(steps, default=0) - min(steps, default=0) <= 1


def test_the_figure_has_two_rows_and_a_column_for_each_reading():
    shown = {"epoch 1": digest(connected()), "epoch 9": digest(connected(1))}
    figure = noise.figure(shown, 8)
    shift, scale = figure.axes[:2], figure.axes[2:]
    assert [axes.get_title() for axes in shift] == ["epoch 1", "epoch 9"]
    assert shift[0].get_xlim() == shift[1].get_xlim()
    assert shift[0].get_xlim()[0] == -shift[0].get_xlim()[1]
    assert scale[0].get_xlim() == scale[1].get_xlim()
    assert scale[0].get_xlim()[0] >= 0
    for axes in figure.axes:
        first, last = axes.lines[:2]
        assert to_rgba(first.get_color()) == pytest.approx(to_rgba("#8000ff"), abs=0.01)
        assert to_rgba(last.get_color()) == pytest.approx(to_rgba("red"), abs=0.01)
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
    figure = noise.figure({"now": found}, 128)
    shift, scale, bar = figure.axes
    assert [len(axes.lines) for axes in (shift, scale)] == [11 + 1] * 2  # nothing varies in the last layer
    assert [line.get_label() for line in scale.lines[11:]] == ["fully connected, N = 128"]
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0", "11"]
    assert bar.get_ylabel() == "12 layers, in their order"


def test_draw_writes_both_files_and_the_same_each_time(tmp_path):
    readings, law_size = {NASTY: convolutional()}, None
    paths = noise.draw(readings, law_size, tmp_path / "new" / "noise.of.2")
    assert [path.name for path in paths] == ["noise.of.2.png", "noise.of.2.pdf"]
    first = [path.read_bytes() for path in paths]
    assert first[0].startswith(b"\x89PNG")
    assert first[1].startswith(b"%PDF")
    noise.draw(readings, law_size, tmp_path / "new" / "noise.of.2")
    assert [path.read_bytes() for path in paths] == first


def test_names_of_layers_are_no_formulas_and_all_are_in_the_legend(tmp_path):
    names = ("_hidden", NASTY, "$")
    reading = connected(names=names)
    figure = noise.figure({"now": digest(reading)}, 8)
    assert [text.get_text() for text in figure.legends[1].get_texts()] == [
        "_hidden.1",
        "…" + f"{NASTY}.1"[-23:],
        "$.1",
    ]
    assert not any(text.get_parse_math() for text in figure.legends[1].get_texts())
    noise.draw({"now": reading}, None, tmp_path / "figure")


def test_what_cannot_be_drawn_is_one_line(tmp_path):
    with pytest.raises(UserError, match="there is no reading"):
        noise.draw({}, None, tmp_path / "figure")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*; give another folder"):
        noise.draw({"now": connected()}, None, tmp_path / "file" / "figure")
