"""Histories, and ghost noise with one: against a loop that keeps all earlier samples and pools their values."""

import copy
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import ghostnoise
from ghostnoise import GhostNoise, GhostNoiseBatchNorm1d, History, functional
from ghostnoise.tables import COMPONENTS
from support import rank_cases, reference
from support.ranks import launch, values

LAYERS = {
    "noise": partial(GhostNoise, 4, history=8),
    "inside": partial(GhostNoiseBatchNorm1d, 2, ghost_size=4, history=8),
    "micro-batches": partial(ghostnoise.MicroBatchNorm1d, 2, history=8),
    "exclusive": partial(GhostNoiseBatchNorm1d, 2, ghost_size=4, history=8, normalizer="exclusive"),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


class Naive:
    """Earlier samples of shape (C, S) as they were, of which the last `size` contribute."""

    def __init__(self, size):
        self.size, self.samples = size, []

    def pool(self, x):
        return [*x, *self.samples[-self.size :]]

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
    st.integers(1, 9), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(1, 3), st.sampled_from(COMPONENTS), st.integers(0, 2**31),
)  # fmt: skip
def test_ghost_noise_equals_the_loop(size, batches, channels, components, seed):
    """Also with samples of different sizes, which weigh by their numbers of positions."""
    torch.manual_seed(seed)
    history, naive = History(size), Naive(size)
    for batch_size, spatial in batches:
        x = torch.randn(batch_size, channels, spatial, dtype=torch.float64) + 2
        pool = naive.pool(x)
        indices, rows = draws(batch_size, len(pool) - batch_size, size)
        y = functional.ghost_noise(x, 5, components=components, indices=indices, history=history)
        torch.testing.assert_close(y, naive_noise(x, pool, rows, components=components), rtol=1e-5, atol=1e-5)
        naive.add(x)


@pytest.mark.parametrize("normalizer", ["batch", "exclusive"])
@pytest.mark.parametrize("components", COMPONENTS)
def test_batch_norm_equals_the_loop(normalizer, components):
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


