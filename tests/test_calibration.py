"""`calibrate`: statistics over all values, EvalNorm's weight, and nothing changed by a failure."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ghostnoise
from ghostnoise.calibration import ALPHAS
from ghostnoise.engine import general
from ghostnoise.methods import registry
from support.calibrating import METHODS, fails
from support.ranks import launch, own_rows, values


def network(seed=0, channels=3):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(channels, 4, 3),
        nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5),
    ).double()  # fmt: skip


def built(seed=0):
    model = network(seed)
    model(values(2, 2, 6, 6))
    return model


def data(sizes, seed=1):
    return [values(size, 2, 6, 6, seed=seed + at) for at, size in enumerate(sizes)]


def by_hand(model, batches):
    """Return the mean and variance of what reaches the two batch norms, with batch statistics and without dropout."""
    first, second = [], []
    for x in batches:
        x = model[0](x)
        first.append(x)
        x = F.relu(F.batch_norm(x, None, None, model[1].weight, model[1].bias, training=True))
        second.append(model[4](x))
    joined = [torch.cat(parts) for parts in (first, second)]
    return [(x.mean((0, 2, 3)), x.var((0, 2, 3))) for x in joined]


@given(st.lists(st.integers(2, 9), min_size=1, max_size=4), st.booleans())
def test_statistics_are_those_of_all_values(sizes, training):
    model, batches = built().train(training), data(sizes)
    tracked = [model[at].num_batches_tracked.clone() for at in (1, 5)]
    expected = by_hand(model, batches)
    torch.manual_seed(3)
    random = torch.random.get_rng_state()
    found = ghostnoise.calibrate(model, batches)
    assert found == (("1", "5"), len(sizes), None, None)
    for at, (mean, var) in zip((1, 5), expected, strict=True):
        torch.testing.assert_close(model[at].running_mean, mean, rtol=0, atol=1e-10)
        torch.testing.assert_close(model[at].running_var, var, rtol=1e-10, atol=0)
    assert [model[at].num_batches_tracked for at in (1, 5)] == tracked
    assert all(module.training == training for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), random)  # dropout is off
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gets_the_same_statistics_without_noise(method):
    """Normalization over the whole batch is all that is left; that of XBN excludes the sample itself."""
    batches, plain = data([8, 6]), built()
    model = ghostnoise.convert(copy.deepcopy(plain), method, **METHODS[method])
    ghostnoise.calibrate(plain, batches)
    ghostnoise.calibrate(model, batches)
    last = 1 if method in ("xbn", "brn") else 2  # BRN corrects towards its running statistics
    for at in (1, 5)[:last]:
        torch.testing.assert_close(model[at].running_mean, plain[at].running_mean)
        torch.testing.assert_close(model[at].running_var, plain[at].running_var)
        assert getattr(model[at], "ghost_size", 4) == 4
        assert getattr(model[at], "alpha", None) is None


class Foreign(nn.BatchNorm2d):
    """A batch norm of another library, with attributes that have the names of ours, and other meanings."""

    def __init__(self, channels):
        super().__init__(channels)
        self.alpha, self.ghost_size, self.channel_dim = nn.Parameter(torch.tensor(2.0)), 7, 3
        self.kept, self._sampling, self.history = "theirs", None, ["theirs"]

    def forward(self, x):
        assert self.ghost_size == 7
        return super().forward(self.alpha * x)


@pytest.mark.parametrize("noise", [False, True])
def test_attributes_of_other_libraries_are_not_touched(noise):
    """Layers are recognized by what they are: a batch norm of torch has its channels in dimension 1, for example."""
    torch.manual_seed(0)
    model = nn.Sequential(Foreign(2), ghostnoise.EvalNorm2d(2, ghost_size=4), Foreign(2)).double()
    theirs = [dict(vars(model[at]), alpha=model[at].alpha) for at in (0, 2)]
    x = values(8, 2, 6, 5)
    ghostnoise.calibrate(model, [x], noise=noise, keep=3)
    for before, at in zip(theirs, (0, 2), strict=True):
        assert vars(model[at]) | {"alpha": model[at].alpha} == before
    torch.testing.assert_close(model[0].running_mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(model[0].running_var, x.var((0, 2, 3)))
    assert (model[2].running_var > 0.5).all()
    assert ghostnoise.histories(model) == {}
    assert [row.ghost_size for row in ghostnoise.summary(model)] == [4]


def test_a_ghost_size_of_another_library_does_not_turn_on_sampling():
    model = ghostnoise.convert(nn.Sequential(nn.BatchNorm1d(3)), "bn")
    model[0].ghost_size = 7
    ghostnoise.calibrate(model, [values(8, 3).float()], keep=4)
    assert model[0].ghost_size == 7
    assert ghostnoise.summary(model)[0].ghost_size is None
    with pytest.raises(ValueError, match="without a ghost size only"), ghostnoise.sampling(model):
        pytest.fail("entered")


def test_the_methods_above_are_all_of_them():
    assert set(METHODS) == {name for name, spec in registry.specs().items() if spec.norm is not None}


def test_noise_reaches_the_statistics_behind_it():
    """Var[(1/k)·(x̂ - m)] is larger than that of x̂, by about the variance of the shift: 1/N or more."""
    batches = [torch.randn(64, 8, generator=torch.Generator().manual_seed(at)) for at in range(40)]
    model = nn.Sequential(ghostnoise.BatchNorm1d(8), ghostnoise.GhostNoise(2), nn.BatchNorm1d(8))
    torch.manual_seed(0)
    ghostnoise.calibrate(model, batches, noise=True)
    noisy = model[2].running_var.clone()
    ghostnoise.calibrate(model, batches)
    torch.testing.assert_close(model[2].running_var, torch.full((8,), 1.0), rtol=0, atol=1e-3)
    assert (noisy > 1.4).all()


def test_calibrated_statistics_normalize_the_data_exactly():
    """After one batch norm on the data itself, the outputs in eval mode have mean 0 and variance 1."""
    model, batches = nn.Sequential(nn.BatchNorm1d(3, eps=1e-15)), [values(7, 3, 5), values(4, 3, 5, seed=2) * 3]
    model.double()
    ghostnoise.calibrate(model, batches)
    y = model.eval()(torch.cat(batches))
    torch.testing.assert_close(y.mean((0, 2)), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(y.var((0, 2)), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12)


def test_large_means_and_low_precision_lose_nothing():
    x = 1000 + torch.randn(512, 4, generator=torch.Generator().manual_seed(0)) / 8
    model = nn.BatchNorm1d(4)
    ghostnoise.calibrate(model, x.split(64))
    torch.testing.assert_close(model.running_var, x.double().var(0).float(), rtol=1e-5, atol=0)
    half = nn.BatchNorm1d(4)
    ghostnoise.calibrate(half, (x - 1000).bfloat16().split(64))
    expected = (x - 1000).bfloat16().double().var(0).float()
    torch.testing.assert_close(half.running_var, expected, rtol=1e-5, atol=0)


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.unused = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, *, signal, gain=1.0):
        return self.norm(signal * gain)


def test_batches_of_every_kind():
    x = torch.randn(9, 3)
    for batch in (x, (x, 1), [x, "label"], {"input": x}):
        model = nn.BatchNorm1d(3)
        ghostnoise.calibrate(model, [batch])
        torch.testing.assert_close(model.running_mean, x.mean(0))
    model = Keywords()
    found = ghostnoise.calibrate(model, [{"signal": x, "gain": 2.0}])
    assert found.layers == ("norm",)  # no batch reached the other one, which stays as it was
    torch.testing.assert_close(model.norm.running_mean, 2 * x.mean(0))
    assert torch.equal(model.unused.running_mean, torch.zeros(3))
    ghostnoise.calibrate(model, ["a", "b"], forward=lambda model, batch: model(signal=x + ord(batch)))
    torch.testing.assert_close(model.norm.running_mean, x.mean(0) + 97.5)


def test_a_compiled_model_is_measured():
    model, batches = built(), data([4, 6])
    expected = by_hand(model, batches)
    compiled = torch.compile(model, backend="eager")
    compiled(batches[0])
    found = ghostnoise.calibrate(compiled, batches)
    assert len(found.layers) == 2
    torch.testing.assert_close(model[5].running_mean, expected[1][0], rtol=0, atol=1e-10)


# EvalNorm's weight


def mixing_model():
    return nn.Sequential(ghostnoise.EvalNorm1d(3, ghost_size=8), nn.Flatten(), nn.Linear(12, 2)).double()


def test_the_weight_with_the_least_loss_is_set():
    torch.manual_seed(0)
    model, batches = mixing_model(), [values(32, 3, 4)]
    validation = [(values(size, 3, 4, seed=size), torch.arange(size) % 2) for size in (5, 11)]
    found = ghostnoise.calibrate(model, iter(batches), validation=iter(validation))
    assert set(found.losses) == set(ALPHAS)
    reference = copy.deepcopy(model).eval()
    for alpha in ALPHAS:
        reference[0].alpha = alpha
        losses = [F.cross_entropy(reference(x), y, reduction="sum").item() for x, y in validation]
        assert math.isclose(found.losses[alpha], sum(losses) / 16, rel_tol=1e-12)
    assert found.alpha == min(found.losses, key=found.losses.get) == model[0].alpha
    assert model[0].training


def test_a_mixture_is_chosen_where_samples_differ():
    """Samples with their own offset, which says nothing about the class: a large weight removes it."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(256) % 2
    x = torch.randn(256, 1, 16, generator=generator, dtype=torch.float64)
    x[:, :, 0] += 6 * labels[:, None]
    x += 20 * torch.randn(256, 1, 1, generator=generator, dtype=torch.float64)
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Flatten(), nn.Linear(16, 2, bias=False)).double()
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].weight[1, 0], model[2].weight[1, 1] = 1.0, -0.1
    model = ghostnoise.convert(model, "en", ghost_size=None, alpha=0.0)
    found = ghostnoise.calibrate(model, [x], validation=[(x, labels)])
    assert found.alpha > 0.1
    assert found.losses[found.alpha] < found.losses[0.0]


