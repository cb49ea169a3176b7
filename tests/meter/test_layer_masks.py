"""Measurements of padded batches are those of the same samples without padding, by naive float64 loops."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ghostnoise
from ghostnoise.meter import Meter
from ghostnoise.meter.gap import METHODS
from ghostnoise.meter.theory import COMPONENTS
from support import ragged
from support.metering import Spy, assert_histogram, measure
from support.reference import ghost_batch_of

GHOST = 4


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 1.5 + 0.7


def measure_padded(batches, ghost_size=GHOST, module=None, **options):
    """Measure batches (x, mask) as the input of a module, each in a block."""
    model = nn.Sequential(module or nn.Identity())
    options = {"modules": "0", "side": "input", "channel_dim": 1} | options
    with torch.no_grad(), Meter(model, ghost_size, **options) as meter:
        for x, mask in batches:
            with ghostnoise.masked(mask):
                model(x)
    return meter.result()["0"]


def present(x, mask, channel_dim=1):
    return [sample for sample in ragged.unpad(x, mask, channel_dim) if sample.shape[1]]


def noise_of(samples, tables, weighted):
    """Shift (m - μ)/σ and scale s²/σ² of each ghost batch, (R, C) each; see `support.metering.noise_of`."""
    mean, var = ragged.statistics(samples)
    shift, scale = [], []
    for drawn in (row for table in tables for row in table.tolist()):
        m, s2 = ragged.statistics([samples[k] for k in drawn])
        times = len(drawn) if weighted else 1
        shift += times * [((m - mean) / var.sqrt()).numpy()]
        scale += times * [(s2 / var).numpy()]
    return np.array(shift), np.array(scale)


def fractions(samples):
    """σ_I² and σ_B² over σ², with the degrees of freedom of samples of different lengths."""
    mean, var = ragged.statistics(samples)
    total = sum(sample.shape[1] for sample in samples)
    inside = sum(((sample - sample.mean(1, keepdim=True)) ** 2).sum(1) for sample in samples)
    around = sum(sample.shape[1] * (sample.mean(1) - mean) ** 2 for sample in samples) / total
    degrees = total - len(samples)
    within = inside / degrees if degrees else torch.zeros_like(var)
    return (within / var).numpy(), ((around - within * len(samples) / total) / var).clamp_min(0).numpy()


def normalized(method, samples, indices, eps):
    if method == "gni":
        return ragged.ghost_noise(ragged.batch_norm(samples, eps=eps), indices)
    if method == "bn":
        return ragged.batch_norm(samples, eps=eps)
    run = ragged.ghost_batch_norm if method == "gbn" else ragged.exclusive_batch_norm
    return run(samples, GHOST, eps=eps)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    st.lists(st.integers(0, 6), min_size=0, max_size=9), st.sampled_from([(3, 6), (6, 3), (3, 2, 3)]), st.integers(1, 9)
)
def test_noise_and_moments(lengths, layout, ghost_size):
    lengths = [3, *lengths, 5]
    channel_dim = -1 if layout == (6, 3) else 1
    mask = ragged.lengths_mask(lengths, 6).view(len(lengths), *(layout[1:] if channel_dim == 1 else (6,)))
    x = random(len(lengths), *layout).where(mask.unsqueeze(channel_dim), torch.nan)
    samples = present(x, mask, channel_dim)
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        found = measure_padded([(x, mask)], ghost_size, draws=20, gap=False, channel_dim=channel_dim)
    values = sum(sample.shape[1] for sample in samples)
    assert (found.batches, found.samples, found.skipped) == (1, len(samples), 0)
    assert found.spatial == pytest.approx(values / len(samples))
    for one, other in zip((found.mean, found.var), ragged.statistics(samples), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-11)
    for one, other in zip((found.within, found.between), fractions(samples), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-10)
    for method, tables in spy.noise[0].items():
        for component, expected in zip(COMPONENTS, noise_of(samples, tables, method == "gbn"), strict=True):
            distribution = getattr(found.noise[method], component)
            assert_histogram(distribution, expected, 1e-10)
            np.testing.assert_allclose(distribution.mean, expected.mean(0), atol=1e-10)
            np.testing.assert_allclose(distribution.var, expected.var(0), atol=1e-10)


LENGTHS = [[5, 2, 6, 0, 3, 4, 6, 0, 5, 2, 4, 6], [6, 3, 4, 5, 2]]


@pytest.mark.parametrize("training", [True, False])
def test_gaps(training, monkeypatch):
    """Outputs are compared at valid positions, and ghost batches are those of the samples that have any."""
    layer = ghostnoise.BatchNorm1d(3, eps=0.01).double().train(training)
    layer.running_mean.copy_(torch.tensor([0.3, -0.2, 0.8]))
    layer.running_var.copy_(torch.tensor([0.9, 1.7, 1.2]))
    spy, buffers = Spy(monkeypatch), []
    layer.register_forward_pre_hook(lambda module, args: buffers.append(tuple(t.clone() for t in module.buffers())))
    masks = [ragged.lengths_mask(lengths, 6) for lengths in LENGTHS]
    batches = [(random(*mask.shape, seed=at).unsqueeze(1).repeat(1, 3, 1), mask) for at, mask in enumerate(masks)]
    batches = [(x * torch.tensor([1.0, 2.0, 3.0])[:, None], mask) for x, mask in batches]
    found = measure_padded([(x.where(mask.unsqueeze(1), 99.0), mask) for x, mask in batches], module=layer)
    assert set(found.gaps) == set(METHODS)
    for method, gap in found.gaps.items():
        trained, repeated, inferred, pools = [], [], [], []
        for (x, mask), indices, others, (mean, var, _) in zip(batches, spy.gap, spy.others, buffers, strict=True):
            samples = present(x, mask)
            trained += normalized(method, samples, indices, 0.01)
            order = others.order.tolist() if method in ("gbn", "xbn") else range(len(samples))
            again = normalized(method, [samples[k] for k in order], others.indices, 0.01)
            repeated += [y for _, y in sorted(zip(order, again, strict=True), key=lambda pair: pair[0])]
            inferred += ragged.running_norm(samples, mean, var, eps=0.01)
            size = GHOST if method in ("gbn", "xbn") else len(samples)
            groups = [ghost_batch_of(k, len(samples), size) for k in range(len(samples))]
            pools += [sum(samples[n].shape[1] for n in group) for group in groups]
        y, again, z = (torch.cat(values, 1) for values in (trained, repeated, inferred))
        squares = z.square().mean(1)
        np.testing.assert_allclose(gap.systematic, ((y - z) * (again - z)).mean(1) / squares, rtol=1e-9)
        np.testing.assert_allclose(gap.random, (y - again).square().mean(1) / 2 / squares, rtol=1e-9, atol=1e-24)
        np.testing.assert_allclose(gap.difference, (y - z).abs().mean(1), rtol=1e-9)
        np.testing.assert_allclose(gap.relative, (y - z).abs().mean(1) / z.abs().mean(1), rtol=1e-9)
        np.testing.assert_allclose(gap.largest, y.abs().amax(1), rtol=1e-9)
        np.testing.assert_allclose(gap.range_ratio, y.abs().amax(1) / z.abs().amax(1), rtol=1e-9)
        if method in ("bn", "gbn"):
            assert gap.bound == pytest.approx((max(pools) - 1) ** 0.5)
    # A sample has the share n_b / n of its pool's values: these sum to 1 in each pool.
    assert found.gaps["bn"].self_share == pytest.approx(2 / 15)
    assert found.gaps["gbn"].self_share == pytest.approx((2 + 1) / 15)
    assert found.gaps["xbn"].self_share == 0


def test_samples_of_one_length_equal_a_shorter_batch():
    x, mask = random(8, 3, 9), ragged.lengths_mask([5] * 8, 9)
    full = torch.ones(8, 9, dtype=torch.bool)
    for valid, plain in ((mask, x[:, :, :5]), (full, x)):
        found, expected = measure_padded([(x, valid)]).row(), measure([plain], GHOST).row()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            is_number = isinstance(value, int | float)
            assert found[name] == (pytest.approx(value, rel=1e-9, nan_ok=True) if is_number else value)


@pytest.mark.parametrize("how", ["argument", "keyword"])
def test_a_mask_that_a_layer_is_given(how):
    x, mask = random(6, 3, 7), ragged.lengths_mask([5, 2, 7, 0, 3, 1], 7)
    expected = measure_padded([(x, mask)])
    layer = ghostnoise.GhostNoiseBatchNorm1d(3, ghost_size=4).double()
    for side in ("input", "output"):
        with torch.no_grad(), Meter(layer, GHOST, side=side) as meter:
            y = layer(x, mask) if how == "argument" else layer(mask=mask, input=x)
        found = meter.result().layers[0]
        if side == "input":
            np.testing.assert_allclose(found.mean, expected.mean)
            np.testing.assert_allclose(found.noise["gni"].shift.var, expected.noise["gni"].shift.var)
        else:
            np.testing.assert_allclose(found.mean, ragged.statistics(present(y, mask))[0], atol=1e-12)


def test_layers_that_do_not_take_masks():
    """A model that is not converted, before and after pooling, and with more dimensions than layers accept."""
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4), nn.GELU()).double()
    x, mask = random(6, 7, 3), ragged.lengths_mask([5, 2, 7, 0, 3, 1], 7)
    with torch.no_grad(), Meter(model, GHOST, modules=["0", "2"], channel_dim=-1) as meter, ghostnoise.masked(mask):
        y = model(x)
    found = meter.result()
    for name, values in (("0", model[0](x)), ("2", y)):
        np.testing.assert_allclose(found[name].var, ragged.statistics(present(values.detach(), mask, -1))[1])
    deep, mask = random(6, 3, 2, 1, 2, 2), torch.rand(6, 2, 1, 2, 2, generator=torch.Generator().manual_seed(0)) < 0.5
    found = measure_padded([(deep, mask)])
    np.testing.assert_allclose(found.var, ragged.statistics(present(deep, mask))[1])
    chosen = torch.tensor([True, False, True, True])
    found = measure_padded([(random(4, 3), chosen)])
    assert found.samples == 3
    np.testing.assert_allclose(found.mean, random(4, 3)[chosen].mean(0))


def test_batches_with_fewer_than_two_samples_are_skipped():
    batches = [(random(3, 2, 5), ragged.lengths_mask(lengths, 5)) for lengths in ([0, 4, 0], [0, 4, 2])]
    found = measure_padded(batches)
    assert (found.batches, found.skipped, found.samples) == (1, 1, 2)
    with pytest.raises(ValueError, match="1 batches had fewer than two samples"):
        measure_padded(batches[:1])


def test_ghost_batches_of_one_valid_value():
    found = measure_padded([(random(4, 2, 5), ragged.lengths_mask([5, 1, 4, 3], 5))], ghost_size=1)
    assert "gni" in found.refused
    assert "bn" in found.gaps


def test_a_layer_without_a_mask_for_its_positions():
    model = nn.Sequential(nn.Conv1d(2, 3, 1, stride=2), nn.GroupNorm(1, 3)).double()
    message = (
        r"^'1' \(GroupNorm\).* has an output of shape \(2, 3, 3\) inside of ghostnoise.masked, which has masks of "
    )
    mask = ragged.lengths_mask([5, 3], 5)
    with Meter(model, GHOST) as meter, ghostnoise.masked(mask), pytest.raises(ValueError, match=message) as error:
        model(random(2, 2, 5))
    assert str(error.value).endswith("or leave the module out of modules=")
    with meter, ghostnoise.masked(mask, mask[:, ::2]):
        model(random(2, 2, 5))
    assert meter.result()["1"].batches == 1


@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_model(inside):
    layer = nn.Sequential(ghostnoise.BatchNorm1d(3)).double()
    x, mask = random(6, 3, 7), ragged.lengths_mask([5, 2, 7, 0, 3, 1], 7)

    def run(x, mask):
        if not inside:
            return layer(x)
        with ghostnoise.masked(mask):
            return layer(x)

    compiled = torch.compile(run, backend="eager")
    with torch.no_grad(), Meter(layer, GHOST) as meter:
        if inside:
            compiled(x, mask)
        else:
            with ghostnoise.masked(mask):
                compiled(x, mask)
    np.testing.assert_allclose(meter.result()["0"].mean, ragged.statistics(present(x, mask))[0], atol=1e-12)
