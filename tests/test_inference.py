"""Noise in eval mode from stored moments, against loops in float64 that do not use the library's formulas."""

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ghostnoise
from ghostnoise import inference
from ghostnoise.methods.analytical import Law
from support import reference

COMPONENTS = ("both", "shift", "scale")


@pytest.fixture
def drawn(monkeypatch):
    """The indices that layers draw, in the order of the layers."""
    made = []

    def recording(original):
        def draw(*args, **kwargs):
            made.append(original(*args, **kwargs))
            return made[-1]

        return draw

    for module in (inference, ghostnoise.methods.noise_base):
        monkeypatch.setattr(module, "draw_rows", recording(module.draw_rows))
    return made


def stored_values(layer, samples, channel_dim=1):
    """Give a layer the moments of `samples`, and return these as (n, C, S) in float64."""
    values = reference.fold(samples, channel_dim)
    mean = values.mean(2)
    var = ((values - mean[:, :, None]) ** 2).mean(2)
    layer.kept = ghostnoise.Moments(mean, var, torch.full((len(mean), 1), float(values.shape[2])))
    return values


def noisy(x, values, indices, noise_eps, components):
    """Eq. 10 for each sample, with the statistics of the stored values."""
    mu, var = reference.statistics(values)
    out = []
    for k in range(len(x)):
        m, s2 = reference.statistics(values[indices[k]])
        shift = m - mu if components != "scale" else torch.zeros_like(mu)
        scale = torch.sqrt((s2 + noise_eps) / (var + noise_eps)) if components != "shift" else torch.ones_like(mu)
        out.append((x[k] - shift[:, None]) / scale[:, None])
    return torch.stack(out)


def with_running(layer, generator):
    """Set running statistics, weight and bias that are not trivial."""
    for tensor, low in ((layer.running_mean, -1.0), (layer.running_var, 0.5), (layer.weight, 0.5), (layer.bias, -1.0)):
        tensor.data.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + low)
    return layer


def affine(layer, y):
    return y * layer.weight.double()[:, None] + layer.bias.double()[:, None]


shapes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(1, 4), max_size=3))
SETTINGS = settings(max_examples=25, deadline=None)


@SETTINGS
@given(shapes, st.integers(2, 6), st.integers(1, 9), st.sampled_from(COMPONENTS), st.integers(0, 99))
def test_noise_on_its_own_equals_a_loop(shape, ghost_size, count, components, seed):
    batch_size, channels, spatial = shape
    generator = torch.Generator().manual_seed(seed)
    layer = ghostnoise.GhostNoise(ghost_size, 0.1, components=components, channel_dim=-1).eval()
    draw = {"generator": generator, "dtype": torch.float64}
    values = stored_values(layer, torch.randn(count, 2, *spatial, channels, **draw), -1)
    x = torch.randn(batch_size, *spatial[:2], channels, **draw)
    state = generator.get_state()
    with ghostnoise.sampling(layer, generator=generator):
        y = layer(x)
    generator.set_state(state)
    indices = torch.randint(count, (batch_size, ghost_size), generator=generator)
    expected = noisy(reference.fold(x, -1), values, indices, 0.1, components)
    torch.testing.assert_close(y, reference.unfold(expected, x, -1), rtol=1e-10, atol=1e-10)


@SETTINGS
@given(shapes, st.integers(2, 6), st.integers(1, 9), st.sampled_from(COMPONENTS), st.integers(0, 99))
def test_noise_inside_batch_norm_equals_a_loop(shape, ghost_size, count, components, seed):
    batch_size, channels, spatial = shape
    generator = torch.Generator().manual_seed(seed)
    layer = ghostnoise.GhostNoiseBatchNorm(
        channels, ghost_size=ghost_size, noise_eps=0.1, components=components, dtype=torch.float64
    ).eval()
    with_running(layer, generator)
    draw = {"generator": generator, "dtype": torch.float64}
    values = stored_values(layer, torch.randn(count, channels, *spatial, 2, **draw)[..., 0])
    x = torch.randn(batch_size, channels, *spatial, **draw)
    state = generator.get_state()
    with ghostnoise.sampling(layer, generator=generator):
        y = layer(x)
    generator.set_state(state)
    indices = torch.randint(count, (batch_size, ghost_size), generator=generator)

    def normalized(raw):
        std = torch.sqrt(layer.running_var + layer.eps)
        return (raw - layer.running_mean[:, None]) / std[:, None]

    expected = noisy(normalized(reference.fold(x)), normalized(values), indices, 0.1, components)
    torch.testing.assert_close(y, reference.unfold(affine(layer, expected), x), rtol=1e-10, atol=1e-10)