# Bad input: an error, and nothing is changed.


def broken(batches):
    yield from batches
    raise OSError("disk error")


def test_a_failure_changes_nothing():
    model = ghostnoise.convert(built(), "gni", ghost_size=4)
    good = data([4, 4])
    fails(model, [], "got 0 batches, and none reached a batch norm: needs one batch or more")
    fails(model, broken(good), "disk error", OSError)
    fails(model, broken(good), "disk error", OSError, noise=True)
    bad = good[1].clone()
    bad[0, 0, 0, 0] = math.nan
    fails(model, [good[0], bad], r"batch 1 \(counted from 0\) reaches '1' \(.*\) with values that are not finite")
    fails(model, ["text"], "batch of type str: must be a tensor.*give forward=")
    fails(model, 5, "loader of type int: must be an iterable of batches")
    fails(model, good[0], r"loader of type Tensor: must be an iterable of batches, such as \[batch\]")
    fails(model, good, "validation of type int: must be an iterable", validation=5)
    fails(model, good, "noise='yes': must be True or False", noise="yes")
    fails(model, good, "has no EvalNorm layer whose alpha could be chosen: convert it first", validation=[])
    assert [model[at].ghost_size for at in (1, 5)] == [4, 4]


def test_a_failure_in_the_validation_changes_nothing():
    model, batches = mixing_model(), [values(8, 3, 4)]
    pair = (values(4, 3, 4), torch.arange(4) % 2)
    fails(model, batches, "validation has no batches", validation=[])
    fails(model, batches, r"batch of type Tensor: must be \(input, target\)", validation=[pair[0]])
    fails(model, batches, "alphas is empty", validation=[pair], alphas=())
    fails(model, batches, "alphas=2", validation=[pair], alphas=(0, 2))

    def infinite(output, target):
        return output.sum() * math.inf

    fails(model, batches, "alpha=0 is not finite: leave this weight out", validation=[pair], loss=infinite)
    fails(model, batches, "disk error", OSError, validation=broken([pair]))
    assert model[0].alpha is None


