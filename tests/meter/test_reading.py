"""A reading as a mapping, as table rows, as a file, and as a short `repr`."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ghostnoise
from ghostnoise.meter import NoiseReading, Reading
from ghostnoise.meter.reading import FORMAT
from support.metering import measure, measure_model
from support.models import convolutional, images


@pytest.fixture(scope="module")
def reading():
    """Two layers, one of which has a method that refused a batch and a constant channel."""
    model = convolutional().eval()
    with torch.no_grad():
        model[4][0].weight[2], model[4][0].bias[2] = 0, 1
    return measure_model(model, [images(12), images(7)], 2)


def test_it_is_a_mapping(reading):
    assert list(reading) == ["1", "4.1"]
    assert len(reading) == 2
    assert "4.1" in reading
    assert "9" not in reading
    assert reading["1"] is reading.layers[0]
    assert dict(reading.items()) == {"1": reading.layers[0], "4.1": reading.layers[1]}
    with pytest.raises(KeyError):
        reading["9"]


def test_a_round_trip_through_a_file(reading, tmp_path):
    assert reading["4.1"].refused
    assert reading["4.1"].constant == 1
    reading.save(tmp_path / "noise.npz")
    again = Reading.load(tmp_path / "noise.npz")
    assert again == reading
    assert str(again.rows()) == str(reading.rows())
    for one, other in zip(again.layers, reading.layers, strict=True):
        assert one.noise["gni"].shift.counts.dtype == other.noise["gni"].shift.counts.dtype
        assert (one.names, one.refused, one.gaps["bn"].bound) == (other.names, other.refused, other.gaps["bn"].bound)


def test_files_without_the_parts_of_the_gap_are_read(reading):
    """Files that were written before these were measured."""
    stored, older = io.BytesIO(), io.BytesIO()
    reading.write(stored)
    stored.seek(0)
    with np.load(stored) as arrays:
        np.savez(older, **{name: arrays[name] for name in arrays if not name.endswith(("/systematic", "/random"))})
    older.seek(0)
    for found, layer in zip(Reading.load(older).layers, reading.layers, strict=True):
        for method, gap in found.gaps.items():
            assert np.isnan([gap.systematic, gap.random]).all()
            np.testing.assert_array_equal(gap.relative, layer.gaps[method].relative)
        assert np.isnan([found.row()["gbn_systematic"], found.row()["gbn_random"]]).all()


def test_files_keep_the_field_names_of_their_format(reading):
    """`own_ghost_size` is stored as "own": files written before the field was renamed must remain readable."""
    file = io.BytesIO()
    reading.write(file)
    file.seek(0)
    with np.load(file) as stored:
        (first, *_) = json.loads(str(stored["about"]))["layers"]
    assert first.keys() == {
        "name", "names", "kind", "side", "own", "ghost_size", "spatial", "batches", "samples", "skipped", "noise",
        "gaps", "refused", "never_updated", "padded", "placement",
    }  # fmt: skip


def test_a_round_trip_through_an_open_file(reading):
    file = io.BytesIO()
    reading.write(file)
    file.seek(0)
    assert Reading.load(file) == reading


def test_counts_beyond_32_bits(reading):
    layer = reading["1"]
    shift = replace(layer.noise["gni"].shift, counts=layer.noise["gni"].shift.counts + 2**33)
    many = Reading([replace(layer, noise={"gni": NoiseReading(shift, layer.noise["gni"].scale)})])
    file = io.BytesIO()
    many.write(file)
    file.seek(0)
    assert Reading.load(file) == many


def test_readings_with_any_different_value_are_not_equal(reading):
    layer = reading["1"]
    gap = layer.gaps["bn"]
    for other in (
        replace(layer, samples=3),
        replace(layer, within=layer.within + 1e-9),
        replace(layer, noise={"gni": layer.noise["gni"]}),
        replace(layer, gaps=layer.gaps | {"bn": replace(gap, bound=2.0)}),
        replace(layer, gaps=layer.gaps | {"bn": replace(gap, largest=gap.largest * 2)}),
    ):
        assert Reading([other]) != Reading([layer])
    assert Reading([layer]) != reading
    assert reading != 3


def test_a_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "noise.npz"
    np.savez(path, about=np.array(json.dumps({"format": FORMAT + 1, "layers": []})))
    with pytest.raises(ValueError, match=f"has format {FORMAT + 1}: must be {FORMAT}; measure again"):
        Reading.load(path)


def test_another_npz_file_is_refused(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, weights=np.zeros(3))
    with pytest.raises(ValueError, match=r"does not contain a reading: must be a file that Reading\.save wrote"):
        Reading.load(path)


def test_rows_summarize_the_layers(reading):
    for row, layer in zip(reading.rows(), reading.layers, strict=True):
        varying = ~np.isnan(layer.within)
        assert (row["layer"], row["channels"], row["samples"]) == (layer.name, layer.channels, 19)
        assert row["between"] == pytest.approx(layer.between[varying].mean())
        for method, noise in layer.noise.items():
            assert row[f"{method}_shift_std"] ** 2 == pytest.approx(noise.shift.var[varying].mean())
            assert row[f"{method}_scale_std"] ** 2 == pytest.approx(noise.scale.var[varying].mean())
        assert row["effective_size_shift"] == pytest.approx(1 / layer.noise["gni"].shift.var[varying].mean())
        assert row["effective_size_scale_paper"] == pytest.approx(2 / layer.noise["gni"].scale.var[varying].mean())
        for method, gap in layer.gaps.items():
            assert row[f"{method}_largest"] == gap.largest.max()
            assert row[f"{method}_difference"] == pytest.approx(gap.difference.mean())
            assert row[f"{method}_systematic"] == pytest.approx(max(gap.systematic.mean(), 0) ** 0.5, nan_ok=True)
            assert row[f"{method}_random"] == pytest.approx(gap.random.mean() ** 0.5, nan_ok=True)
            assert (row[f"{method}_bound"], row[f"{method}_self_share"]) == (gap.bound, gap.self_share)
        assert {key for key in row if key.startswith("ks_")} == {
            "ks_shift_fc", "ks_shift_conv", "ks_scale_fc", "ks_scale_fc-exact", "ks_scale_conv", "ks_scale_conv-exact",
        }  # fmt: skip
        json.dumps(row)


def test_the_distance_of_a_layer_is_that_of_all_its_draws(reading):
    """From the mixture of its channels' laws."""
    layer = reading["4.1"]
    varying = ~np.isnan(layer.within)
    found = layer.noise["gni"].scale
    below = found.cdf()[varying].mean(0)
    law = layer.law("conv-exact", "scale", found.edges)[varying].mean(0)
    assert layer.layer_distances["scale", "conv-exact"] == pytest.approx(np.abs(below - law).max())


