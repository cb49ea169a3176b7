"""Ghost noise with a history, against a loop that keeps all earlier samples and pools their raw values in float64."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import ghostnoise
from ghostnoise import GhostNoise, GhostNoiseBatchNorm1d, History, functional
from ghostnoise.tables import COMPONENTS
from support import rank_cases, reference
from support.levels import LEVELS, running
from support.ranks import launch, values

LAYERS = [partial(GhostNoise, 4, history=8), partial(GhostNoiseBatchNorm1d, 2, ghost_size=4, history=8)]
levels = pytest.mark.parametrize("level", LEVELS)


class Naive:
    """Earlier samples of shape (C, S) as they were, of which the last `size` count."""

    def __init__(self, size):
        self.size, self.samples = size, []

    def pool(self, x):
        return [*x, *self.samples[len(self.samples) - min(len(self.samples), self.size) :]]

    def add(self, x):
        self.samples.extend(x)


def together(samples):
    """Mean and biased variance of each channel over all values of samples, whose numbers of positions may differ."""
    every = torch.cat(list(samples), 1)
    return every.mean(1), every.var(1, correction=0)


def naive_noise(x, pool, rows, noise_eps=1e-3, components="both"):
    """Inject noise into (B, C, S): row b of `rows` lists the samples of the pool that were drawn for sample b."""
    mean, var = together(pool)
    out = []
    for sample, drawn in zip(x, rows, strict=True):
        ghost_mean, ghost_var = together([pool[index] for index in drawn])
        y = sample if components == "scale" else sample - (ghost_mean - mean)[:, None]
        scale = torch.sqrt((ghost_var + noise_eps) / (var + noise_eps))[:, None]
        out.append(y if components == "shift" else y / scale)
    return torch.stack(out)


def draws(batch_size, there, size, ghost_size=5):
    """Draw from the batch and from the samples that are there; returns indices for the library and for the loop.

    The library counts absent samples, which are the oldest ones.
    """
    rows = torch.randint(batch_size + there, (batch_size, ghost_size))
    return rows + (rows >= batch_size) * (size - there), rows.tolist()


@given(
    st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 4),
    st.sampled_from(COMPONENTS), st.sampled_from(["aten", "auto"]), st.integers(0, 2**31),
)  # fmt: skip
def test_ghost_noise_equals_the_loop(size, batches, channels, spatial, components, level, seed):
    torch.manual_seed(seed)
    history, naive = History(size), Naive(size)
    for batch_size in batches:
        x = torch.randn(batch_size, channels, spatial, dtype=torch.float64) + 2
        pool = naive.pool(x)
        indices, rows = draws(batch_size, len(pool) - batch_size, size)
        with running(level):
            y = functional.ghost_noise(x, 5, components=components, indices=indices, history=history)
        torch.testing.assert_close(y, naive_noise(x, pool, rows, components=components), rtol=1e-5, atol=1e-5)
        naive.add(x)


@levels
@pytest.mark.parametrize("normalizer", ["batch", "exclusive"])
@pytest.mark.parametrize("components", COMPONENTS)
def test_batch_norm_equals_the_loop(level, normalizer, components):
    """Stored samples are normalized with the statistics of the batch; the gradient is that of constants."""
    torch.manual_seed(0)
    history, naive, eps = History(6), Naive(6), 1e-5
    weight, bias = torch.rand(3, dtype=torch.float64) + 0.5, torch.randn(3, dtype=torch.float64)
    for batch_size in (3, 4, 5, 3):
        x = (torch.randn(batch_size, 3, 4, dtype=torch.float64) + 2).requires_grad_()
        there = len(naive.pool(x)) - batch_size
        indices, rows = draws(batch_size, there, 6)
        given = x.detach().clone().requires_grad_()
        hat = reference.batch_norm(given, eps=eps)
        if normalizer == "exclusive":
            hat = reference.exclusive_batch_norm(given, None, eps=eps)
        mean, var = together(x.detach())
        stored = [(one - mean[:, None]) / torch.sqrt(var + eps)[:, None] for one in naive.pool(x)[batch_size:]]
        with torch.no_grad():
            pool = [*hat.detach(), *stored]
            mean, var = together(pool)
            noise = [together([pool[index] for index in drawn]) for drawn in rows]
            m = torch.stack([ghost[0] for ghost in noise]) - mean
            k = torch.stack([torch.sqrt((var + 1e-3) / (ghost[1] + 1e-3)) for ghost in noise])
        wanted = hat if components == "scale" else hat - m[..., None]
        wanted = wanted if components == "shift" else wanted * k[..., None]
        wanted = wanted * weight[:, None] + bias[:, None]
        with running(level):
            y = functional.ghost_noise_batch_norm(
                x, None, None, weight, bias, True, ghost_size=5, components=components, normalizer=normalizer,
                indices=indices, history=history,
            )  # fmt: skip
        dy = torch.randn_like(y)
        y.backward(dy)
        wanted.backward(dy)
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.grad, given.grad, rtol=1e-5, atol=1e-5)
        naive.add(x.detach())


def test_samples_of_another_size_weigh_by_their_values():
    torch.manual_seed(0)
    history, naive = History(4), Naive(4)
    for spatial in (3, 7, 7, 2):
        x = torch.randn(2, 2, spatial, dtype=torch.float64)
        pool = naive.pool(x)
        indices, rows = draws(2, len(pool) - 2, 4)
        y = functional.ghost_noise(x, 5, indices=indices, history=history)
        torch.testing.assert_close(y, naive_noise(x, pool, rows), rtol=1e-5, atol=1e-5)
        naive.add(x)


@levels
def test_padding_is_not_a_part_of_the_history(level):
    """Samples of different lengths, one of them empty, which is not drawn later."""
    torch.manual_seed(0)
    history, naive = History(6), Naive(6)
    for lengths in ((3, 5), (2, 0, 4), (5, 1), (4, 4)):
        samples = [torch.randn(2, length, dtype=torch.float64) for length in lengths]
        mask = torch.arange(5) < torch.tensor(lengths)[:, None]
        x = torch.full((len(lengths), 2, 5), torch.nan, dtype=torch.float64)
        for row, sample in zip(x, samples, strict=True):
            row[:, : sample.shape[1]] = sample
        earlier = naive.samples[-6:]
        pool = [*samples, *earlier]
        there = [index for index, sample in enumerate(pool) if sample.shape[1]]
        rows = [[there[at] for at in torch.randint(len(there), (5,)).tolist()] for _ in lengths]
        absent = 6 - len(earlier)
        indices = torch.tensor([[at + absent * (at >= len(lengths)) for at in row] for row in rows])
        with running(level):
            y = functional.ghost_noise(x, 5, indices=indices, history=history, mask=mask)
        for at, sample in enumerate(samples):
            wanted = naive_noise(sample[None], pool, [rows[at]])[0]
            torch.testing.assert_close(y[at, :, : sample.shape[1]], wanted, rtol=1e-5, atol=1e-5)
        assert (y.movedim(1, 2)[~mask] == 0).all()
        naive.add(samples)
    drawn = [functional.ghost_noise(x, 5, history=history, mask=mask) for _ in range(20)]
    assert all(y.isfinite().all() for y in drawn)


@pytest.mark.parametrize("layer", [partial(GhostNoise, 4), partial(GhostNoiseBatchNorm1d, 3, ghost_size=4)])
def test_no_history_changes_nothing(layer):
    results = []
    for options in ({}, {"history": 0}):
        torch.manual_seed(0)
        x = torch.randn(6, 3, 5, requires_grad=True)
        module = layer(**options)
        y = module(x)
        y.square().sum().backward()
        results.append((y, x.grad, *module.state_dict().values()))
        assert ghostnoise.histories(module) == {}
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_pool_of_one_sample_gets_no_noise():
    layer, x = GhostNoise(8, history=16), torch.randn(1, 3, 10)
    torch.testing.assert_close(layer(x), x, rtol=1e-6, atol=1e-6)
    assert (layer(torch.randn(1, 3, 10)) != x).any()


def test_batch_norm_of_a_single_value_raises_and_stores_nothing():
    layer = GhostNoiseBatchNorm1d(3, ghost_size=4, history=8)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, 3))
    assert layer.history.state()["mean"].shape[0] == 0


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_the_noise_of_a_stationary_stream_is_that_of_a_large_batch(batch_size):
    """METHODS' identity 4 with the pool's moments: Var[m] = Var_b(mean_b) / N and E[s²] = σ² - Var_b(mean_b) / N.

    n shifts, of channels whose values are independent; the variance of a variance estimate is 2/n for normal values,
    and draws share a pool.
    """
    torch.manual_seed(0)
    size, ghost_size, n, channels = 512, 8, 6000, 6
    layer = GhostNoise(ghost_size, history=size, components="shift")
    for stream in torch.randn(size // batch_size, batch_size, channels, 4):
        layer(stream)
    batches = torch.randn(n // channels // batch_size, batch_size, channels, 4)
    shifts = torch.cat([x - layer(x) for x in batches])[:, :, 0]
    variance, expected = shifts.square().mean().item(), 1 / (4 * ghost_size)
    # The pool's own variance deviates by sqrt(2/size), and over n/size disjoint pools the deviation averages out.
    bound = 5 * expected * (2 / n + 2 / (n + size)) ** 0.5
    assert abs(variance - expected) < bound + expected / size
    assert abs(shifts.mean().item()) < 5 * (expected / n) ** 0.5 + 5 * (expected / (n + size)) ** 0.5


def test_eval_mode_reads_and_changes_nothing():
    layer = GhostNoise(4, history=8)
    layer(torch.randn(3, 2))
    before = layer.history.state()
    x = torch.randn(5, 2)
    assert layer.eval()(x) is x
    after = layer.history.state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_sample_that_is_not_finite_is_never_drawn():
    torch.manual_seed(0)
    layer, x = GhostNoise(16, history=4), torch.randn(4, 2, 3)
    x[1, 0, 0] = torch.nan
    layer(x)
    assert layer.history.state()["counts"].tolist() == [3, 0, 3, 3]
    assert all(layer(torch.randn(1, 2, 3)).isfinite().all() for _ in range(3))


# State.


def trained(layer, batches=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        layer(torch.randn(3, 2, 4, generator=generator))
    return layer


@pytest.mark.parametrize("make", LAYERS)
def test_the_state_dict_contains_a_history_only_if_asked(make):
    layer = trained(make())
    assert not any("history" in key for key in layer.state_dict())
    for history in ghostnoise.histories(layer).values():
        history.persistent = True
    saved = {key: value.clone() for key, value in layer.state_dict().items()}
    assert {"history_mean", "history_var", "history_counts"} <= saved.keys()
    other = make()
    other.history.persistent = True
    other.load_state_dict(saved)
    torch.manual_seed(7)
    wanted = [layer(x) for x in values(3, 5, 2, 4).float()]
    torch.manual_seed(7)
    assert all(torch.equal(other(x), y) for x, y in zip(values(3, 5, 2, 4).float(), wanted, strict=True))


def test_loading_reports_what_does_not_fit():
    layer = trained(GhostNoise(4, history=8))
    layer.history.persistent = True
    saved = layer.state_dict()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        GhostNoise(4, history=8).load_state_dict(saved)
    smaller = GhostNoise(4, history=4)
    smaller.history.persistent = True
    with pytest.raises(RuntimeError, match="must have 4 samples"):
        smaller.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="Missing key"):
        smaller.load_state_dict({})
    fresh = GhostNoise(4, history=4)
    fresh.history.persistent = True
    smaller.load_state_dict(fresh.state_dict())  # of a layer that has seen nothing
    assert smaller.history.state()["mean"].numel() == 0


def test_copies_are_independent():
    layer = trained(GhostNoise(4, history=8))
    other, before = copy.deepcopy(layer), layer.history.state()["mean"]
    trained(other, seed=1)
    assert torch.equal(layer.history.state()["mean"], before)


@pytest.mark.parametrize("noise", [False, True])
def test_calibration_leaves_a_history_as_it_was(noise):
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4))
    ghostnoise.convert(model, "gni", ghost_size=4, history=6)
    model(values(4, 2, 5).float())
    before = model[1].history.state()
    ghostnoise.calibrate(model, [values(3, 2, 5, seed=1).float()], noise=noise)
    after = model[1].history.state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_convert_gives_each_layer_a_history():
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 3, 3), nn.BatchNorm1d(3))
    ghostnoise.convert(model, "gni", ghost_size=4, history=16)
    assert {name: history.size for name, history in ghostnoise.histories(model).items()} == {"1": 16, "3": 16}
    for _ in range(4):
        model(torch.randn(2, 2, 12)).sum().backward()
    assert [history.state()["counts"].count_nonzero().item() for history in ghostnoise.histories(model).values()] == [
        8,
        8,
    ]
    ghostnoise.convert(model, "gni", ghost_size=4)
    assert ghostnoise.histories(model) == {}
    ghostnoise.revert(model)
    assert type(model[1]) is nn.BatchNorm1d


# Recomputation.


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outstanding", [1, 3])
@pytest.mark.parametrize("normalized", [False, True])
def test_a_recomputed_pass_sees_the_pool_of_the_first(reentrant, outstanding, normalized):
    """Gradients with and without checkpoints are equal, with several passes between a pass and its recomputation."""
    results = []
    for saves in (False, True):
        torch.manual_seed(0)
        layer = GhostNoiseBatchNorm1d(2, ghost_size=4, history=5) if normalized else GhostNoise(4, history=5)
        gradients = []
        for _ in range(4):
            inputs = [torch.randn(3, 2, 4, requires_grad=True) for _ in range(outstanding)]
            run = partial(checkpoint, layer, use_reentrant=reentrant) if saves else layer
            outputs = [run(x) for x in inputs]
            for y in outputs:
                y.square().sum().backward()
            gradients += [x.grad for x in inputs]
        results.append([*gradients, *layer.history.state().values()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_pass_of_padded_samples(reentrant):
    """Samples without valid positions do not identify a batch: they are all alike."""
    mask, results = torch.tensor([False, True, True, False])[:, None].expand(4, 5), []
    for saves in (False, True):
        torch.manual_seed(0)
        layer = GhostNoiseBatchNorm1d(2, ghost_size=3, history=4)
        run = partial(checkpoint, layer, use_reentrant=reentrant) if saves else layer
        inputs = [torch.randn(4, 2, 5, requires_grad=True) for _ in range(3)]
        outputs = []
        for x in inputs:
            with ghostnoise.masked(mask):
                outputs.append(run(x))
        for y in outputs:
            y.exp().sum().backward()
        results.append([x.grad for x in inputs])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_a_recomputed_pass_that_is_not_found_warns():
    torch.manual_seed(0)
    layer = GhostNoise(4, history=5)
    early = checkpoint(layer, torch.randn(3, 2, 4, requires_grad=True), use_reentrant=False)
    for _ in range(20):
        layer(torch.randn(3, 2, 4))
    with pytest.warns(UserWarning, match="not among the last 8 batches"):
        early.sum().backward()


# torch.compile and ranks.


class Both(nn.Module):
    """Noise on its own and inside batch norm, side by side: the draws of one do not reach the history of the other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(make() for make in LAYERS)

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