NORMS = {
    "bn": lambda channels: ghostnoise.BatchNorm(channels, dtype=torch.float64),
    "gbn": lambda channels: ghostnoise.GhostBatchNorm(channels, ghost_size=5, dtype=torch.float64),
    "xbn": lambda channels: ghostnoise.ExclusiveBatchNorm(channels, ghost_size=5, dtype=torch.float64),
    "en": lambda channels: ghostnoise.EvalNorm(channels, ghost_size=5, dtype=torch.float64),
    "brn": lambda channels: ghostnoise.BatchRenorm(channels, dtype=torch.float64),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("spatial", [(), (3,), (2, 5), (2, 1, 3)])
def test_batch_norms_without_noise_take_the_statistics_of_drawn_samples(name, spatial, drawn):
    torch.manual_seed(len(spatial))
    layer = with_running(NORMS[name](3), None).eval()
    values = stored_values(layer, torch.randn(11, 3, *spatial, dtype=torch.float64))
    x = torch.randn(4, 3, *spatial, dtype=torch.float64)
    with ghostnoise.sampling(layer, ghost_size=None if name in ("gbn", "xbn", "en") else 5):
        y = layer(x)
    (indices,) = drawn
    assert indices.shape == (4, 5)
    members = [values[rows] for rows in indices]
    expected = []
    for sample, ghost in zip(reference.fold(x), members, strict=True):
        mean, var = reference.statistics(ghost)
        expected.append((sample - mean[:, None]) / torch.sqrt(var + layer.eps)[:, None])
    expected = reference.unfold(affine(layer, torch.stack(expected)), x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("law", ["fc", "conv"])
def test_analytical_noise_follows_its_law_with_the_variances_of_stored_samples(law, inside):
    torch.manual_seed(0)
    options = {"ghost_size": 4, "law": law, "noise_eps": 0.1}
    layer = ghostnoise.AnalyticalGhostNoise(**options)
    if inside:
        layer = with_running(ghostnoise.AnalyticalGhostNoiseBatchNorm(2, **options, dtype=torch.float64), None)
    values = stored_values(layer.eval(), torch.randn(9, 2, 3, dtype=torch.float64) * 2 + 1)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    if inside:
        std = torch.sqrt(layer.running_var + layer.eps)[:, None]
        values, given_ = ((each - layer.running_mean[:, None]) / std for each in (values, x))
    else:
        given_ = x
    with ghostnoise.sampling(layer, generator=torch.Generator().manual_seed(1)):
        y = layer(x)
    draws = Law(4, law).draw((6, 2), 3, x.device, torch.Generator().manual_seed(1))
    total = torch.ones(2, dtype=torch.float64) if inside else reference.statistics(values)[1]
    means = values.mean(2)
    inner = ((values - means[:, :, None]) ** 2).mean((0, 2))
    within = torch.zeros(2) if law == "fc" else inner * 3 / 2
    between = total if law == "fc" else (means.var(0, correction=0) - inner / 2).clamp_min(0)
    shift = draws.normal * torch.sqrt(within / 12 + between / 4)
    scale = torch.sqrt((within * draws.within + between * draws.between + 0.1) / (total + 0.1))
    expected = (given_ - shift[:, :, None]) / scale[:, :, None]
    torch.testing.assert_close(y, affine(layer, expected) if inside else expected, rtol=1e-10, atol=1e-10)


def test_samples_with_fewer_values_weigh_less(drawn):
    torch.manual_seed(0)
    layer = ghostnoise.GhostNoise(3, 0.1).eval()
    raw = [torch.randn(2, size, dtype=torch.float64) for size in (1, 4, 2, 7)]
    tables = [(each.mean(1), each.var(1, correction=0)) for each in raw]
    mean, var = (torch.stack(table) for table in zip(*tables, strict=True))
    layer.kept = ghostnoise.Moments(mean, var, torch.tensor([[1.0], [4], [2], [7]]))
    x = torch.randn(5, 2, 6, dtype=torch.float64)
    with ghostnoise.sampling(layer):
        y = layer(x)
    every = torch.cat(raw, 1)
    for k, rows in enumerate(drawn[0]):
        ghost = torch.cat([raw[row] for row in rows], 1)
        scale = torch.sqrt((ghost.var(1, correction=0) + 0.1) / (every.var(1, correction=0) + 0.1))
        expected = (x[k] - (ghost.mean(1) - every.mean(1))[:, None]) / scale[:, None]
        torch.testing.assert_close(y[k], expected, rtol=1e-10, atol=1e-10)


def network(method="gni", **options):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 3, 3), nn.BatchNorm1d(3))
    return ghostnoise.convert(plain, method, **({"ghost_size": 4} | options))


