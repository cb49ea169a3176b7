"""MixStyle against a loop in float64, and what its layer does in a network."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostnoise
from ghostnoise import MixStyle, functional
from support import reference
from support.closeness import assert_close
from support.inputs import ALL_DTYPES, cases


def naive(samples, weights, partners, eps=1e-6):
    """As the authors compute it, with unbiased variances; mean and standard deviation are constants."""
    styles = [(each.mean(1), torch.sqrt(each.var(1) + eps)) if each.shape[1] > 1 else None for each in samples]
    out = []
    for sample, own, partner, style in zip(samples, weights.tolist(), partners.tolist(), styles, strict=True):
        other = styles[partner]
        if style is None or other is None:
            out.append(sample)
            continue
        mean, std = (own * one.detach() + (1 - own) * two.detach() for one, two in zip(style, other, strict=True))
        hat = (sample - style[0].detach()[:, None]) / style[1].detach()[:, None]
        out.append(hat * std[:, None] + mean[:, None])
    return out


def drawn(case):
    return {"indices": case.permutation(), "weights": torch.rand(case.batch_size, generator=case.generator(4)).double()}


spatial = cases(dtypes=ALL_DTYPES).filter(lambda case: case.spatial > 1)


@given(spatial, st.booleans())
def test_output_and_gradient_equal_the_naive_loop(case, masked):
    x, dy, draws = case.tensor().requires_grad_(), case.tensor(5), drawn(case)
    mask = case.mask() if masked else None
    y = functional.mix_style(x, 1.0, channel_dim=case.channel_dim, mask=mask, **draws)
    assert y.dtype == x.dtype
    assert masked or y.stride() == torch.empty_like(x).stride()
    exact = x.detach().double().requires_grad_()
    samples = naive(reference.fold(exact, case.channel_dim, mask), draws["weights"], draws["indices"])
    expected = reference.unfold(samples, x, case.channel_dim, mask)
    assert_close(y, expected, magnitude=x.abs().max().item())
    (gradient,), (wanted,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, exact, dy.double())
    assert_close(gradient, wanted, "gradient")


def test_the_gradient_is_that_of_a_constant_scale():
    """gradcheck would move the constants, so the scale is compared with finite differences of the loop's own."""
    torch.manual_seed(0)
    x, order, weights = torch.randn(4, 2, 6, dtype=torch.float64), torch.tensor([1, 0, 3, 2]), torch.rand(4).double()
    leaf = x.clone().requires_grad_()
    y = functional.mix_style(leaf, 1.0, indices=order, weights=weights)
    std = torch.sqrt(x.var(2) + 1e-6)
    scale = (weights[:, None] * std + (1 - weights[:, None]) * std[order]) / std
    (gradient,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    torch.testing.assert_close(gradient, scale[..., None].expand_as(x))
    assert not gradient.requires_grad
    _, tangent = torch.func.jvp(
        lambda x: functional.mix_style(x, 1.0, indices=order, weights=weights), (x,), (torch.ones_like(x),)
    )
    torch.testing.assert_close(tangent, gradient)


def test_ends_of_the_weight():
    x, order = torch.randn(6, 3, 8, dtype=torch.float64) * 2 + 1, torch.tensor([3, 2, 5, 0, 1, 4])
    same = functional.mix_style(x, 1.0, indices=order, weights=torch.ones(6))
    torch.testing.assert_close(same, x)
    swapped = functional.mix_style(x, 1.0, indices=order, weights=torch.zeros(6))
    torch.testing.assert_close(swapped.mean(2), x.mean(2)[order])
    torch.testing.assert_close(swapped.std(2), x.std(2)[order], rtol=1e-5, atol=0)


def test_calls_have_noise_with_probability_p():
    layer, x, n = MixStyle(p=0.3), torch.randn(4, 2, 3), 2000
    torch.manual_seed(0)
    share = sum(layer(x) is not x for _ in range(n)) / n
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / n) ** 0.5
    assert all(MixStyle(p=0.0)(x) is x for _ in range(5))
    assert layer.eval()(x) is x