def test_compiled_without_graph_breaks():
    torch.manual_seed(0)
    model, plain, received = Both(), Both(), []
    compiled = torch.compile(model, fullgraph=True, level="aot_eager")
    for batch_size in (3, 3, 4, 5):
        x = torch.randn(batch_size, 2, 4, requires_grad=True)
        compiled(x).sum().backward()
        plain(x.detach())
        received.append(x.grad)
    assert all(gradient.isfinite().all() for gradient in received)
    for ours, wanted in zip(model.layers, plain.layers, strict=True):
        for name, table in wanted.history.state().items():
            torch.testing.assert_close(ours.history.state()[name], table)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks(count, tmp_path):
    launch(count, rank_cases.histories_are_shared_or_own, tmp_path)


# Bad input.


@pytest.mark.parametrize("history", [-1, 1.5, "8", True, None, 65_537])
@pytest.mark.parametrize("layer", [partial(GhostNoise, 4), partial(GhostNoiseBatchNorm1d, 3, ghost_size=4)])
def test_a_history_is_a_number_of_samples(layer, history):
    with pytest.raises(ValueError, match=r"history=.*must be an integer from 0 to 65536"):
        layer(history=history)


def test_a_history_has_samples():
    with pytest.raises(ValueError, match="must be an integer from 1 to"):
        History(0)
    with pytest.raises(ValueError, match="persistent='yes': must be True or False"):
        History(4, persistent="yes")


