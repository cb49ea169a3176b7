"""What is special to shuffled ghost batch norm; its output and gradients are those of test_every_method.py."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostnoise
from ghostnoise import ShuffledGhostBatchNorm1d, functional
from support import rank_cases
from support.ranks import launch


def shuffled(x, indices, ghost_size=4, **more):
    return functional.shuffled_ghost_batch_norm(
        x, None, None, training=True, ghost_size=ghost_size, indices=indices, **more
    )


def test_ghost_batches_are_those_of_the_shuffled_batch():
    x, order = torch.randn(11, 3, 5, dtype=torch.float64), torch.randperm(11)
    expected = torch.empty_like(x)
    expected[order] = functional.ghost_batch_norm(x[order], None, None, training=True, ghost_size=4)
    torch.testing.assert_close(shuffled(x, order), expected)


def test_sorted_samples_are_not_in_a_ghost_batch():
    """Of samples in order, each ghost batch of GBN has a single value; the probability that SGBN has one is below 1e-9.

    There are 8! · (8!)^8 orders with one value per ghost batch, of 64!.
    """
    x = torch.arange(8.0).repeat_interleave(8)[:, None]
    torch.manual_seed(0)
    y = ShuffledGhostBatchNorm1d(1, ghost_size=8, affine=False)(x)
    assert not functional.ghost_batch_norm(x, None, None, training=True, ghost_size=8).any()
    assert y.square().mean() > 0.5


def test_layers_and_steps_draw_anew_and_a_recomputed_pass_does_not():
    x = torch.randn(16, 3, 4, dtype=torch.float64)
    layer = ShuffledGhostBatchNorm1d(3, ghost_size=4, generator=torch.Generator().manual_seed(0)).double()
    assert not torch.equal(layer(x), layer(x))
    gradients = []
    for run in (lambda x: layer(x), lambda x: checkpoint(layer, x, use_reentrant=False)):
        layer.generator.manual_seed(1)
        leaf = x.clone().requires_grad_()
        run(leaf).pow(3).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_a_batch_that_is_one_ghost_batch_draws_nothing():
    x, before = torch.randn(7, 3, 2), torch.get_rng_state()
    layer = ShuffledGhostBatchNorm1d(3, ghost_size=4)
    with pytest.warns(UserWarning, match="with a single ghost batch it is plain batch norm"):
        y = layer(x)
    torch.testing.assert_close(y, functional.batch_norm(x, None, None, training=True))
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(layer.running_var, 0.9 + 0.1 * x.var((0, 2), correction=0))


def test_indices_that_are_no_permutation():
    x = torch.randn(8, 3, 2)
    with pytest.raises(ValueError, match=r"indices of shape \(7,\): must be \(B,\) = \(8,\), a permutation"):
        shuffled(x, torch.randperm(7))
    with pytest.raises(ValueError, match="indices without sample 7: must contain each of the 8 samples once"):
        shuffled(x, torch.zeros(8, dtype=torch.int64) + torch.arange(8).clamp(max=6))
    with pytest.raises(ValueError, match="indices with ghost_size=None"):
        shuffled(x, torch.randperm(8), ghost_size=None)


def test_a_ghost_batch_with_one_valid_position():
    mask = torch.zeros(8, 2, dtype=torch.bool)
    mask[:4], mask[4, 0] = True, True
    x = torch.randn(8, 3, 2)
    with pytest.raises(ValueError, match="a ghost batch with one valid position"):
        shuffled(x, torch.arange(8), mask=mask)
    assert shuffled(x, torch.tensor([0, 1, 4, 5, 2, 3, 6, 7]), mask=mask).isfinite().all()


def test_conversion():
    model = ghostnoise.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), "sgbn", ghost_size=4)
    assert type(model[1]) is ghostnoise.ShuffledGhostBatchNorm2d
    with ghostnoise.Meter(model, ghost_size=4) as meter:
        model(torch.randn(16, 3, 6, 6)).sum().backward()
    assert meter.result()["1"].gaps["gbn"].self_share == 0.25
    assert type(ghostnoise.revert(model)[1]) is nn.BatchNorm2d


def test_ranks(tmp_path):
    launch(2, rank_cases.permutations, tmp_path)
