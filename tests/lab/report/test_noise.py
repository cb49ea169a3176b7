"""Recorded readings, and densities of layers and laws against those of scipy."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ghostnoise.lab.report import noise
from ghostnoise.lab.report.noise import (
    Digest,
    LayerNoise,
    digest,
    extent,
    law_line,
    law_lines,
    law_size,
    layer_line,
    quantiles,
)
from ghostnoise.meter.layer import HistogramAccumulator
from support.readings import connected, constant, convolutional, record

SHARES = (np.arange(20_000) + 0.5) / 20_000


def test_readings_are_found_by_epoch_and_other_files_are_ignored(tmp_path):
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
def test_a_damaged_file_is_reported_and_ignored(tmp_path, damage, read):
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
def test_of_many_epochs_the_first_the_last_and_some_between_are_selected(epochs, most):
    taken = list(noise.spread(dict.fromkeys(epochs, 0), most))
    ordered = sorted(epochs)
    assert taken == [epoch for epoch in ordered if epoch in taken]
    assert len(taken) == min(most, len(epochs))
    assert (taken[0], taken[-1]) == (ordered[0], ordered[-1])
    steps = [ordered.index(b) - ordered.index(a) for a, b in itertools.pairwise(taken)]
    assert max(steps, default=0) - min(steps, default=0) <= 1


def layer_of(law, center, ghost_size):
    """Return a layer whose noise has the quantiles of a law."""
    gathered = HistogramAccumulator(center, ghost_size, 1)
    gathered.add(torch.from_numpy(law.ppf(SHARES))[:, None], torch.ones(1, dtype=torch.bool), 1)
    part = "shift" if center == 0 else "scale"
    return part, LayerNoise("one", {}, {part: gathered.result()})


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 512), st.floats(0.05, 1.5), st.sampled_from([0, 1]), st.integers(60, 400))
def test_the_line_of_a_layer_is_its_density(ghost_size, strength, center, points):
    std = strength / ghost_size**0.5
    law = stats.norm(0, std) if center == 0 else stats.gamma(1 / std**2, scale=std**2)
    part, layer = layer_of(law, center, ghost_size)
    places, density = layer_line(layer, part, (-10, 10) if center == 0 else (0, 20), points)
    assert len(places) <= points
    assert (np.diff(places) > 0).all()
    peak = law.pdf(places).max()
    # A kernel of 0.13 deviations takes less than 1 % off a normal peak; a skewed one, and bins, take a bit more.
    assert np.abs(density - law.pdf(places)).max() < 0.05 * peak
    assert np.trapezoid(density, places) == pytest.approx(1, abs=0.01)


def test_a_narrow_layer_beside_a_wide_one_keeps_its_peak():
    part, layer = layer_of(stats.norm(0, 0.001), 0, 8)
    _, density = layer_line(layer, part, (-1, 1), 90)
    assert density.max() == pytest.approx(stats.norm(0, 0.001).pdf(0), rel=0.05)


def test_variances_that_are_near_zero_stay_above_it():
    part, layer = layer_of(stats.chi2(1, scale=1 / 2), 1, 2)
    places, density = layer_line(layer, part, (0, 10), 400)
    assert places[0] == 0
    assert np.trapezoid(density, places) == pytest.approx(1, abs=0.02)


@given(st.integers(2, 1024))
def test_laws_are_those_of_the_paper_and_the_exact_one(size):
    shown = digest(connected())
    within = {"shift": (-3 / size**0.5, 3 / size**0.5), "scale": (0.0, 1 + 5 / size**0.5)}
    expected = {
        "shift": [stats.norm(0, size**-0.5)],
        "scale": [stats.chi2(size, scale=1 / size), stats.chi2(size - 1, scale=1 / size)],
    }
    for part, laws in expected.items():
        lines = law_lines(shown, part, size)
        assert len(lines) == len(laws)
        for line, law in zip(lines, laws, strict=True):
            places, density = law_line(line, part, within[part], 400)
            inside = slice(8, None) if size <= 4 and part == "scale" else slice(None)  # without a pole at 0
            expected_density = law.pdf(places)[inside]
            assert density[inside] == pytest.approx(expected_density, abs=0.02 * expected_density.max())


def test_a_ghost_batch_of_one_has_no_exact_law():
    assert [line.law for line in law_lines(digest(connected()), "scale", 1)] == ["fc"]


def test_images_have_the_law_of_fully_connected_layers_at_one_size():
    shown = digest(convolutional())
    assert [line.label for part in ("shift", "scale") for line in law_lines(shown, part, 256)] == [
        "fully connected, N = 256"
    ] * 2


def test_the_size_of_the_law():
    flat, image = digest(connected()), digest(convolutional())
    assert law_size([flat], None) == 8
    assert law_size([flat, image], 77) == 77
    sizes = [7.0, 23.0, 900.0, float("nan"), float("inf")]  # the median of what is known is 23
    layers = [
        dataclasses.replace(
            image.layers[0], row={"positions": 25, "effective_size_shift": n, "effective_size_scale": n}
        )
        for n in sizes
    ]
    assert law_size([Digest(8, tuple(layers))], None) == 2 ** round(np.log2(23))
    assert law_size([Digest(8, tuple(layers[3:]))], None) == 8


@pytest.mark.parametrize("part", ["shift", "scale"])
def test_a_figure_shows_nearly_all_of_every_layer(part):
    image = digest(convolutional(3))
    shown = [digest(connected()), dataclasses.replace(image, layers=(*image.layers, constant(image.layers[0])))]
    low, high = extent(shown, part, 8)
    for each in shown:
        for layer in each.layers:
            found = layer.components[part]
            if found.n[0]:
                outside = found.cdf()[0][[max(found.edges.searchsorted(low) - 1, 0), found.edges.searchsorted(high)]]
                assert outside[0] <= 0.006
                assert outside[1] >= 0.994
                assert low <= quantiles(found)[0] < quantiles(found)[1] <= high
    assert low == -high if part == "shift" else low >= 0