def test_histories_are_those_of_a_model():
    with pytest.raises(ValueError, match=r"histories got a int: model must be an nn\.Module"):
        ghostnoise.histories(3)


def test_functions_take_a_history_of_their_own():
    with pytest.raises(ValueError, match=r"takes a ghostnoise\.History"):
        functional.ghost_noise(torch.randn(4, 2), 2, history=16)
    with pytest.raises(ValueError, match="draw='partition' with history="):
        GhostNoise(4, draw="partition", history=16)
    with pytest.raises(ValueError, match="an input of 3 channels, and a history of samples with 2"):
        functional.ghost_noise(torch.randn(4, 3), 2, history=trained(GhostNoise(4, history=8)).history)
    history = trained(GhostNoise(4, history=8)).history
    history.clear()
    functional.ghost_noise(torch.randn(4, 3), 2, history=history)
    with pytest.raises(ValueError, match="indices"):
        functional.ghost_noise(torch.randn(4, 3), 2, history=history, indices=torch.full((4, 2), 12))


def test_transforms_are_refused_and_store_nothing():
    layer = trained(GhostNoise(4, history=8))
    before = layer.history.state()["mean"]
    x = torch.randn(5, 3, 2, 4)
    for run in (torch.func.vmap(layer, randomness="different"), torch.func.grad(lambda x: layer(x[0]).sum())):
        with pytest.raises(ValueError, match=r"a history in training under torch\.func"):
            run(x)
    assert torch.equal(layer.history.state()["mean"], before)


def test_second_derivatives_and_forward_mode_keep_the_history():
    layer, x = GhostNoiseBatchNorm1d(2, ghost_size=4, history=8), torch.randn(3, 2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    with torch.autograd.forward_ad.dual_level():
        layer(torch.autograd.forward_ad.make_dual(x.detach(), torch.randn_like(x)))
    assert layer.history.state()["counts"].tolist() == [0, 0, 4, 4, 4, 4, 4, 4]