def test_a_layer_whose_channels_are_all_constant_has_a_row():
    found = measure([torch.ones(8, 2, 3)], 4)
    row = found.row()
    assert (row["constant"], row["channels"]) == (2, 2)
    assert np.isnan([row["between"], row["gni_shift_std"], row["effective_size_scale"], row["ks_shift_conv"]]).all()
    json.dumps(row)
    assert Reading([found]) == Reading([found])


def test_effective_sizes_per_channel():
    found = measure([torch.randn(64, 3, 5)], 8)
    np.testing.assert_allclose(found.effective_size("shift"), 1 / found.noise["gni"].shift.var)
    np.testing.assert_allclose(found.effective_size("shift", "gbn"), 1 / found.noise["gbn"].shift.var)
    np.testing.assert_allclose(found.effective_size("scale", dof="paper"), 2 / found.noise["gni"].scale.var)


def test_a_reading_of_one_module_with_two_names_keeps_both(tmp_path):
    norm = nn.BatchNorm1d(3)
    found = measure_model(nn.Sequential(norm, norm), [torch.randn(8, 3)])
    found.save(tmp_path / "shared.npz")
    again = Reading.load(tmp_path / "shared.npz")
    assert list(again) == ["0"]
    assert again["1"] is again["0"]


def test_repr_is_a_short_summary(reading):
    """Independent of the number of channels and bins, for everything that a reading contains."""
    assert repr(reading) == "Reading(2 layers, 9 channels, ghost_size=2, batches=2, samples=19)"
    assert repr(Reading([replace(reading["1"], batches=7, samples=99), reading["4.1"]])) == (
        "Reading(2 layers, 9 channels, ghost_size=2, batches=2..7, samples=19..99)"
    )
    assert repr(Reading([])) == "Reading(0 layers, 0 channels, ghost_size=0, batches=0, samples=0)"
    layer = reading["4.1"]
    shift, scale = (layer.layer_effective_size(component) for component in ("shift", "scale"))
    assert repr(layer) == (
        "LayerReading('4.1': input of BatchNorm1d, channels=5 (1 constant), positions=1, ghost_size=2, batches=2, "
        f"samples=19, effective size: shift {shift:.4g}, scale {scale:.4g})"
    )
    assert "batches=2 (3 skipped)" in repr(replace(layer, skipped=3))
    for part in (layer.noise["gni"], layer.noise["gni"].shift, layer.gaps["bn"]):
        assert repr(part).startswith(type(part).__name__)
        assert len(repr(part)) < 250
    wide = measure([torch.randn(8, 500, 2)], 4)
    assert len(repr(wide)) < 250
    assert len(repr(wide.noise)) + len(repr(wide.gaps)) < 2000
    assert "array" not in f"{wide!r} {wide.noise!r} {wide.gaps!r}"


def test_dir_lists_public_names_only():
    assert sorted(dir(ghostnoise.meter)) == sorted(ghostnoise.meter.__all__)
