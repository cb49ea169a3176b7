"""DSU against a loop in float64, and what its layer does in a network."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostnoise
from ghostnoise import DistributionUncertainty, functional
from support import reference
from support.closeness import assert_close
from support.inputs import Case, cases


def naive(samples, draws, eps=1e-6):
    """As the authors compute it: unbiased variances, and a gradient through all of them."""
    styles = [(each.mean(1), torch.sqrt(each.var(1) + eps)) if each.shape[1] > 1 else None for each in samples]
    known = [style for style in styles if style is not None]
    mean_spread, std_spread = (torch.sqrt(torch.stack(each).var(0) + eps) for each in zip(*known, strict=True))
    out = []
    for k, (sample, style) in enumerate(zip(samples, styles, strict=True)):
        if style is None:
            out.append(sample)
            continue
        mean, std = style[0] + draws[0, k] * mean_spread, style[1] + draws[1, k] * std_spread
        out.append((sample - style[0][:, None]) / style[1][:, None] * std[:, None] + mean[:, None])
    return out


def drawn(case: Case):
    return torch.randn(2, case.batch_size, case.channels, generator=case.generator(4)).double()


def with_styles(case, masked):
    counts = case.mask().flatten(1).sum(1) if masked and case.spatial > 1 else torch.full((case.batch_size,), 2)
    return case.spatial > 1 and int((counts > 1).sum()) > 1


@given(cases(least_batch=2, dtypes=(torch.float64, torch.float32)), st.booleans())
def test_output_and_gradient_equal_the_naive_loop(case, masked):
    if not with_styles(case, masked):
        return
    x, dy, draws = case.tensor().requires_grad_(), case.tensor(5), drawn(case)
    mask = case.mask() if masked else None
    y = functional.distribution_uncertainty(x, 1.0, channel_dim=case.channel_dim, mask=mask, draws=draws)
    assert y.dtype == x.dtype
    exact = x.detach().double().requires_grad_()
    expected = reference.unfold(naive(reference.fold(exact, case.channel_dim, mask), draws), x, case.channel_dim, mask)
    steep = (expected / x.double()).abs().nan_to_num(0, 0, 0).max().item()  # samples with a small deviation
    assert_close(y, expected, magnitude=x.abs().max().item() * max(steep, 1))
    (gradient,), (wanted,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, exact, dy.double())
    assert_close(gradient, wanted, "gradient", magnitude=20 * max(steep, 1) * dy.abs().max().item())


def test_gradcheck():
    torch.manual_seed(0)
    x, draws = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True), torch.randn(2, 4, 2).double()

    def run(x):
        return functional.distribution_uncertainty(x, 1.0, draws=draws)

    assert torch.autograd.gradcheck(run, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, x)
    assert torch.autograd.gradcheck(
        lambda x: functional.distribution_uncertainty(x, 1.0, draws=draws, mask=torch.arange(3) < torch.tensor(
            [[3], [2], [1], [3]])), x
    )  # fmt: skip


def test_styles_are_drawn_with_the_deviation_that_they_have_in_the_batch():
    """Of n shifts with variance Σ², the variance deviates by sqrt(2/n), since a variance of Σ is common to all."""
    torch.manual_seed(0)
    n, layer = 64, DistributionUncertainty(p=1.0)
    x = torch.randn(n, 50, 8, dtype=torch.float64) + torch.randn(n, 50, 1)
    y = layer(x)
    shift, spread = y.mean(2) - x.mean(2), x.mean(2).std(0)
    ratio = (shift / spread).square().mean()
    assert abs(ratio - 1) < 5 * (2 / shift.numel()) ** 0.5
    change = (y.std(2) - x.std(2)).abs() / x.std(2).std(0)
    assert change.max() < 8


def test_calls_have_noise_with_probability_p():
    layer, x, n = DistributionUncertainty(p=0.3), torch.randn(4, 2, 3), 2000
    torch.manual_seed(0)
    share = sum(layer(x) is not x for _ in range(n)) / n
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / n) ** 0.5
    assert layer.eval()(x) is x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_pass_draws_the_same(reentrant):
    results = []
    for saves in (False, True):
        layer = DistributionUncertainty(generator=torch.Generator().manual_seed(0))
        leaf = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        outputs = [checkpoint(layer, leaf, use_reentrant=reentrant) if saves else layer(leaf) for _ in range(4)]
        sum((k + 1) * y.pow(3).sum() for k, y in enumerate(outputs)).backward()
        results.append(leaf.grad)
    torch.testing.assert_close(*results)


def test_a_compiled_layer_is_one_graph_and_equals_the_eager_one():
    layer = DistributionUncertainty()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 3, 4, 4)
    for seed in range(6):  # with noise and without
        results = []
        for run in (layer, compiled):
            torch.manual_seed(seed)
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            y.pow(3).sum().backward()
            results.append((y, leaf.grad))
        torch.testing.assert_close(*results)


def test_what_is_refused():
    layer = DistributionUncertainty(p=1.0)
    with pytest.raises(
        ValueError, match=r"distribution_uncertainty got an input of shape \(4, 3\): a sample needs 2 pos"
    ):
        layer(torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"batch of 1 samples, of shape \(1, 3, 4\): distribution_uncertainty needs 2"):
        layer(torch.randn(1, 3, 4))
    mask = torch.tensor([[True, True], [True, False]])
    with pytest.raises(ValueError, match="batch of 1 samples with 2 valid positions or more"):
        layer(torch.randn(2, 3, 2), mask)
    with pytest.raises(ValueError, match=r"draws of shape \(2, 4\): must be \(2, B, C\) = \(2, 4, 3\)"):
        functional.distribution_uncertainty(torch.randn(4, 3, 2), draws=torch.randn(2, 4))
    for name, value in (("p", -0.1), ("noise_eps", 0), ("generator", 3)):
        with pytest.raises(ValueError, match=f"^{name}={value!r}: must be "):
            DistributionUncertainty(**{name: value})


def test_conversion():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    keys, x = list(model.state_dict()), torch.randn(4, 3, 8, 8)
    ghostnoise.convert(model, "dsu", after=nn.ReLU, channel_dim=1, p=1.0)
    assert type(model[2].ghost_noise) is DistributionUncertainty
    assert not torch.equal(model(x), model(x))
    assert list(model.state_dict()) == keys
    expected = model.eval()(x)
    assert torch.equal(ghostnoise.revert(model)(x), expected)
    with pytest.raises(ValueError, match="process_group='world': DistributionUncertainty has noise of each process"):
        ghostnoise.convert(model, "dsu", after=nn.ReLU, channel_dim=1, process_group="world")
