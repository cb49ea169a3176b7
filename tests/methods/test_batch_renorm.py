"""Batch renormalization against a naive loop over channels in float64, written from its definition (Ioffe, 2017)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostnoise
from ghostnoise import functional
from support import reference
from support.closeness import assert_close
from support.inputs import cases

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def naive_batch_renorm(x, running_mean, running_var, r_max, d_max, weight=None, bias=None, eps=1e-5):
    """Normalize (B, C, S) channel by channel; r and d are constants."""
    channels = []
    for c in range(x.shape[1]):
        values = x[:, c]
        mean = values.mean()
        std = torch.sqrt(((values - mean) ** 2).mean() + eps)
        with torch.no_grad():
            running_std = torch.sqrt(running_var[c] + eps)
            r = (std / running_std).clamp(1 / r_max, r_max)
            d = ((mean - running_mean[c]) / running_std).clamp(-d_max, d_max)
        y = (values - mean) / std * r + d
        y = y if weight is None else y * weight[c]
        channels.append(y if bias is None else y + bias[c])
    return torch.stack(channels, dim=1)


def running_statistics(channels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean, var = (torch.rand(channels, dtype=torch.float64, generator=generator) for _ in range(2))
    return mean * 2, var * 4 + 0.1


def renorm(x, mean, var, weight=None, bias=None, **options):
    limits = {"warmup_steps": 0, "transition_steps": 0} | options
    return functional.batch_renorm(x, mean, var, weight, bias, True, **limits)


@given(cases(dtypes=DTYPES), st.sampled_from([(1.0, 0.0), (1.5, 0.8), (3.0, 5.0)]), st.booleans())
def test_batch_renorm_equals_the_naive_loop(case, limits, affine):
    x = case.tensor().requires_grad_()
    weight, bias = (case.vector(1).requires_grad_(), case.vector(2).requires_grad_()) if affine else (None, None)
    mean, var = running_statistics(case.channels, case.seed)
    r_max, d_max = limits
    options = {"r_max": r_max, "d_max": d_max, "channel_dim": case.channel_dim}
    y = renorm(x, mean.clone(), var.clone(), weight, bias, **options)
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    folded = reference.fold(exact[0], case.channel_dim)
    wanted = reference.unfold(naive_batch_renorm(folded, mean, var, r_max, d_max, *exact[1:]), x, case.channel_dim)
    assert_close(y, wanted)
    dy = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(case.seed))
    given_tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    ours = torch.autograd.grad(y, given_tensors, dy.to(case.dtype))
    theirs = torch.autograd.grad(wanted, [tensor for tensor in exact if tensor is not None], dy.to(case.dtype).double())
    largest = max(gradient.abs().max().item() for gradient in theirs)
    for actual, expected in zip(ours, theirs, strict=True):
        assert_close(actual, expected, "gradient", magnitude=max(largest, 1.0) * case.batch_size * case.spatial)


def test_gradcheck():
    """r and d are constants for the gradient, so they are held at limits that the perturbations do not reach."""
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mean, var = torch.full((2,), 50.0, dtype=torch.float64), torch.full((2,), 1e-4, dtype=torch.float64)

    def run(x, weight, bias):
        return renorm(x, mean.clone(), var.clone(), weight, bias, r_max=2.0, d_max=1.0)

    assert torch.autograd.gradcheck(run, (x, weight, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


def test_limits_of_one_and_zero_are_batch_norm():
    x = torch.randn(6, 3, 4, 4)
    ours, theirs = ghostnoise.BatchRenorm2d(3, r_max=1.0, d_max=0.0), nn.BatchNorm2d(3)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_warm_up_and_transition_are_counted_by_num_batches_tracked():
    layer = ghostnoise.BatchRenorm1d(1, warmup_steps=2, transition_steps=4, r_max=3.0, d_max=5.0, affine=False).double()
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        x = torch.randn(8, 1, dtype=torch.float64, generator=generator) * 9 + 40
        mean, var = layer.running_mean.clone(), layer.running_var.clone()
        progress = min(max((step - 2) / 4, 0), 1)
        wanted = naive_batch_renorm(x[:, :, None], mean, var, 1 + 2 * progress, 5 * progress)[:, :, 0]
        torch.testing.assert_close(layer(x), wanted, rtol=1e-10, atol=1e-10)
    assert layer.num_batches_tracked == 8


def test_running_statistics_are_those_of_batch_norm_and_updated_after_use():
    ours = ghostnoise.BatchRenorm2d(3, warmup_steps=0, transition_steps=0)
    theirs = nn.BatchNorm2d(3)
    for seed in range(3):
        x = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(seed)) * 2 + 1
        ours(x), theirs(x)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    x = torch.randn(6, 3, 4, 4)
    assert torch.equal(ours.eval()(x), theirs.eval()(x)) or torch.allclose(ours(x), theirs(x), atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_pass_uses_r_and_d_of_the_first_pass(reentrant):
    """Two checkpointed passes are outstanding when the first backward runs, and the buffers have moved twice."""
    layer = ghostnoise.BatchRenorm1d(2, warmup_steps=0, transition_steps=0, r_max=50.0, d_max=50.0).double()
    batches = [torch.randn(6, 2, dtype=torch.float64) * scale + scale for scale in (1.0, 4.0)]
    before, wanted = [], []
    for x in batches:
        x.requires_grad_()
    outputs = []
    for x in batches:
        before.append((layer.running_mean.clone(), layer.running_var.clone()))
        outputs.append(checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=reentrant))
    moved = [layer.running_mean.clone(), layer.running_var.clone(), layer.num_batches_tracked.clone()]
    sum(y.square().sum() for y in outputs).backward()
    for x, (mean, var) in zip(batches, before, strict=True):
        y = naive_batch_renorm(x[:, :, None], mean, var, 50.0, 50.0, layer.weight, layer.bias).tanh()
        wanted.append(torch.autograd.grad(y.square().sum(), x)[0])
    for x, gradient in zip(batches, wanted, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=1e-10, atol=1e-10)
    for buffer, unchanged in zip(layer.buffers(), moved, strict=True):
        assert torch.equal(buffer, unchanged)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite_with_extreme_running_statistics(dtype):
    layer = ghostnoise.BatchRenorm2d(3, warmup_steps=0, transition_steps=0)
    nn.init.constant_(layer.running_var, 1e-12)
    nn.init.constant_(layer.running_mean, 3e4)
    x = (torch.randn(4, 3, 5, 5) * 100).to(dtype).requires_grad_()
    y = layer(x)
    y.float().square().mean().backward()
    assert y.dtype == dtype
    assert all(tensor.isfinite().all() for tensor in (y, x.grad, layer.weight.grad, *layer.buffers()))


def test_a_batch_that_is_not_finite_leaves_the_buffers_alone():
    layer = ghostnoise.BatchRenorm1d(2, warmup_steps=0, transition_steps=0)
    layer(torch.randn(5, 2))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    assert layer(torch.full((5, 2), torch.inf)).isnan().all()
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name])


def test_errors():
    with pytest.raises(ValueError, match="track_running_stats=False"):
        ghostnoise.BatchRenorm2d(3, track_running_stats=False)
    with pytest.raises(ValueError, match="without running_mean and running_var"):
        functional.batch_renorm(torch.randn(4, 2), None, None, training=True)
    with pytest.raises(ValueError, match="without num_batches_tracked"):
        functional.batch_renorm(torch.randn(4, 2), torch.zeros(2), torch.ones(2), training=True)
    for options in ({"r_max": 0.5}, {"d_max": -1}, {"warmup_steps": -1}, {"transition_steps": 1.5}):
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}="):
            ghostnoise.BatchRenorm2d(3, **options)


def test_convert_and_a_recipe_accept_it():
    model = ghostnoise.convert(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), "brn", r_max=2.0)
    assert type(model[1]) is ghostnoise.BatchRenorm1d
    model(torch.randn(5, 4)).sum().backward()
    assert type(ghostnoise.revert(model)[1]) is nn.BatchNorm1d
    assert not [name for name in vars(model[1]) if "recent" in name]