def batches(count=5):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(8, 2, 9, generator=generator) for _ in range(count)]


def calibrated(**options):
    model = network(**options)
    ghostnoise.calibrate(model, batches(), keep=16)
    return model.eval()


def test_without_the_context_the_output_is_that_of_batch_norm_bit_for_bit():
    model, x = calibrated(), batches()[0]
    plain = ghostnoise.revert(copy.deepcopy(model)).eval()
    before = model(x)
    with ghostnoise.sampling(model):
        assert not torch.equal(model(x), before)
    assert torch.equal(model(x), before)
    assert torch.equal(plain(x), before)


def test_history_is_drawn_from_and_kept_samples_win(drawn):
    model, x = network(history=24), batches()[0]
    for batch in batches(2):
        model(batch)
    model.eval()
    with ghostnoise.sampling(model):
        model(x)
    assert {int(each.max()) < 16 and each.shape == (8, 4) for each in drawn} == {True}  # absent samples are not drawn
    (stored, *_) = (each.stored for each in inference._samplers(model, None, None))
    assert len(stored.mean) == 16
    ghostnoise.calibrate(model, batches(), keep=7)
    (stored, *_) = (each.stored for each in inference._samplers(model, None, None))
    assert len(stored.mean) == 7


def test_a_seed_reproduces_the_outputs():
    model, x = calibrated(), batches()[0]

    def run(**options):
        with torch.no_grad(), ghostnoise.sampling(model, **options):
            return model(x)

    first, again, other = (run(generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    first = run()
    torch.manual_seed(5)
    assert torch.equal(first, run())


def test_layers_in_training_mode_are_as_without_the_context():
    model, x = calibrated().train(), batches()[0]
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = other(x)
    torch.manual_seed(1)
    with ghostnoise.sampling(model):
        assert torch.equal(model(x), expected)


def test_the_previous_state_returns_when_nested_and_after_exceptions():
    model, x = calibrated(), batches()[0]
    before = model(x)

    def seeded():
        torch.manual_seed(0)
        return model(x)

    def inner():
        with ghostnoise.sampling(model, ghost_size=1):
            assert not torch.equal(seeded(), outer)
            raise KeyError

    with ghostnoise.sampling(model):
        outer = seeded()
        with pytest.raises(KeyError):
            inner()
        assert torch.equal(seeded(), outer)
    assert torch.equal(model(x), before)


def test_blocks_may_end_in_any_order():
    """As those of threads and generators do: nothing is left when all have ended."""
    model, x = calibrated(), batches()[0]
    before = model(x)
    first, second = (ghostnoise.sampling(model, ghost_size=size) for size in (1, 2))
    first.__enter__()
    second.__enter__()
    torch.manual_seed(0)
    expected = model(x)
    first.__exit__(None, None, None)
    torch.manual_seed(0)
    assert torch.equal(model(x), expected)
    second.__exit__(None, None, None)
    assert torch.equal(model(x), before)
    assert not inference._active


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved, "in a list": lambda model: copy.deepcopy([model, {"again": model}])[1]["again"],
}  # fmt: skip


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("inserted", [False, True])
def test_copies_made_inside_of_a_block_are_not_a_part_of_it(how, inserted):
    model, x = calibrated(), batches()[0]
    if inserted:
        ghostnoise.convert(model, "gni", 4, after=nn.Conv1d)
        ghostnoise.calibrate(model, batches(), keep=8)
        model.eval()
    plain = model(x)
    with ghostnoise.sampling(model):
        twin = COPIES[how](model)
        if how == "copy":  # which shares the layers; copy these alone
            twin = nn.Sequential(*map(copy.copy, model))
            for layer in twin:
                layer._modules = {name: copy.copy(child) for name, child in layer._modules.items()}
        assert torch.equal(twin(x), plain)
        assert not torch.equal(model(x), plain)
        with ghostnoise.sampling(twin):
            assert not torch.equal(twin(x), plain)
        assert torch.equal(twin(x), plain)
        assert not torch.equal(model(x), plain)
    for each in (model, twin):
        assert torch.equal(each(x), plain)
        assert not [layer for layer in each.modules() if "_sampling" in vars(layer)]


def test_a_copy_of_a_parametrized_layer_is_not_a_part_of_the_block():
    """torch copies the attributes of these itself."""
    model, x = calibrated(), batches()[0]
    nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    plain = model(x)
    with ghostnoise.sampling(model):
        twin = copy.deepcopy(model)
        assert not torch.equal(model(x), plain)
        assert torch.equal(twin(x), plain)
    assert torch.equal(twin(x), plain)


def test_the_gradient_is_that_of_constant_statistics():
    torch.manual_seed(0)
    for layer in (
        ghostnoise.GhostNoiseBatchNorm(2, ghost_size=3, dtype=torch.float64),
        ghostnoise.GhostBatchNorm(2, ghost_size=3, dtype=torch.float64),
        ghostnoise.GhostNoise(3),
    ):
        stored_values(layer.eval(), torch.randn(6, 2, 3, dtype=torch.float64))
        parameters = list(layer.parameters())
        x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)

        def run(x, *parameters, layer=layer):
            with ghostnoise.sampling(layer, generator=torch.Generator().manual_seed(0)):
                return layer(x)

        assert torch.autograd.gradcheck(run, (x, *parameters))
        (gradient,) = torch.autograd.grad(run(x).sum(), x)
        assert torch.allclose(gradient, gradient[:, :, :1].expand_as(gradient))  # no term that depends on x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_memory_format_and_empty_batches(dtype):
    layer = ghostnoise.GhostNoiseBatchNorm2d(4, ghost_size=3).eval()
    stored_values(layer, torch.randn(6, 4, 3, 3))
    x = torch.randn(5, 4, 3, 3).to(dtype, memory_format=torch.channels_last)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), ghostnoise.sampling(layer, generator=torch.Generator().manual_seed(0)):
            y = layer(x)
            assert y.dtype == dtype
            assert y.is_contiguous(memory_format=torch.channels_last)
            assert layer(x[:0]).shape == (0, 4, 3, 3)
        with ghostnoise.sampling(layer, generator=torch.Generator().manual_seed(0)):
            wide = copy.deepcopy(layer).double()
        with ghostnoise.sampling(wide, generator=torch.Generator().manual_seed(0)):
            expected = wide(x.double())
        error = (y.double() - expected).abs().max()
        assert error <= torch.finfo(dtype).eps * expected.abs().max() + 1e-5


