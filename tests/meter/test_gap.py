"""Gaps between training and inference, against naive normalization."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from torch import nn

import ghostnoise
from ghostnoise.meter.gap import METHODS, GhostBatches
from support import reference
from support.inputs import cases
from support.metering import Spy, measure, measure_model

FLOAT32 = 1e-5


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def naive(method, x, size, indices, eps):
    """The normalized output (B, C, S)."""
    if method == "gni":
        return reference.ghost_noise_batch_norm(x, indices, eps=eps)
    if method == "bn":
        return reference.batch_norm(x, eps=eps)
    normalize = reference.ghost_batch_norm if method == "gbn" else reference.exclusive_batch_norm
    return normalize(x, size, eps=eps)


def naive_again(method, x, size, ghosts, eps):
    """The normalized output (B, C, S) with other ghost batches, in the order of x."""
    if method in ("bn", "gni"):
        return naive(method, x, size, ghosts.indices, eps)
    y = torch.empty_like(x)
    y[ghosts.order] = naive(method, x[ghosts.order], size, None, eps)
    return y


def shuffled(method, x, size):
    """The normalized output (B, C, S) with random ghost batches."""
    order = torch.randperm(len(x))
    return naive_again(method, x, size, GhostBatches(order, torch.randint(len(x), (len(x), size))), 1e-5)


@settings(max_examples=30)
@given(cases(least_batch=4, least_values=4, least_ghost=3))
def test_largest_outputs_of_arbitrary_batches(case):
    """In float64. Without running statistics, there is no comparison with inference."""
    x = case.tensor()
    folded = reference.fold(x, case.channel_dim) if x.ndim > 2 else x.unsqueeze(2)
    assume((folded.var((0, 2)) > 0.05).all())
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        found = measure([x], case.ghost_size, case.channel_dim, draws=2)
    assert set(found.gaps) == set(METHODS)
    for method, gap in found.gaps.items():
        expected = naive(method, folded, case.ghost_size, spy.gap[0], 1e-5).abs().amax((0, 2))
        np.testing.assert_allclose(gap.largest, expected, rtol=1e-9)
        assert np.isnan([gap.difference, gap.relative, gap.range_ratio, gap.systematic, gap.random]).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("training", [True, False])
def test_gap_to_the_running_statistics(method, training, monkeypatch):
    """The running statistics are those before the batch: in training, every batch updates them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3, eps=0.01)).double().train(training)
    model[0].running_mean.normal_()
    model[0].running_var.uniform_(0.5, 2)
    batches = [random(10, 3, 2, 2) + 1, random(6, 3, 3, 1, seed=1) * 2]
    spy = Spy(monkeypatch)
    buffers = []
    model[0].register_forward_pre_hook(
        lambda module, args: buffers.append((module.running_mean.clone(), module.running_var.clone()))
    )
    gap = measure_model(model, batches, 4)["0"].gaps[method]
    trained, repeated, inferred = [], [], []
    for x, indices, others, (mean, var) in zip(batches, spy.gap, spy.others, buffers, strict=True):
        folded = reference.fold(x)
        trained += naive(method, folded, 4, indices, 0.01).movedim(1, 2).flatten(0, 1)
        repeated += naive_again(method, folded, 4, others, 0.01).movedim(1, 2).flatten(0, 1)
        inferred += ((folded - mean[:, None]) / (var + 0.01).sqrt()[:, None]).movedim(1, 2).flatten(0, 1)
    y, again, z = torch.stack(trained), torch.stack(repeated), torch.stack(inferred)  # values x channels
    np.testing.assert_allclose(gap.difference, (y - z).abs().mean(0), rtol=1e-9)
    np.testing.assert_allclose(gap.relative, (y - z).abs().mean(0) / z.abs().mean(0), rtol=1e-9)
    np.testing.assert_allclose(gap.largest, y.abs().amax(0), rtol=1e-9)
    np.testing.assert_allclose(gap.range_ratio, y.abs().amax(0) / z.abs().amax(0), rtol=1e-9)
    np.testing.assert_allclose(gap.systematic, ((y - z) * (again - z)).mean(0) / z.square().mean(0), rtol=1e-9)
    np.testing.assert_allclose(gap.random, (y - again).square().mean(0) / 2 / z.square().mean(0), rtol=1e-9, atol=1e-24)