@pytest.mark.parametrize("concentration", [0.1, 2.0])
def test_weights_are_from_the_beta_distribution(concentration):
    """Its mean is 1/2, its variance 1 / (4 (2α + 1)); the fourth central moment is at most 1/16."""
    torch.manual_seed(0)
    n, x = 20_000, torch.tensor([[[0.0, 1.0]], [[1.0, 2.0]]], dtype=torch.float64).repeat(10_000, 1, 1)
    order = torch.arange(n).view(-1, 2).flip(1).flatten()
    y = functional.mix_style(x, 1.0, concentration, indices=order)
    share = (x - y).mean((1, 2)).abs()  # means of partners differ by 1
    variance = 1 / (4 * (2 * concentration + 1))
    assert abs(share.mean() - 0.5) < 5 * (variance / n) ** 0.5
    assert abs((share - 0.5).square().mean() - variance) < 5 * (1 / 16 / n) ** 0.5


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_pass_draws_the_same(reentrant):
    results = []
    for saves in (False, True):
        layer = MixStyle(generator=torch.Generator().manual_seed(0))
        leaf = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        outputs = [checkpoint(layer, leaf, use_reentrant=reentrant) if saves else layer(leaf) for _ in range(4)]
        sum((k + 1) * y.pow(3).sum() for k, y in enumerate(outputs)).backward()
        results.append(leaf.grad)
    torch.testing.assert_close(*results)


def test_a_compiled_layer_is_one_graph_and_equals_the_eager_one():
    layer = MixStyle()
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


def test_samples_with_a_single_valid_position_stay():
    x = torch.randn(4, 2, 3)
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False], [False, False, False]])
    order = torch.tensor([2, 0, 0, 1])
    y = functional.mix_style(x, 1.0, indices=torch.tensor([2, 3, 0, 1]), weights=torch.zeros(4), mask=mask)
    assert torch.equal(y[1, :, 0], x[1, :, 0])
    assert not torch.equal(y[0], x[0])
    assert not y.movedim(1, 2)[~mask].any()
    with pytest.raises(ValueError, match="indices without sample 3"):
        functional.mix_style(x, indices=order)


def test_what_is_refused():
    with pytest.raises(
        ValueError, match=r"mix_style got an input of shape \(4, 3\): a sample needs 2 positions or more"
    ):
        MixStyle(p=1.0)(torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"weights of shape \(3,\): must be \(B,\) = \(4,\)"):
        functional.mix_style(torch.randn(4, 2, 3), weights=torch.rand(3))
    for name, value in (("p", 1.5), ("p", None), ("concentration", 0), ("noise_eps", 0), ("generator", 3)):
        with pytest.raises(ValueError, match=f"^{name}={value!r}: must be "):
            MixStyle(**{name: value})


def test_insertion_after_stages_and_revert():
    stages = {"layer1": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "layer2": nn.Conv2d(4, 4, 3)}
    model = nn.Sequential()
    for name, stage in stages.items():
        model.add_module(name, stage)
    keys = list(model.state_dict())
    ghostnoise.convert(model, "mixstyle", where=lambda name, module: name.startswith("layer"), p=1.0)
    assert [row[0] for row in ghostnoise.summary(model)] == ["layer1", "layer2"]
    assert {row.method for row in ghostnoise.summary(model)} == {"mixstyle"}
    assert type(model.norm) is nn.BatchNorm2d
    x = torch.randn(4, 3, 8, 8)
    assert not torch.equal(model(x), model(x))
    assert list(model.state_dict()) == keys
    with ghostnoise.Meter(model, ghost_size=2) as meter:
        model(x)
    assert list(meter.result()) == ["norm"]
    expected = model.eval()(x)
    ghostnoise.revert(model)
    assert torch.equal(model(x), expected)
    assert len(ghostnoise.summary(model)) == 0


def test_conversions_that_are_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match="'mixstyle' without after=, before= or where=: it replaces no batch norm"):
        ghostnoise.convert(model, "mixstyle")
    with pytest.raises(ValueError, match="ghost_size=4: 'mixstyle' has no ghost batches; leave it out"):
        ghostnoise.convert(model, "mixstyle", 4, after=nn.Conv2d)
    with pytest.raises(ValueError, match="process_group='world': MixStyle has noise of each process alone"):
        ghostnoise.convert(model, "mixstyle", after=nn.Conv2d, process_group="world")