def test_padding_is_not_a_part_of_the_history():
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
    """METHODS' identity 4 with the pool's moments: Var[m] = Var_b(mean_b) / N.

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


def test_a_sample_that_is_not_finite_is_never_drawn():
    torch.manual_seed(0)
    layer, x = GhostNoise(16, history=4), torch.randn(4, 2, 3)
    x[1, 0, 0] = torch.nan
    layer(x)
    assert layer.history.state()["counts"].tolist() == [3, 0, 3, 3]
    assert all(layer(torch.randn(1, 2, 3)).isfinite().all() for _ in range(3))


# State.


def batch(seed, size=3):
    return torch.randn(size, 2, 4, generator=torch.Generator().manual_seed(seed))


def step(layer, seed, size=3):
    """Return output and input gradient of a training step."""
    torch.manual_seed(seed)
    x = batch(seed, size).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def trained(layer, batches=5, seed=0):
    for number in range(batches):
        layer(batch(100 * seed + number))
    return layer


def assert_same_steps(layer, other, seeds=(5, 6, 7)):
    for seed in seeds:
        for ours, theirs in zip(step(layer, seed), step(other, seed), strict=True):
            assert torch.equal(ours, theirs)


def assert_same_histories(layer, other):
    for ours, theirs in zip(layer.history.state().values(), other.history.state().values(), strict=True):
        assert torch.equal(ours, theirs)


@every_layer
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
    assert_same_steps(other, layer)


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


@every_layer
def test_eval_mode_reads_and_changes_nothing(make):
    layer, x = trained(make()), batch(1)
    twin = copy.deepcopy(layer)
    layer.eval()
    y = layer(x)
    assert y is x or isinstance(layer, nn.BatchNorm1d)
    for run in (fake_input, traced, exported):
        run(layer)
    assert torch.equal(torch.export.export(layer, (x,)).module()(x), y)
    assert_same_histories(layer, twin)
    assert_same_steps(layer.train(), twin)


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
    assert all(history.state()["counts"].count_nonzero() == 8 for history in ghostnoise.histories(model).values())
    ghostnoise.convert(model, "gni", ghost_size=4)
    assert ghostnoise.histories(model) == {}
    ghostnoise.revert(model)
    assert type(model[1]) is nn.BatchNorm1d


# Inference mode, and tensors without values: what stays in a history can be trained with afterwards.


@every_layer
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("sizes", [(4,), (4, 11)])
def test_batches_in_inference_mode_are_kept_as_others_are(make, before, sizes):
    ours, other = make(), make()
    assert_same_steps(ours, other, range(before))
    for size in sizes:
        for each, mode in ((ours, torch.inference_mode()), (other, torch.no_grad())):
            torch.manual_seed(size)
            with mode:
                each(batch(size, size))
    assert_same_steps(ours, other)
    assert_same_histories(ours, other)


@every_layer
def test_loading_and_calibration_in_inference_mode(make):
    layers = make(), make()
    for layer in layers:
        layer.history.persistent = True
    trained(layers[0])
    with torch.inference_mode():
        layers[1].load_state_dict(layers[0].state_dict())
    assert_same_steps(*layers)
    calibrated = nn.Sequential(copy.deepcopy(layers[0]), nn.BatchNorm1d(2))
    with torch.inference_mode():
        ghostnoise.calibrate(calibrated, [batch(1), batch(2)], noise=True, keep=4)
    calibrated[0].load_state_dict(layers[0].state_dict())  # the running statistics have changed
    assert_same_steps(calibrated[0], layers[0])
    x = batch(3).requires_grad_()
    with ghostnoise.sampling(calibrated[0].eval(), ghost_size=4):
        calibrated[0](x).sum().backward()
    assert x.grad.isfinite().all()


@every_layer
def test_copies_and_pickles_made_in_inference_mode(make):
    layer = trained(make())
    with torch.inference_mode():
        copies = copy.deepcopy(layer.history), pickle.loads(pickle.dumps(layer.history))
    for history in copies:
        twin, other = copy.deepcopy(layer), copy.deepcopy(layer)
        twin.history = history
        assert_same_steps(twin, other)


def fake_input(layer):
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer(torch.randn(3, 2, 4))


def traced(layer, **options):
    make_fx(layer, **options)(batch(0))


def exported(layer, **options):
    torch.export.export(layer, (batch(0),), **options)


WITHOUT_VALUES = {
    "fake input": fake_input, "make_fx": traced, "fake make_fx": partial(traced, tracing_mode="fake"),
    "symbolic make_fx": partial(traced, tracing_mode="symbolic"), "export": partial(exported, strict=False),
    "strict export": partial(exported, strict=True),
}  # fmt: skip


@every_layer
@pytest.mark.parametrize("run", WITHOUT_VALUES.values(), ids=WITHOUT_VALUES)
@pytest.mark.parametrize("before", [0, 1])
def test_tensors_without_values_are_refused_and_not_kept(make, run, before):
    ours, other = make(), make()
    assert_same_steps(ours, other, range(before))
    message = r"a history in training under torch\.export, make_fx or FakeTensorMode: .*history=0"
    with pytest.raises(Exception, match=message):
        run(ours)
    pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    other.load_state_dict(ours.state_dict())  # a trace may have run the update of the running statistics
    assert_same_steps(ours, other)


@every_layer
def test_a_layer_of_tensors_without_values(make):
    with FakeTensorMode(), pytest.raises(ValueError, match="a history in training under"):
        make()(torch.randn(3, 2, 4))


@every_layer
def test_other_dispatch_modes_are_not_refused(make):
    ours, other = make(), make()
    for seed in range(2):
        with FlopCounterMode(display=False):
            counted = step(ours, seed)
        torch.testing.assert_close(counted, step(other, seed))
    torch.testing.assert_close(ours.history.state(), other.history.state())


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


# torch.compile and ranks.


def test_compiled_without_graph_breaks():
    """Two layers: the draws of one do not reach the history of the other."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(LAYERS[name]() for name in ("noise", "inside"))

        def forward(self, x):
            return sum(layer(x) for layer in self.layers)

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, plain, received = Both(), Both(), []
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch_size in (3, 3, 4, 5):
        x = torch.randn(batch_size, 2, 4, requires_grad=True)
        compiled(x).sum().backward()
        plain(x.detach())
        received.append(x.grad)
    assert all(gradient.isfinite().all() for gradient in received)
    for ours, wanted in zip(model.layers, plain.layers, strict=True):
        torch.testing.assert_close(ours.history.state(), wanted.history.state())


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks(count, tmp_path):
    launch(count, rank_cases.histories_are_shared_or_own, tmp_path)


# Recomputation: see also `tests/engine/test_recompute.py`.


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


# Bad input.


@pytest.mark.parametrize("history", [-1, 1.5, "8", True, None, 65_537])
@pytest.mark.parametrize("layer", [partial(GhostNoise, 4), partial(GhostNoiseBatchNorm1d, 3, ghost_size=4)])
def test_a_history_is_a_number_of_samples(layer, history):
    with pytest.raises(ValueError, match=r"history=.*must be an integer from 0 to 65536"):
        layer(history=history)


def test_histories_and_their_models_are_checked():
    with pytest.raises(ValueError, match="must be an integer from 1 to"):
        History(0)
    with pytest.raises(ValueError, match="persistent='yes': must be True or False"):
        History(4, persistent="yes")
    with pytest.raises(ValueError, match=r"histories got a int: model must be an nn\.Module"):
        ghostnoise.histories(3)


def test_functions_take_a_history_of_their_own():
    history = trained(GhostNoise(4, history=8)).history
    with pytest.raises(ValueError, match=r"takes a ghostnoise\.History"):
        functional.ghost_noise(torch.randn(4, 2), 2, history=16)
    with pytest.raises(ValueError, match="draw='partition' with history="):
        GhostNoise(4, draw="partition", history=16)
    with pytest.raises(ValueError, match="an input of 3 channels, and a history of samples with 2"):
        functional.ghost_noise(torch.randn(4, 3), 2, history=history)
    history.clear()
    functional.ghost_noise(torch.randn(4, 3), 2, history=history)
    with pytest.raises(ValueError, match="indices"):
        functional.ghost_noise(torch.randn(4, 3), 2, history=history, indices=torch.full((4, 2), 12))
