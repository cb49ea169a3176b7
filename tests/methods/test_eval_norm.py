"""EvalNorm at inference; it trains as ghost batch norm, which test_every_method.py tests."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise import EvalNorm2d, functional
from support import reference
from support.closeness import assert_close
from support.families import example
from support.inputs import cases

SHARES = st.none() | st.just("1/N^2") | st.floats(0, 1)


@given(cases(least_values=1, dtypes=(torch.float64, torch.float32)), SHARES, st.booleans())
def test_eval_norm_equals_the_naive_loop(case, alpha, masked):
    running = case.vector(3).double(), case.vector(4).double().square() + 0.1
    share = {None: 1 / case.ghost_size, "1/N^2": case.ghost_size**-2}.get(alpha, alpha)
    mask = case.mask() if masked else None
    inputs = [each.requires_grad_() for each in (case.tensor(), case.vector(1), case.vector(2))]
    x, weight, bias = inputs
    y = functional.eval_norm(
        x, *running, weight, bias, ghost_size=case.ghost_size, alpha=alpha, channel_dim=case.channel_dim, mask=mask
    )
    exact = [each.detach().double().requires_grad_() for each in inputs]
    samples = reference.eval_norm(reference.fold(exact[0], case.channel_dim, mask), *running, share, exact[1], exact[2])
    expected = reference.unfold(samples, x, case.channel_dim, mask)
    assert_close(y, expected)
    dy = case.tensor(5)
    gradients = zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, exact, dy.double()), strict=True)
    for actual, wanted in gradients:  # parameters are sums over the batch, and samples with a small variance are steep
        assert_close(actual, wanted, "gradient", magnitude=20 * dy.abs().max())


def test_gradcheck():
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 2, 3), (2,), (2,))]
    buffers = torch.randn(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64)

    def run(x, weight, bias):
        return functional.eval_norm(x, *buffers, weight, bias, ghost_size=3)

    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_a_share_of_nothing_is_plain_batch_norm():
    layer, plain = EvalNorm2d(3, ghost_size=4, alpha=0.0), torch.nn.BatchNorm2d(3)
    layer(example(2))
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(example(2)), plain.eval()(example(2)))


def test_without_ghost_batches_the_share_must_be_given():
    x, mean, var = example(2), torch.zeros(3), torch.ones(3)
    evaluated = functional.eval_norm(x, mean, var, ghost_size=None, alpha=0.5)
    assert torch.equal(evaluated, functional.eval_norm(x, mean, var, ghost_size=2))
    for alpha in (None, "1/N^2"):
        message = rf"alpha={str(alpha).replace('^', '.')}.* with ghost_size=None: .*give one of the two"
        for call in (functional.eval_norm, lambda *_, **options: EvalNorm2d(3, **options)):
            with pytest.raises(ValueError, match=message.replace("1/N.2", "'1/N.2'")):
                call(x, mean, var, ghost_size=None, alpha=alpha)