def test_a_large_mean_costs_no_digits():
    torch.manual_seed(0)
    raw = torch.randn(32, 3, 7, dtype=torch.float64) + 1e4
    for make in (
        lambda: ghostnoise.GhostNoiseBatchNorm(3, ghost_size=4),
        lambda: ghostnoise.GhostBatchNorm(3, ghost_size=4),
    ):
        layer = make().eval()
        layer.running_mean.fill_(1e4)
        stored_values(layer, raw)
        x = raw[:5].float()
        outputs = []
        for each, given_ in ((layer, x), (copy.deepcopy(layer).double(), x.double())):
            with ghostnoise.sampling(each, generator=torch.Generator().manual_seed(0)):
                outputs.append(each(given_).double())
        assert (outputs[0] - outputs[1]).abs().max() <= 1e-5 * outputs[1].abs().max()


def test_compiled_models_sample_too():
    model, x = calibrated(), batches()[0]
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        before = compiled(x)
        with ghostnoise.sampling(compiled):
            torch.manual_seed(0)
            noisy_output = compiled(x)
            torch.manual_seed(0)
            expected = model(x)
        assert not torch.equal(noisy_output, before)
        torch.testing.assert_close(noisy_output, expected)
        assert torch.equal(compiled(x), before)


# Errors


