"""What is special to ghost batch norm; its output and gradients are those of test_every_method.py."""

import pytest
import torch

from ghostnoise import GhostBatchNorm1d, GhostBatchNorm2d, functional
from support.families import example


def test_ghost_batches_of_a_single_value():
    with pytest.raises(ValueError, match=r"ghost_size=1 .*raise ghost_size"):
        functional.ghost_batch_norm(torch.randn(4, 3), None, None, training=True, ghost_size=1)
    functional.ghost_batch_norm(torch.randn(4, 3, 2), None, None, training=True, ghost_size=1)


def test_non_finite_samples_stay_in_their_ghost_batch():
    x = torch.randn(8, 3, 4)
    x[5, 1, 2] = float("inf")
    y = functional.ghost_batch_norm(x, None, None, training=True, ghost_size=4)
    assert y[:4].isfinite().all()
    assert y[4:, 1].isnan().all()
    assert y[4:, [0, 2]].isfinite().all()
    assert functional.batch_norm(x, None, None, training=True)[:, 1].isnan().all()


def test_an_uneven_batch_loses_no_sample():
    """17 samples in ghost batches of 8: 8 and 9."""
    x = torch.randn(17, 3, 4)
    y = GhostBatchNorm1d(3, ghost_size=8)(x)
    for rows in (slice(0, 8), slice(8, 17)):
        torch.testing.assert_close(y[rows].mean((0, 2)), torch.zeros(3), rtol=0, atol=1e-6)
        torch.testing.assert_close(y[rows].var((0, 2), correction=0), torch.ones(3), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("ghost_size", "shape"), [(4, (12, 3, 5)), (4, (14, 3)), (None, (6, 3, 2))])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("source", ["each", "each-scaled"])
def test_running_statistics_of_batch_norm_that_is_called_for_each_ghost_batch(ghost_size, shape, momentum, source):
    torch.manual_seed(0)
    layer = GhostBatchNorm1d(3, ghost_size=ghost_size, running_var_from=source, momentum=momentum, dtype=torch.float64)
    plain = torch.nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)
    for _ in range(2):
        x = torch.randn(shape, dtype=torch.float64) * 3 + 1
        starts = range(0, shape[0] - (ghost_size or shape[0]) + 1, ghost_size or shape[0])
        parts = [x[start:end] for start, end in zip(starts, [*starts[1:], shape[0]], strict=True)]
        plain.momentum = momentum / len(parts) if source == "each-scaled" and momentum else momentum
        expected = torch.cat([plain(part) for part in parts])
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


def test_without_running_statistics_there_is_none_to_update_for_each_ghost_batch():
    layer = GhostBatchNorm2d(3, ghost_size=3, running_var_from="each", track_running_stats=False)
    assert torch.equal(layer(example(2)), GhostBatchNorm2d(3, ghost_size=3)(example(2)))
    assert not dict(layer.named_buffers())
