"""What is special to batch renormalization; its output and gradients are those of test_every_method.py."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostnoise
from ghostnoise import functional
from support import ghost_wrappers, reference
from support.levels import LEVELS
from support.levels import running as at_level


def naive(x, layer, r_max, d_max, mean=None, var=None):
    """Return the expected output for x (B, C) with the running statistics of a layer, or with others."""
    running = (layer.running_mean, layer.running_var) if mean is None else (mean, var)
    return reference.batch_renorm(x[:, :, None], *running, r_max, d_max, layer.weight, layer.bias)[:, :, 0]


def test_gradcheck():
    """r and d are constants for the gradient, so they are held at limits that the perturbations do not reach."""
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mean, var = torch.full((2,), 50.0, dtype=torch.float64), torch.full((2,), 1e-4, dtype=torch.float64)
    options = {"r_max": 2.0, "d_max": 1.0, "warmup_steps": 0, "transition_steps": 0}

    def run(x, weight, bias):
        return functional.batch_renorm(x, mean.clone(), var.clone(), weight, bias, True, **options)

    assert torch.autograd.gradcheck(run, (x, weight, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


def test_limits_of_one_and_zero_are_batch_norm():
    x = torch.randn(6, 3, 4, 4)
    ours, theirs = ghostnoise.BatchRenorm2d(3, r_max=1.0, d_max=0.0), nn.BatchNorm2d(3)
    torch.testing.assert_close(ours(x), theirs(x))


def test_warm_up_and_transition_are_counted_by_num_batches_tracked():
    layer = ghostnoise.BatchRenorm1d(1, warmup_steps=2, transition_steps=4, r_max=3.0, d_max=5.0, affine=False).double()
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        x = torch.randn(8, 1, dtype=torch.float64, generator=generator) * 9 + 40
        progress = min(max((step - 2) / 4, 0), 1)
        wanted = naive(x, layer, 1 + 2 * progress, 5 * progress)
        torch.testing.assert_close(layer(x), wanted, rtol=1e-10, atol=1e-10)
    assert layer.num_batches_tracked == 8


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("smooth", [False, True])
def test_the_schedule_of_reinforcement_learning_is_torchrls_until_its_factor_exceeds_1(smooth, level):
    steps = 4
    options = {"warmup_steps": 0, "transition_steps": steps, "transition": "correction"}
    options = options if smooth else {"warmup_steps": steps, "transition_steps": 0}
    ours = ghostnoise.BatchRenorm1d(3, momentum=0.01, affine=False, **options).double()
    theirs = ghost_wrappers.BatchRenorm1d(3, warmup_steps=steps, smooth=smooth).double()
    generator = torch.Generator().manual_seed(0)
    same = steps if smooth else 2 * steps - 1  # the last batch that agrees: then its factor exceeds 1
    for step in range(same + 3):
        x = (torch.randn(16, 3, dtype=torch.float64, generator=generator) * 2 + 3).requires_grad_()
        dy = torch.randn(16, 3, dtype=torch.float64, generator=generator)
        with at_level(level):
            pairs = [(y, *torch.autograd.grad(y, x, dy)) for y in (ours(x), theirs(x))]
        if step <= same:
            torch.testing.assert_close(*pairs, rtol=1e-10, atol=1e-10)
        else:
            assert not torch.allclose(pairs[0][0], pairs[1][0], rtol=1e-3)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))


def test_the_correction_grows_linearly():
    layer = ghostnoise.BatchRenorm1d(1, warmup_steps=2, transition_steps=4, transition="correction", affine=False)
    generator = torch.Generator().manual_seed(0)
    layer = layer.double()
    for step in range(8):
        x = torch.randn(8, 1, dtype=torch.float64, generator=generator) * 9 + 40
        full, none = naive(x, layer, 3.0, 5.0), naive(x, layer, 1.0, 0.0)
        progress = min(max((step - 2) / 4, 0), 1)
        torch.testing.assert_close(layer(x), none + progress * (full - none), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_pass_uses_r_and_d_of_the_first_pass(reentrant):
    """Two checkpointed passes are outstanding when the first backward runs, and the buffers have moved twice."""
    layer = ghostnoise.BatchRenorm1d(2, warmup_steps=0, transition_steps=0, r_max=50.0, d_max=50.0).double()
    batches = [(torch.randn(6, 2, dtype=torch.float64) * scale + scale).requires_grad_() for scale in (1.0, 4.0)]
    before, outputs = [], []
    for x in batches:
        before.append((layer.running_mean.clone(), layer.running_var.clone()))
        outputs.append(checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=reentrant))
    moved = [buffer.clone() for buffer in layer.buffers()]
    sum(y.square().sum() for y in outputs).backward()
    for x, running in zip(batches, before, strict=True):
        y = naive(x, layer, 50.0, 50.0, *running).tanh()
        (wanted,) = torch.autograd.grad(y.square().sum(), x)
        torch.testing.assert_close(x.grad, wanted, rtol=1e-10, atol=1e-10)
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
    assert all(tensor.isfinite().all() for tensor in (y, x.grad, layer.weight.grad, *layer.buffers()))


def test_running_statistics_and_their_count_are_needed():
    with pytest.raises(ValueError, match="without running_mean and running_var"):
        functional.batch_renorm(torch.randn(4, 2), None, None, training=True)
    with pytest.raises(ValueError, match="without num_batches_tracked"):
        functional.batch_renorm(torch.randn(4, 2), torch.zeros(2), torch.ones(2), training=True)
