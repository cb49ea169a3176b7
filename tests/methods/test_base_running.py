"""The running statistics of all batch norms."""

import pytest
import torch
from hypothesis import given
from torch import nn

from ghostnoise import functional
from ghostnoise.methods.base import update_running
from ghostnoise.tables import Moments
from support import families, reference
from support.inputs import cases

every_family = pytest.mark.parametrize("family", families.FAMILIES)


def stepped(function, case, momentum=0.1, **options):
    mean, var = case.vector(3), case.vector(4).square()
    before = mean.clone(), var.clone()
    function(case.tensor(), mean, var, training=True, momentum=momentum, channel_dim=case.channel_dim, **options)
    return before, (mean, var)


def moved(before, towards, momentum=0.1):
    return (1 - momentum) * before + momentum * towards


@given(cases())
def test_batch_norm_keeps_the_unbiased_variance(case):
    x = reference.fold(case.tensor(), case.channel_dim)
    batch_mean, batch_var = reference.statistics(x)
    count = case.batch_size * case.spatial
    (mean, var), after = stepped(functional.batch_norm, case, 0.3)
    torch.testing.assert_close(after[0], moved(mean, batch_mean, 0.3))
    torch.testing.assert_close(after[1], moved(var, batch_var * count / (count - 1), 0.3))


@given(cases())
def test_ghost_batch_norm_keeps_the_average_of_the_ghost_variances(case):
    x = reference.fold(case.tensor(), case.channel_dim)
    members = [reference.ghost_batch_of(k, case.batch_size, case.ghost_size) for k in range(case.batch_size)]
    average = torch.stack([reference.statistics(x[each])[1] for each in members]).mean(0)  # weighted by samples
    (mean, var), after = stepped(functional.ghost_batch_norm, case, ghost_size=case.ghost_size)
    torch.testing.assert_close(after[0], moved(mean, reference.statistics(x)[0]))
    torch.testing.assert_close(after[1], moved(var, average))


@given(cases(least_batch=3, least_values=3, least_ghost=3))
def test_exclusive_batch_norm_keeps_the_biased_batch_variance(case):
    batch_mean, batch_var = reference.statistics(reference.fold(case.tensor(), case.channel_dim))
    (mean, var), after = stepped(functional.exclusive_batch_norm, case, ghost_size=case.ghost_size)
    torch.testing.assert_close(after[0], moved(mean, batch_mean))
    torch.testing.assert_close(after[1], moved(var, batch_var))


def test_cumulative_average_into_buffers_of_different_dtypes():
    mean, var, x = torch.zeros(3, dtype=torch.float32), torch.zeros(3, dtype=torch.float64), torch.randn(6, 3, 2)
    functional.batch_norm(x, mean, var, training=True, momentum=None, num_batches_tracked=torch.tensor(0))
    torch.testing.assert_close(mean, x.mean((0, 2)))
    torch.testing.assert_close(var, x.double().var((0, 2)))


def test_cumulative_average_counts_batches():
    layer = nn.BatchNorm1d(3, momentum=None, dtype=torch.float64)
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    count = torch.tensor(0)
    for _ in range(3):
        x = torch.randn(6, 3, 2, dtype=torch.float64)
        layer(x)
        functional.batch_norm(x, mean, var, training=True, momentum=None, num_batches_tracked=count)
    torch.testing.assert_close(mean, layer.running_mean)
    torch.testing.assert_close(var, layer.running_var)
    assert count.item() == 3
    with pytest.raises(ValueError, match="momentum=None: needs num_batches_tracked"):
        functional.batch_norm(x, mean, var, training=True, momentum=None)


@every_family
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_that_is_not_finite_leaves_the_buffers_alone(family, bad, momentum):
    function, options = families.function(family)
    mean, var, count = torch.randn(2), torch.rand(2), torch.tensor(5)
    before = mean.clone(), var.clone()
    x = torch.randn(9, 2, 4)
    x[4, 1, 2] = bad
    y = function(x, mean, var, training=True, momentum=momentum, num_batches_tracked=count, **options)
    assert not y[4, 1].isfinite().all()
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    assert count.item() == 5
    function(torch.randn(9, 2, 4), mean, var, training=True, num_batches_tracked=count, **options)
    assert count.item() == 6
    assert not torch.equal(mean, before[0])


def test_an_overflow_in_half_precision_leaves_the_buffers_alone():
    mean, var, count = torch.zeros(2), torch.ones(2), torch.tensor(0)
    x = torch.full((4, 2, 4), 6e4, dtype=torch.float16) * 2
    functional.batch_norm(x, mean, var, training=True, num_batches_tracked=count)
    assert mean.tolist() == [0, 0]
    assert count.item() == 0


def test_a_variance_too_large_for_the_buffer_leaves_it_alone():
    mean, var, count = torch.zeros(2).half(), torch.ones(2).half(), torch.tensor(0)
    x = torch.randn(8, 2, 4).half() * 3000
    functional.batch_norm(x, mean, var, training=True, num_batches_tracked=count)
    assert var.tolist() == [1, 1]
    assert mean.tolist() == [0, 0]
    assert count.item() == 0


@every_family
def test_buffers_are_updated_in_place(family):
    function, options = families.function(family)
    buffers = torch.zeros(3, dtype=torch.float16), torch.ones(3, dtype=torch.float64), torch.tensor(0)
    addresses = [buffer.data_ptr() for buffer in buffers]
    function(torch.randn(6, 3, 2), *buffers[:2], training=True, num_batches_tracked=buffers[2], **options)
    assert [buffer.data_ptr() for buffer in buffers] == addresses
    assert buffers[0].abs().sum() > 0
    assert buffers[2].item() == 1


def test_a_missing_buffer_is_left_out():
    x, mean = torch.randn(6, 3, 2), torch.zeros(3)
    functional.batch_norm(x, mean, None, training=True, momentum=1.0)
    torch.testing.assert_close(mean, x.mean((0, 2)))


def test_updates_do_not_track_gradients():
    mean = torch.zeros(3)
    functional.batch_norm(torch.randn(6, 3, requires_grad=True), mean, None, training=True)
    assert not mean.requires_grad


def test_a_full_step_replaces_the_buffer():
    mean = torch.full((2,), 7.0)
    update_running(mean, None, None, 1.0, Moments(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2)))
    assert mean.tolist() == [1.0, 2.0]