@pytest.mark.parametrize("method", ["gbn", "xbn", "gni"])
def test_systematic_and_random_parts_are_those_of_many_ghost_batches(method):
    """The parts are estimated from two passes per batch; here they are computed from the mean over many passes.

    The bound is six standard errors of the mean estimate, from the scatter of the estimates, plus the error of the
    reference itself: the variance of a mean over passes.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2)).double().eval()
    x, batches, passes = random(16, 2, 5), 200, 400
    model[0].running_mean += 0.2
    model[0].running_var *= 2
    estimates = [
        measure_model(model, [x[torch.randperm(16)]], 4, draws=1, seed=1000 * seed)["0"].gaps[method]
        for seed in range(batches)
    ]
    z = model(x).detach()
    y = torch.stack([shuffled(method, x, 4) for _ in range(passes)])
    systematic = (y.mean(0) - z).square().mean((0, 2)) / z.square().mean((0, 2))
    varying = y.var(0).mean((0, 2)) / z.square().mean((0, 2))
    for name, expected in (("systematic", systematic), ("random", varying)):
        found = np.array([getattr(each, name) for each in estimates])
        error = 6 * found.std(0, ddof=1) / batches**0.5 + varying.numpy() / passes
        assert (abs(found.mean(0) - expected.numpy()) < error).all()
        assert (error < varying.numpy() / 2).all()  # the bound tells one part from the sum of both


def test_batch_norm_has_no_random_part():
    """Its statistics do not depend on how the batch is split."""
    model = nn.Sequential(nn.BatchNorm1d(3)).double().eval()
    gap = measure_model(model, [random(12, 3) + 0.5], 4)["0"].gaps["bn"]
    assert (gap.random == 0).all()
    assert (gap.systematic > 0).all()


@pytest.mark.parametrize(("batch_size", "size"), [(12, 4), (14, 4), (5, 8)])
def test_weight_of_a_sample_in_its_own_statistics(batch_size, size):
    """BN: 1/B; GBN: 1/n for a ghost batch of n samples; XBN: 0; GNI: 1/B in expectation."""
    gaps = measure([random(batch_size, 2)], size).gaps
    groups = [reference.ghost_batch_of(k, batch_size, size) for k in range(batch_size)]
    shares = {"bn": 1 / batch_size, "gbn": np.mean([1 / len(group) for group in groups]), "xbn": 0,
              "gni": 1 / batch_size}  # fmt: skip
    assert {method: gap.self_share for method, gap in gaps.items()} == pytest.approx(shares)


def test_weights_and_bounds_of_batches_of_different_sizes():
    gaps = measure([random(12, 2, 3), random(6, 2, 3)], 4).gaps
    assert gaps["bn"].self_share == pytest.approx(2 / 18)
    assert gaps["gbn"].self_share == pytest.approx((3 + 1) / 18)  # ghost batches of 4, 4 and 4 samples, and of 6
    assert gaps["bn"].bound == pytest.approx(35**0.5)
    assert gaps["gbn"].bound == pytest.approx(17**0.5)


@settings(max_examples=40)
@given(cases(least_batch=2, least_values=2))
def test_ghost_batch_norm_never_exceeds_its_bound(case):
    """The bound sqrt(n·S - 1) holds for an outlier as well."""
    x = case.tensor()
    x[0] *= 1e4
    gaps = measure([x], case.ghost_size, case.channel_dim, draws=1).gaps
    sizes = [len(reference.ghost_batch_of(k, case.batch_size, case.ghost_size)) for k in range(case.batch_size)]
    assert gaps["gbn"].bound == pytest.approx((max(sizes) * case.spatial - 1) ** 0.5)
    for method in ("bn", "gbn"):
        assert (gaps[method].largest <= gaps[method].bound * (1 + 1e-12)).all()


@pytest.mark.parametrize("positions", [1, 4])
def test_exclusive_batch_norm_has_no_bound_if_all_other_samples_are_equal(positions):
    """The example in the paper."""
    x = torch.zeros(8, 2, positions, dtype=torch.float64)
    x[3, :, 0] = 1.0
    gaps = measure([x], 8).gaps
    bound = (8 * positions - 1) ** 0.5
    assert gaps["bn"].largest == pytest.approx([bound] * 2, rel=1e-3)
    assert (gaps["gbn"].largest <= bound).all()
    assert gaps["xbn"].largest == pytest.approx([1e5**0.5] * 2)  # 1/sqrt(eps)
    assert gaps["xbn"].bound == gaps["gni"].bound == float("inf")


def test_methods_that_cannot_normalize_a_batch_report_why():
    """Exclusive batch norm needs more than two samples of one value; the other methods have their gap."""
    found = measure([random(6, 2)], 2)
    assert set(found.gaps) == {"bn", "gbn", "gni"}
    assert list(found.refused) == ["xbn"]
    assert "exclusive_batch_norm" in found.refused["xbn"]
    some = measure([random(6, 2), random(6, 2, 3)], 2)  # possible with more positions
    assert set(some.gaps) == set(METHODS)
    assert list(some.refused) == ["xbn"]


def test_without_the_gap():
    found = measure([random(8, 2)], 4, gap=False)
    assert not found.gaps
    assert not found.refused
    assert "bn_largest" not in found.row()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_normalized_in_float32(dtype):
    x = (random(16, 3, 4, dtype=torch.float32) * 3 + 2).to(dtype)
    gaps = measure([x], 4).gaps
    for method in ("bn", "gbn", "xbn"):
        expected = naive(method, x.double(), 4, None, 1e-5).abs().amax((0, 2))
        np.testing.assert_allclose(gaps[method].largest, expected, rtol=FLOAT32)


def test_the_eps_of_a_noise_layer_is_not_used():
    """It regularizes a ratio of variances, and is not the eps of a normalization."""
    x = random(16, 2) * 0.05
    model = nn.Sequential(ghostnoise.GhostNoise(4)).double()
    gap = measure_model(model, [x])["0"].gaps["bn"]
    np.testing.assert_allclose(gap.largest, naive("bn", x.unsqueeze(2), 4, None, 1e-5).abs().amax((0, 2)))
