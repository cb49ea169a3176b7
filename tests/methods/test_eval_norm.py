import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.optimization import fuse

from ghostnoise import EvalNorm1d, EvalNorm2d, EvalNorm3d, GhostBatchNorm2d, functional
from support import reference
from support.comparison import assert_equals_naive
from support.families import example
from support.inputs import cases


@given(cases(least_values=1, dtypes=(torch.float64, torch.float32)), st.none() | st.just("1/N^2") | st.floats(0, 1))
def test_eval_norm_at_inference_equals_naive_loop(case, alpha):
    running_mean, running_var = case.vector(3).double(), case.vector(4).double().square() + 0.1
    share = {None: 1 / case.ghost_size, "1/N^2": case.ghost_size**-2}.get(alpha, alpha)

    def function(x, weight, bias):
        return functional.eval_norm(
            x, running_mean, running_var, weight, bias, ghost_size=case.ghost_size, alpha=alpha,
            channel_dim=case.channel_dim,
        )  # fmt: skip

    def naive(x, weight, bias):
        return reference.eval_norm(x, running_mean, running_var, share, weight, bias)

    assert_equals_naive(function, naive, case)


@given(cases())
def test_eval_norm_trains_as_ghost_batch_norm(case):
    def run(function):
        buffers = torch.zeros(case.channels, dtype=case.dtype), torch.ones(case.channels, dtype=case.dtype)
        y = function(case.tensor(), *buffers, training=True, ghost_size=case.ghost_size, channel_dim=case.channel_dim)
        return y, *buffers

    for ours, theirs in zip(run(functional.eval_norm), run(functional.ghost_batch_norm), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_eval_norm_at_inference():
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    buffers = torch.randn(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64)

    def run(x, weight, bias):
        return functional.eval_norm(x, *buffers, weight, bias, ghost_size=3)

    assert torch.autograd.gradcheck(run, (x, weight, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


def test_eval_norm_without_ghosts_needs_its_share():
    x, mean, var = torch.randn(6, 3, 4), torch.zeros(3), torch.ones(3)
    trained = functional.eval_norm(x, None, None, training=True, ghost_size=None, alpha=0.5)
    assert torch.equal(trained, functional.eval_norm(x, None, None, training=True, ghost_size=6))
    evaluated = functional.eval_norm(x, mean, var, ghost_size=None, alpha=0.5)
    assert torch.equal(evaluated, functional.eval_norm(x, mean, var, ghost_size=2))
    with pytest.raises(ValueError, match=r"alpha=None with ghost_size=None: .*give one of the two"):
        functional.eval_norm(x, mean, var, ghost_size=None)


@pytest.mark.parametrize("alpha", [None, 0.0, 1 / 16, 1.0, "1/N^2"])
def test_eval_is_the_function(alpha):
    layer = EvalNorm2d(3, ghost_size=4, alpha=alpha)
    layer(example(2))
    layer.eval()
    expected = functional.eval_norm(
        example(2), layer.running_mean, layer.running_var, layer.weight, layer.bias, ghost_size=4, alpha=alpha
    )
    assert torch.equal(layer(example(2)), expected)


def test_a_share_of_nothing_is_plain_batch_norm():
    layer, plain = EvalNorm2d(3, ghost_size=4, alpha=0.0), torch.nn.BatchNorm2d(3)
    layer(example(2))
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(example(2)), plain.eval()(example(2)))


def test_trains_as_ghost_batch_norm():
    layer, ghost = EvalNorm2d(3, ghost_size=4), GhostBatchNorm2d(3, ghost_size=4)
    assert torch.equal(layer(example(2)), ghost(example(2)))
    assert torch.equal(layer.running_var, ghost.running_var)


def test_eval_does_not_look_at_other_samples():
    layer = EvalNorm2d(3, ghost_size=4).eval()
    torch.testing.assert_close(layer(example(2))[:1], layer(example(2)[:1]))


def test_options_are_checked_when_built():
    with pytest.raises(ValueError, match=r"alpha=2: must be a number in \[0, 1\]"):
        EvalNorm2d(3, ghost_size=4, alpha=2)
    with pytest.raises(ValueError, match="ghost_size=0"):
        EvalNorm2d(3, ghost_size=0)


def test_without_ghosts_the_share_is_given():
    assert EvalNorm2d(3, ghost_size=None, alpha=0.5).ghost_size is None
    with pytest.raises(ValueError, match="alpha=None with ghost_size=None"):
        EvalNorm2d(3, ghost_size=None)
    with pytest.raises(ValueError, match=r"alpha='1/N\^2' with ghost_size=None: N is ghost_size; give one of the two"):
        EvalNorm2d(3, ghost_size=None, alpha="1/N^2")


def test_it_is_not_a_batch_norm_that_could_be_folded():
    """Folding would drop the sample's own moments: fx leaves the layer alone, and a batch norm beside it is folded."""
    for layer, plain in ((EvalNorm1d, nn.BatchNorm1d), (EvalNorm2d, nn.BatchNorm2d), (EvalNorm3d, nn.BatchNorm3d)):
        assert not issubclass(layer, plain)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), EvalNorm2d(4, ghost_size=8), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model(torch.randn(9, 3, 2, 2))
    x = torch.randn(2, 3, 5, 5)
    folded = fuse(copy.deepcopy(model.eval()))
    torch.testing.assert_close(folded(x), model(x))
    assert [type(module) for module in folded.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)] == [
        EvalNorm2d
    ]


def test_options_outside_their_range():
    for alpha in (1.5, "1/N"):
        with pytest.raises(ValueError, match=rf"alpha={alpha!r}: must be a number in \[0, 1\]"):
            functional.eval_norm(torch.randn(4, 3, 2), None, None, ghost_size=2, alpha=alpha)
