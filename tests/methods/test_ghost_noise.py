"""Ghost noise, drawn and analytical: the draws, and the layers on their own. Outputs: test_every_method.py."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn

from ghostnoise import AnalyticalGhostNoise, GhostNoise, GhostNoiseBatchNorm2d, functional
from support.families import example

both = pytest.mark.parametrize("layer", [GhostNoise, AnalyticalGhostNoise])
noise_of_partition = functools.partial(functional.ghost_noise, ghost_size=4, draw="partition")


# The draws that a caller gives.


def test_indices_that_do_not_fit():
    x = torch.randn(6, 3)
    for indices, message in (
        (torch.zeros(6, 3, dtype=torch.int64), r"indices of shape \(6, 3\): must be \(B, N\) = \(6, 4\)"),
        (torch.tensor([[0, 1, 2, 6]]).expand(6, 4), r"indices from 0 to 6: must lie in \[0, B\) = \[0, 6\)"),
        (torch.zeros(6, 4), r"dtype torch.float32: must be int64 or int32"),
        ([[0, 1, 2, 3]], r"indices of type list: must be a torch.Tensor \(B, N\)"),
    ):
        with pytest.raises(ValueError, match=message):
            functional.ghost_noise(x, 4, indices=indices)
    int32 = torch.randint(6, (6, 4), dtype=torch.int32)
    expected = functional.ghost_noise(x, 4, indices=int32.long())
    assert torch.equal(functional.ghost_noise(x, 4, indices=int32), expected)


def test_permutations_that_do_not_fit():
    x = torch.randn(6, 3)
    for indices, message in (
        (torch.zeros(6, 4, dtype=torch.int64), r"of shape \(6, 4\): must be \(B,\) = \(6,\).*use torch.randperm"),
        (torch.tensor([0, 1, 2, 3, 4, 4]), "indices without sample 5: must contain each of the 6 samples once"),
        (torch.zeros(6), r"dtype torch.float32: must be int64 or int32"),
        ([0, 1, 2, 3, 4, 5], r"indices of type list: must be a torch.Tensor \(B,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            noise_of_partition(x, indices=indices)
    order = torch.randperm(6)
    assert torch.equal(noise_of_partition(x, indices=order.int()), noise_of_partition(x, indices=order))


def test_draws_of_a_law_that_do_not_fit():
    with pytest.raises(ValueError, match=r"draws.normal of shape \(2, 3\): must be \(B, C\) = \(6, 3\)"):
        functional.analytical_ghost_noise(torch.randn(6, 3), 4, draws=[torch.zeros(2, 3)] * 3)


def test_indices_may_be_used_again_before_backward():
    x, indices = torch.randn(6, 3, requires_grad=True), torch.randint(6, (6, 4))
    y = functional.ghost_noise_batch_norm(x, None, None, training=True, ghost_size=4, indices=indices)
    (wanted,) = torch.autograd.grad(y.cos().sum(), x, retain_graph=True)
    indices.zero_()
    (gradient,) = torch.autograd.grad(y.cos().sum(), x)
    assert torch.equal(gradient, wanted)


@pytest.mark.parametrize(
    ("function", "drawn"),
    [(functional.ghost_noise, "indices"), (functional.analytical_ghost_noise, "draws"),
     (functools.partial(functional.ghost_noise_batch_norm, running_mean=None, running_var=None, training=True),
      "indices")],
)  # fmt: skip
def test_draws_without_ghost_batches_are_refused(function, drawn):
    with pytest.raises(ValueError, match=f"{drawn} with ghost_size=None: .*give a ghost_size"):
        function(torch.randn(6, 3), ghost_size=None, **{drawn: torch.zeros(6, 4, dtype=torch.int64)})


# A partition of the shuffled batch.


def ghost_batches(batch_size, ghost_size):
    """Return how often each sample (column) is in the ghost batch of each position (row), in shares of the ghost batch.

    With the unit vectors as samples, the mean of a ghost batch is the share that each sample has in it.
    """
    x = torch.eye(batch_size, dtype=torch.float64)
    return x - functional.ghost_noise(x, ghost_size, components="shift", draw="partition") + 1 / batch_size


@pytest.mark.parametrize(("batch_size", "ghost_size", "sizes"), [(8, 4, [4, 4]), (11, 3, [3, 3, 5]), (5, 1, [1] * 5)])
def test_a_partition_draws_every_sample_once(batch_size, ghost_size, sizes):
    torch.manual_seed(0)
    shares = [ghost_batches(batch_size, ghost_size) for _ in range(20)]
    for share in shares:
        starts = torch.tensor([0, *sizes]).cumsum(0)[:-1]
        rows = share[starts] * torch.tensor(sizes)[:, None]  # a row for each ghost batch
        torch.testing.assert_close(rows.sum(0), torch.ones(batch_size, dtype=torch.float64))
        torch.testing.assert_close(rows, rows.round(), rtol=0, atol=1e-12)
        torch.testing.assert_close(rows.sum(1), torch.tensor(sizes, dtype=torch.float64))
        torch.testing.assert_close(share, share[starts].repeat_interleave(torch.tensor(sizes), 0))
    assert len({tuple(share.flatten().tolist()) for share in shares}) > 1  # a new permutation for every batch


def test_a_partition_is_uniform():
    """Each sample is in the ghost batch of a position with probability N/B."""
    torch.manual_seed(0)
    repeats, batch_size, ghost_size = 2000, 6, 2
    shares = sum(ghost_batches(batch_size, ghost_size) for _ in range(repeats)) / repeats
    p = ghost_size / batch_size
    assert (shares * ghost_size - p).abs().max() <= 5 * (p * (1 - p) / repeats) ** 0.5


@pytest.mark.parametrize("normalizer", ["batch", "exclusive"])
def test_gradcheck_of_a_partition_into_one_ghost_batch(normalizer):
    """The noise is then constant in x, so that gradcheck applies."""
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(x):
        options = {"ghost_size": 9, "draw": "partition", "normalizer": normalizer}
        return functional.ghost_noise_batch_norm(x, None, None, training=True, **options)

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


def test_the_permutation_is_drawn_inside_a_compiled_graph():
    layers = nn.Sequential(GhostNoise(4, draw="partition"), GhostNoiseBatchNorm2d(3, ghost_size=4, draw="partition"))
    x = torch.randn(11, 3, 4, 4, requires_grad=True)
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    assert torch.autograd.grad(y.square().sum(), x)[0].isfinite().all()
    assert not torch.allclose(y, compiled(x))


@pytest.mark.parametrize("group", ["world", "other"])
def test_a_partition_is_of_one_process(group):
    message = f"draw='partition' with process_group='{group}': must be None.*use draw='repl"
    for build in (GhostNoise, lambda size, **options: GhostNoiseBatchNorm2d(3, ghost_size=size, **options),
                  functools.partial(functional.ghost_noise, torch.randn(6, 3))):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            build(4, draw="partition", process_group=group)


# Noise without a variance.


def test_a_single_sample_gets_no_noise():
    x = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(functional.ghost_noise(x, 16), x, rtol=1e-6, atol=1e-6)


def test_ghost_batches_of_a_single_value_warn_once():
    x = torch.randn(6, 19)
    with pytest.warns(UserWarning, match=r"ghost_size=1 on samples of shape \(19,\).*raise ghost_size"):
        functional.ghost_noise(x, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        functional.ghost_noise(x, 1)
        functional.ghost_noise(torch.randn(6, 19, 2), 1)
        functional.ghost_noise(torch.randn(6, 23), 1, components="shift")
        functional.analytical_ghost_noise(torch.randn(6, 23), 1)
        functional.ghost_noise(torch.randn(1, 23), 1)  # one sample: no noise at all
    with pytest.warns(UserWarning, match="no variance"):
        functional.analytical_ghost_noise(torch.randn(6, 23), 1, dof="exact")


@pytest.mark.parametrize("ghost_size", [1, 3, 100])
def test_any_ghost_size_will_do(ghost_size):
    assert GhostNoiseBatchNorm2d(3, ghost_size=ghost_size)(example(2)).isfinite().all()


# The layers on their own.


@both
def test_a_layer_is_the_function_in_training_and_the_identity_otherwise(layer):
    function = functional.ghost_noise if layer is GhostNoise else functional.analytical_ghost_noise
    options = {"components": "scale", "channel_dim": -1}
    for shape in ((6, 3), (6, 3, 4), (6, 3, 4, 2), (6, 3, 4, 2, 2)):
        x = torch.randn(shape)
        expected = function(x, 4, 1e-2, **options, generator=torch.Generator().manual_seed(1))
        made = layer(4, 1e-2, **options, generator=torch.Generator().manual_seed(1))
        assert torch.equal(made(x), expected)
        assert made.eval()(x) is x
        before = torch.get_rng_state()
        assert layer(None)(x) is function(x, None) is x
        assert torch.equal(torch.get_rng_state(), before)


@both
def test_repr_pickle_deepcopy_and_no_state(layer):
    original = layer(4, components="scale", channel_dim=-1)
    assert list(original.state_dict()) == []
    assert "ghost_size=4, noise_eps=0.001" in repr(original)
    assert "components='scale', channel_dim=-1" in repr(original)
    x = torch.randn(6, 3)
    for twin in (pickle.loads(pickle.dumps(original)), copy.deepcopy(original)):
        assert repr(twin) == repr(original)
        torch.manual_seed(0)
        y = original(x)
        torch.manual_seed(0)
        assert torch.equal(twin(x), y)