def test_sampling_without_stored_moments_names_the_layers_and_changes_nothing():
    model = network(history=8)
    model[1].kept = ghostnoise.Moments(torch.zeros(1, 4), torch.ones(1, 4), torch.ones(1, 1))
    before = copy.deepcopy(model.state_dict())
    with (
        pytest.raises(ValueError, match=r"in '4' \(GhostNoiseBatchNorm1d\): .*keep=1024.*history=256") as error,
        ghostnoise.sampling(model),
    ):
        pytest.fail("entered")
    assert "'1'" not in str(error.value)
    assert all(module._sampling is None for module in model.modules() if hasattr(module, "_sampling"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_a_model_in_which_no_layer_takes_part():
    with pytest.raises(ValueError, match=r"no layer of this library.*convert"), ghostnoise.sampling(nn.BatchNorm1d(3)):
        pytest.fail("entered")
    model = ghostnoise.BatchNorm1d(3)
    with pytest.raises(ValueError, match=r"without a ghost size only.*ghost_size=16"), ghostnoise.sampling(model):
        pytest.fail("entered")


def test_noise_without_running_statistics():
    layer = ghostnoise.GhostNoiseBatchNorm(2, ghost_size=3, track_running_stats=False).eval()
    stored_values(layer, torch.randn(6, 2, 3))
    with pytest.raises(ValueError, match="track_running_stats=True"), ghostnoise.sampling(layer):
        pytest.fail("entered")


def test_ghost_batches_of_a_single_value():
    layer = ghostnoise.GhostBatchNorm(2, ghost_size=1).eval()
    stored_values(layer, torch.randn(6, 2))
    with pytest.raises(ValueError, match="ghost_size=2 or more"), ghostnoise.sampling(layer):
        pytest.fail("entered")


def test_noise_from_a_single_value_warns():
    layer = ghostnoise.GhostNoise(1).eval()
    stored_values(layer, torch.randn(6, 71))  # a shape that no other test uses: the warning appears once for each
    with ghostnoise.sampling(layer), pytest.warns(UserWarning, match="single value has no variance"):
        layer(torch.randn(3, 71))


def test_other_channels_than_those_of_the_stored_samples():
    layer = ghostnoise.GhostNoise(3).eval()
    stored_values(layer, torch.randn(6, 2, 3))
    with ghostnoise.sampling(layer), pytest.raises(ValueError, match=r"got 5 channels.*stored samples with 2"):
        layer(torch.randn(4, 5, 3))


@pytest.mark.parametrize(
    "options", [{"ghost_size": 0}, {"ghost_size": 2.5}, {"generator": 3}, {"model": "model"}], ids=str
)
def test_wrong_arguments_of_sampling(options):
    with pytest.raises(ValueError, match="must be"), ghostnoise.sampling(**({"model": calibrated()} | options)):
        pytest.fail("entered")


# Samples that calibrate keeps


def test_calibrate_keeps_a_subset_of_the_samples_the_same_in_all_layers():
    model = calibrated()
    inputs = torch.cat(batches()).double()
    first, second = model[1].kept, model[4].kept
    assert first.mean.shape == (16, 4)
    assert second.n.flatten().tolist() == [5.0] * 16
    with torch.no_grad():
        raw = copy.deepcopy(model[0]).double()(inputs)
    found = [int((raw.mean(2) - row).abs().sum(1).argmin()) for row in first.mean]
    assert len(set(found)) == 16
    torch.testing.assert_close(raw[found].mean(2), first.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(raw[found].var(2, correction=0), first.var, rtol=1e-5, atol=1e-5)
    again = network()
    ghostnoise.calibrate(again, batches(), keep=16)
    assert all(torch.equal(a, b) for a, b in zip(first, again[1].kept, strict=True))


def test_every_sample_is_kept_equally_often():
    runs, counts = 400, torch.zeros(12)
    for seed in range(runs):
        reservoir = ghostnoise.calibration.Reservoir(3, seed)
        for start in (0, 4, 8):
            rows = torch.arange(start, start + 4.0)[:, None]
            reservoir.add(ghostnoise.Moments(rows, rows))
        counts[reservoir.merged(None).mean[:, 0].long()] += 1
    expected, worst = runs / 4, 5 * math.sqrt(runs * 0.25 * 0.75)  # five standard deviations of a binomial
    assert (counts - expected).abs().max() < worst
    assert counts.sum() == 3 * runs


def test_calibrate_keeps_all_samples_if_there_are_fewer():
    model = network()
    ghostnoise.calibrate(model, batches(), keep=1000)
    assert len(model[1].kept.n) == 40


def test_calibrate_keeps_samples_without_batch_norms():
    model = nn.Sequential(nn.LayerNorm(6), ghostnoise.GhostNoise(4, channel_dim=-1))
    result = ghostnoise.calibrate(model, [torch.randn(8, 5, 6)], keep=4)
    assert result.layers == ()
    assert model[1].kept.mean.shape == (4, 6)
    assert model[1].kept.n.flatten().tolist() == [5.0] * 4


def test_kept_samples_change_neither_training_nor_the_state_dict():
    plain, model, x = network(), network(), batches()[0]
    ghostnoise.calibrate(plain, batches())
    ghostnoise.calibrate(model, batches(), keep=16)
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))
    outputs = []
    for each in (plain, model):
        torch.manual_seed(1)
        outputs.append(each.train()(x))
    assert torch.equal(*outputs)


def test_copies_and_pickles_have_the_kept_samples():
    model, x = calibrated(), batches()[0]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    outputs = []
    for each in (model, copy.deepcopy(model), torch.load(file, weights_only=False)):
        with ghostnoise.sampling(each, generator=torch.Generator().manual_seed(0)):
            outputs.append(each(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_a_failed_calibration_leaves_the_kept_samples():
    model = calibrated()
    before = [model[at].kept for at in (1, 4)]
    bad = torch.full((8, 2, 9), math.nan)
    with pytest.raises(ValueError, match="not finite"):
        ghostnoise.calibrate(model, [batches()[0], bad], keep=4)
    assert [model[at].kept for at in (1, 4)] == before


def test_wrong_keep():
    for keep in (-1, 2.5, True):
        with pytest.raises(ValueError, match=f"keep={keep}"):
            ghostnoise.calibrate(network(), batches(), keep=keep)
    with pytest.raises(ValueError, match=r"no layer of this library.*convert"):
        ghostnoise.calibrate(nn.Sequential(nn.BatchNorm1d(2)), batches(), keep=4)


# predict


class Head(nn.Module):
    """A model with several inputs, which records how many rows it gets."""

    def __init__(self, most=None, form=None):
        super().__init__()
        self.body, self.most, self.form, self.rows = calibrated(), most, form, []

    def forward(self, x, offset=None):
        self.rows.append(len(x))
        if self.most is not None and len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        y = self.body(x) if offset is None else self.body(x) + offset
        return y if self.form is None else self.form(y)


def test_predict_returns_the_moments_of_its_outputs():
    model, x = calibrated().train(), batches()[0]
    model[2].eval()
    modes = [module.training for module in model.modules()]
    mean, variance, outputs = ghostnoise.predict(model, x, 6, generator=torch.Generator().manual_seed(0))
    assert [module.training for module in model.modules()] == modes
    assert outputs.shape == (6, 8, 3, 5)
    assert not outputs.requires_grad
    flat = outputs.double()
    expected = sum(flat) / 6
    torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        variance.double(), sum((each - expected) ** 2 for each in flat) / 6, rtol=1e-4, atol=1e-6
    )
    repeated = x.repeat(6, 1, 1)
    with torch.no_grad(), ghostnoise.sampling(model.eval(), generator=torch.Generator().manual_seed(0)):
        assert torch.equal(model(repeated).unflatten(0, (6, 8)), outputs)  # one batched pass
    assert len(torch.unique(outputs[:, 0, 0, 0])) == 6


def test_predict_in_chunks():
    x = batches()[0]
    model = Head()
    assert ghostnoise.predict(model, x, 7, chunk=3).outputs.shape == (7, 8, 3, 5)
    assert model.rows == [24, 24, 8]
    model = Head(most=17)
    assert ghostnoise.predict(model, x, 7, chunk=7).outputs.shape == (7, 8, 3, 5)
    assert model.rows == [56, 24, 8, 8, 8, 8, 8, 8, 8]
    with pytest.raises(torch.OutOfMemoryError):
        ghostnoise.predict(Head(most=7), x, 2)
    model = Head()
    ghostnoise.predict(model, x[:1], inference.ROWS + 1)
    assert model.rows == [inference.ROWS, 1]


def test_predict_of_several_inputs_and_a_transform():
    x, offset = batches()[0], torch.arange(8.0)[:, None, None]
    for given_ in ((x, offset), {"x": x, "offset": offset}):
        torch.manual_seed(0)
        shifted = ghostnoise.predict(Head(), given_, 3).outputs
        torch.manual_seed(0)
        assert torch.equal(shifted, ghostnoise.predict(Head(), x, 3).outputs + offset)
    probabilities = ghostnoise.predict(Head(), x, 3, transform=lambda y: y.mean(2).softmax(-1))
    torch.testing.assert_close(probabilities.mean.sum(-1), torch.ones(8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": [1.0]}, "input of type list"),
        ({"x": None}, "input of type NoneType: must be a tensor"),
        ({"x": (torch.zeros(2, 2, 9), None)}, "input of type tuple with None: must be a tensor"),
        ({"x": ()}, "input of type tuple"),
        ({"x": (torch.zeros(2, 2, 9), 3)}, "with 3: must be a tensor"),
        ({"x": (torch.zeros(2, 2, 9), torch.zeros(3, 1, 1))}, r"batches of \[2, 3\] samples: must be equal"),
        ({"samples": 0}, "samples=0: must be an integer of 1 or more"),
        ({"chunk": 0}, "chunk=0: must be"),
        ({"transform": lambda y: [y]}, "got a list as the output"),
        ({"transform": lambda y: y.argmax(1)}, "torch.int64 as the output.*transform"),
        ({"transform": lambda y: y.sum()}, "for a batch of 64 samples: must be a floating tensor with 64 rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_arguments_of_predict(arguments, message):
    with pytest.raises(ValueError, match=message):
        ghostnoise.predict(**({"model": Head(), "x": batches()[0], "samples": 8} | arguments))


def test_predict_without_stored_moments_changes_nothing():
    model = network().train()
    with pytest.raises(ValueError, match="without stored moments"):
        ghostnoise.predict(model, batches()[0])
    assert all(module.training for module in model.modules())
