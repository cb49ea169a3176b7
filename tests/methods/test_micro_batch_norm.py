"""Batch norm over micro-batches: against a loop over all values of the pool, and its state."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ghostnoise
from ghostnoise import History, MicroBatchNorm1d, Moments, functional
from support import reference
from support.inputs import cases
from support.variants import Variant, assert_equals_naive, unbiased


def earlier(case):
    """Three values of each channel that float32 represents exactly: one for each of three samples."""
    return torch.randn(3, case.channels, generator=case.generator(13)).double()


def filled(case, size=3):
    history, mean = History(size), earlier(case)
    history.add(Moments(mean, torch.zeros_like(mean)))
    return {"history": history}


POOL = Variant(
    functional.micro_batch_norm, reference.micro_batch_norm, unbiased, filled,
    lambda case: {"stored": [sample[:, None] for sample in earlier(case)]},
)  # fmt: skip


@given(cases())
def test_output_gradients_and_running_statistics_equal_the_naive_loop(case):
    assert_equals_naive(POOL, case)


@given(cases(least_batch=3, dtypes=(torch.float64, torch.float32)))
def test_a_padded_batch_equals_the_samples_without_padding(case):
    mask = case.mask()
    if mask.sum() > 1:
        assert_equals_naive(POOL, case, mask)


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(1, 5), st.integers(2, 4)), min_size=1, max_size=6))
def test_a_sequence_of_micro_batches(size, batches):
    """The pool is the last `size` samples, with moments rounded to float32, whatever their numbers of positions."""
    generator, history, rows = torch.Generator().manual_seed(0), History(size), []
    for batch_size, spatial in batches:
        x = torch.randn(batch_size, 2, spatial, dtype=torch.float64, generator=generator) * 3 + 1
        own = [(sample.mean(1), sample.var(1, correction=0), spatial) for sample in x]
        pool = own + rows[-size:]
        total = sum(n for *_, n in pool)
        mean = sum(n / total * m for m, _, n in pool)
        var = sum(n / total * (v + (m - mean) ** 2) for m, v, n in pool)
        y = functional.micro_batch_norm(x, None, None, training=True, history=history)
        expected = (x - mean[:, None]) / torch.sqrt(var + 1e-5)[:, None]
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        rows += [(m.float().double(), v.float().double(), n) for m, v, n in own]


def test_gradcheck():
    torch.manual_seed(0)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mean = torch.randn(5, 2, dtype=torch.float64)

    def run(x, weight, bias):
        history = History(5)
        history.add(Moments(mean, torch.ones_like(mean), 3))
        return functional.micro_batch_norm(x, None, None, weight, bias, True, history=history)

    assert torch.autograd.gradcheck(run, (x, weight, bias))
    assert torch.autograd.gradgradcheck(run, (x, weight, bias))


def test_the_last_micro_batch_has_the_statistics_of_the_whole_batch():
    layer, x = MicroBatchNorm1d(3, history=24, affine=False).double(), torch.randn(32, 3, 5, dtype=torch.float64) + 2
    last = [layer(part) for part in x.split(8)][-1]
    expected = functional.batch_norm(x, None, None, training=True)[24:]
    torch.testing.assert_close(last, expected, rtol=1e-6, atol=1e-6)
    plain = nn.BatchNorm1d(3, affine=False).double()
    for part in x.split(8):
        plain(part)
    torch.testing.assert_close(layer.running_var, plain.running_var)


def test_a_compiled_layer_equals_the_eager_one():
    results = []
    for compiles in (False, True):
        layer = MicroBatchNorm1d(3, history=6)
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiles else layer
        for seed in range(3):
            x = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            y = run(x)
            y.pow(3).sum().backward()
        results.append((y, x.grad, layer.running_var, layer.history.state()["mean"]))
    torch.testing.assert_close(*results)


def test_a_sample_that_is_not_finite_is_not_in_the_pool():
    layer, x = MicroBatchNorm1d(2, history=8), torch.randn(4, 2, 3)
    x[1, 0, 0] = torch.nan
    layer(x)
    assert layer(torch.randn(2, 2, 3)).isfinite().all()
    assert layer.history.state()["counts"][-6:].tolist() == [3, 0, 3, 3, 3, 3]


def test_functions_take_a_history_and_layers_a_number():
    with pytest.raises(ValueError, match=r"history=8: a function takes a ghostnoise.History"):
        functional.micro_batch_norm(torch.randn(4, 2), None, None, training=True, history=8)
    assert "history=8" in repr(MicroBatchNorm1d(3, history=8))


def test_conversion():
    model = ghostnoise.convert(nn.Sequential(nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3)), "mbn", history=6)
    assert ghostnoise.histories(model) == {"1": model[1].history}
    with ghostnoise.Meter(model, ghost_size=2) as meter:
        model(torch.randn(8, 1, 5))
    assert "bn" in meter.result()["1"].gaps
    assert type(ghostnoise.revert(model)[1]) is nn.BatchNorm1d
    assert not hasattr(model[1], "history")