def test_a_model_without_running_statistics_is_refused():
    fails(nn.Linear(2, 2), [], "this Linear has no batch norm: there are no running statistics to calibrate")
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))
    fails(model, [], "has batch norms with track_running_stats=False only")
    fails(nn.BatchNorm1d(2), [values(1, 2)], "Expected more than 1 value per channel")
    with pytest.raises(ValueError, match=r"model must be an nn\.Module"):
        ghostnoise.calibrate(lambda x: x, [])


# Ranks


def over_ranks(rank, count):
    model, whole = built(), values(12, 2, 6, 6)
    for split in ((6, 6), (9, 3), (0, 12)):
        rows = whole[own_rows(rank, split)]
        batches = [part for part in rows.split(3) if len(part)]
        shared = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        found = ghostnoise.calibrate(shared, batches, process_group="world")
        alone = copy.deepcopy(model)
        ghostnoise.calibrate(alone, whole.split(3))
        assert found.batches == 4
        for at in (1, 5):
            torch.testing.assert_close(shared.module[at].running_mean, alone[at].running_mean, rtol=0, atol=1e-12)
            torch.testing.assert_close(shared.module[at].running_var, alone[at].running_var, rtol=1e-12, atol=0)
    mixed = ghostnoise.convert(copy.deepcopy(model), "en", ghost_size=4)
    pairs = [(part, torch.arange(len(part)) % 5) for part in whole[own_rows(rank, (9, 3))].split(3)]
    batches = whole[own_rows(rank, (9, 3))].split(3)
    found = ghostnoise.calibrate(mixed, batches, validation=pairs, process_group="world")
    alone = ghostnoise.convert(copy.deepcopy(model), "en", ghost_size=4)
    pairs = [(part, torch.arange(len(part)) % 5) for part in whole.split(3)]
    expected = ghostnoise.calibrate(alone, whole.split(3), validation=pairs)
    assert found.alpha == expected.alpha
    for alpha in ALPHAS:
        assert math.isclose(found.losses[alpha], expected.losses[alpha], rel_tol=1e-10)
    # All ranks keep the same samples, out of those of all ranks.
    ghostnoise.calibrate(mixed, batches, keep=10, process_group="world")
    kept, (means, _, _) = mixed[1].kept.mean, general.measure(mixed[0](whole))
    found = (kept[:, None] - means).abs().sum(2).argmin(1)
    assert len(set(found.tolist())) == 10
    torch.testing.assert_close(kept, means[found], rtol=0, atol=1e-12)
    tables = [torch.empty_like(kept) for _ in range(count)]
    torch.distributed.all_gather(tables, kept)
    assert torch.equal(*tables)
    # An error on one rank is an error on all, and nothing is changed.
    loader = whole.split(3) if rank == 0 else broken(whole.split(3))
    kind, match = (RuntimeError, "rank 1 failed; nothing was changed") if rank == 0 else (OSError, "disk error")
    fails(model, loader, match, kind, process_group="world")


def test_ranks_get_the_statistics_of_all_data(tmp_path):
    launch(2, over_ranks, tmp_path)
