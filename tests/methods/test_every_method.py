"""What holds for every method, as functions: each of `support.variants` is held to its naive float64 loop."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ghostnoise import functional
from ghostnoise.methods import registry
from support import families, reference, variants
from support.inputs import Case, cases, enough_values
from support.levels import LEVELS, running
from support.variants import DETERMINISTIC, VARIANTS, assert_equals_naive

pytestmark = pytest.mark.filterwarnings("ignore:ghost_size=1 on samples")
every_variant = pytest.mark.parametrize("name", VARIANTS)
every_level = pytest.mark.parametrize("level", LEVELS)
every_family = pytest.mark.parametrize("family", families.FAMILIES)


@every_level
@every_variant
@settings(max_examples=25)
@given(data=st.data())
def test_output_gradients_and_running_statistics_equal_the_naive_loop(level, name, data):
    with running(level):
        assert_equals_naive(VARIANTS[name], data.draw(cases(**(VARIANTS[name].least or {}))))


@every_level
@every_variant
@settings(max_examples=15)
@given(case=enough_values())
def test_every_dtype_keeps_its_precision(level, name, case):
    with running(level):
        assert_equals_naive(VARIANTS[name], case)


@every_variant
@settings(max_examples=15)
@given(case=enough_values((torch.float64, torch.float32)))
def test_a_padded_batch_equals_the_samples_without_padding(name, case):
    assert_equals_naive(VARIANTS[name], case, case.mask())


def test_every_method_has_a_variant():
    tested = {variant.function for variant in VARIANTS.values()}
    assert {spec.norm.function for spec in families.SPECS.values()} <= tested


# Derivatives.


def small(channel_dim=1):
    return Case((7, 2, 3), channel_dim, "contiguous", torch.float64, 3, 0)


def seeded(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_gradcheck(name):
    case = small()
    inputs = [each.requires_grad_() for each in (case.tensor(), case.vector(1), case.vector(2))]
    run = functools.partial(VARIANTS[name].run, case)
    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, inputs)


@every_variant
def test_derivatives_of_every_kind_take_the_noise_as_constant(name):
    """Second derivatives, forward mode and batched gradients, against those of the naive loop."""
    variant, case = VARIANTS[name], small()
    x, tangent, direction = case.tensor().requires_grad_(), seeded(7, 2, 3), seeded(7, 2, 3, seed=2)
    dys = seeded(4, 7, 2, 3, seed=3)

    def ours(x):
        return variant.run(case, x, buffers=variants.running(case).values())

    def second(y):
        (first,) = torch.autograd.grad(y, x, dys[0], create_graph=True)
        found = torch.autograd.grad(first, x, direction, allow_unused=True)[0] if first.requires_grad else None
        return torch.zeros_like(x) if found is None else found

    torch.testing.assert_close(second(ours(x)), second(variant.expected(case, x)), rtol=1e-9, atol=1e-9)
    y = variant.expected(case, x)
    gradients = [torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in dys]
    _, moved = torch.func.jvp(ours, (x.detach(),), (tangent,))
    torch.testing.assert_close((moved * dys[0]).sum(), (gradients[0] * tangent).sum(), rtol=1e-9, atol=1e-9)
    (batched,) = torch.autograd.grad(ours(x), x, dys, is_grads_batched=True)
    torch.testing.assert_close(batched, torch.stack(gradients), rtol=1e-9, atol=1e-9)


# float32, on inputs for which naive formulas lose digits.


def assert_accurate(actual, expected, rows=slice(None)):
    """The error is at most 1e-5 of the largest value, separately for each set of rows."""
    assert (actual[rows] - expected[rows]).abs().max() <= 1e-5 * expected[rows].abs().max()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@every_level
@every_variant
def test_a_mean_of_10_000_standard_deviations(name, level, layout):
    variant, case = VARIANTS[name], Case((16, 4, 8, 8), 1, layout, torch.float32, 4, 0)
    x = case.tensor().add_(1e4).requires_grad_()
    dy, buffers = case.tensor(5), (torch.full((4,), 1e4), torch.ones(4))
    exact = x.detach().double().requires_grad_()
    theirs = variant.theirs(case)
    if "running_mean" in theirs:
        theirs |= {"running_mean": buffers[0].double(), "running_var": buffers[1].double()}
    with running(level):
        y = variant.run(case, x, buffers=[each.clone() for each in buffers])
    expected = reference.unfold(variant.naive(reference.fold(exact), **theirs), x)
    (gradient,), (wanted,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, exact, dy.double())
    assert_accurate(y.double(), expected)
    assert_accurate(gradient.double(), wanted)


@every_level
@pytest.mark.parametrize("shape", [(16, 4), (16, 4, 8, 8)])
def test_an_outlier_in_another_ghost_batch(shape, level):
    """Also where it was not drawn, and in another part of a partition."""
    x, order = seeded(*shape, dtype=torch.float32), torch.randperm(16, generator=torch.Generator().manual_seed(0))
    x[0] += 1e8
    drawn = torch.randint(1, 16, (16, 5), generator=torch.Generator().manual_seed(0))
    parts = reference.partition(order, 4)
    apart = [k for k in range(1, 16) if 0 not in parts[k]]
    samples = reference.fold(x)
    with running(level):
        ghosts = functional.ghost_batch_norm(x, None, None, training=True, ghost_size=4)
        noise = functional.ghost_noise(x, 5, indices=drawn)
        shuffled = functional.ghost_noise(x, 4, draw="partition", indices=order)
    assert_accurate(ghosts, reference.unfold(reference.ghost_batch_norm(samples, 4), x), slice(4, None))
    assert_accurate(noise, reference.unfold(reference.ghost_noise(samples, drawn), x), slice(1, None))
    assert_accurate(shuffled, reference.unfold(reference.ghost_noise(samples, parts), x), apart)


@every_level
@pytest.mark.parametrize("deviation", [1e4, 1e8, 1e12])
@pytest.mark.parametrize("name", ["xbn", "xbn with a self-weight", "xbn with a self-weight, whole batch"])
def test_a_sample_far_from_those_that_its_statistics_are_of(name, deviation, level):
    variant = VARIANTS[name]
    for shape in ((16, 4), (16, 4, 8, 8)):
        case = Case(shape, 1, "contiguous", torch.float32, 16, 0)
        x = seeded(*shape, dtype=torch.float32)
        x[5] += deviation
        leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        with running(level):
            y, expected = variant.run(case, leaf), variant.expected(case, exact)
        for k in range(16):
            assert_accurate(y, expected, k)
        if deviation < 1e12:
            dy = seeded(*shape, seed=2)
            (gradient,), (wanted,) = (torch.autograd.grad(out, of, dy.to(of.dtype)) for out, of in
                                      ((y, leaf), (expected, exact)))  # fmt: skip
            assert_accurate(gradient, wanted)


@every_level
def test_noise_after_an_exclusive_normalization_does_not_feel_an_outlier_that_was_not_drawn(level):
    x = seeded(16, 4, 8, 8, dtype=torch.float32)
    x[0] *= 1e4
    indices = torch.randint(1, 16, (16, 5), generator=torch.Generator().manual_seed(0))
    options = {"indices": indices, "normalizer": "exclusive"}
    with running(level):
        y = functional.ghost_noise_batch_norm(x, None, None, training=True, ghost_size=5, **options)
    expected = reference.unfold(reference.ghost_noise_batch_norm(reference.fold(x), **options), x)
    for rows in (slice(0, 1), slice(1, None)):
        assert_accurate(y, expected, rows)


# Evaluation, and draws.


@given(cases())
def test_evaluation_is_torchs_own(case):
    x, weight, bias = case.tensor(), case.vector(1), case.vector(2)
    buffers = case.vector(3), case.vector(4).square()
    expected = F.batch_norm(x.movedim(case.channel_dim, 1), *buffers, weight, bias).movedim(1, case.channel_dim)
    for family in families.PLAIN_AT_INFERENCE:
        function, options = families.function(family)
        y = function(x, *buffers, weight, bias, channel_dim=case.channel_dim, **options)
        assert torch.equal(y, expected)


def test_evaluation_without_buffers_uses_the_batch():
    x = seeded(6, 3, 4)
    expected = F.batch_norm(x, None, None, training=True)
    for family in families.UNTRACKED:
        function, options = families.function(family)
        assert torch.equal(function(x, None, None, **options), expected)


DRAWING = {family: functools.partial(function, running_mean=None, running_var=None, training=True, **options)
           for family in families.DRAWING for function, options in [families.function(family)]} | {
    f"{noise.__name__}, {options}": lambda x, generator=None, noise=noise, options=options: noise(
        4, generator=generator, **options)(x)
    for noise, options in ((registry.noises()[0], {}), (registry.noises()[0], {"draw": "partition"}),
                           (registry.noises()[1], {"law": "conv"}))
}  # fmt: skip


@every_level
@pytest.mark.parametrize("name", DRAWING)
def test_draws_come_from_the_seed_or_from_the_generator(name, level):
    draw, x = DRAWING[name], seeded(8, 3, 4, dtype=torch.float32)
    with running(level):
        torch.manual_seed(3)
        first, second = draw(x), draw(x)
        torch.manual_seed(3)
        assert torch.equal(draw(x), first)
        assert not torch.equal(first, second)
        state = torch.get_rng_state()
        assert torch.equal(*(draw(x, generator=torch.Generator().manual_seed(7)) for _ in range(2)))
        assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    torch.testing.assert_close(draw(x), first)  # on the other level


# What no method accepts.


def training(family):
    function, options = families.function(family)
    return lambda x, **more: function(x, None, None, training=True, **options, **more)


EVERY_CALL = {family: training(family) for family in families.FAMILIES} | {
    noise.__name__: lambda x, noise=noise, **more: noise(2, **more)(x) for noise in registry.noises()
}


@pytest.mark.parametrize("name", EVERY_CALL)
def test_inputs_that_no_method_accepts(name):
    call = EVERY_CALL[name]
    for shape in ((4,), (2, 2, 2, 2, 2, 2)):
        with pytest.raises(ValueError, match="must have 2 to 5 dimensions"):
            call(torch.randn(shape))
    for dtype in (torch.int64, torch.complex64, torch.bool):
        remedy = "normalize torch.view_as_real" if dtype.is_complex else "convert"
        message = f"dtype {dtype}: must be float16, bfloat16, float32 or float64; {remedy}"
        with pytest.raises(ValueError, match=message):
            call(torch.ones(4, 3, dtype=dtype))
    for shape in ((0, 3), (0, 3, 4), (4, 3, 0), (4, 0)):
        with pytest.raises(ValueError, match=r"empty input of shape .*skip empty batches"):
            call(torch.randn(shape))
    for dim in (0, 1.0, True, None):
        with pytest.raises(ValueError, match=r"channel_dim=.*: must be an integer other than 0, the batch dimension"):
            call(torch.randn(4, 3), channel_dim=dim)
    for dim in (2, -2, -3):
        with pytest.raises(ValueError, match=r"channel_dim=.*: must be a dimension of the input"):
            call(torch.randn(4, 3), channel_dim=dim)


@every_family
@pytest.mark.parametrize("mode", [True, False])
def test_channels_that_do_not_match(family, mode):
    function, options = families.function(family)
    x, three, four = torch.randn(6, 4, 5), torch.ones(3), torch.ones(4)
    with pytest.raises(ValueError, match=r"got 4 channels .* running_mean of shape \(3,\): must be \(4,\)"):
        function(x, three, four, training=mode, **options)
    with pytest.raises(ValueError, match=r"weight of shape \(3,\)"):
        function(x, four, four, three, training=mode, **options)
    with pytest.raises(ValueError, match=r"bias of shape \(4,\): must be \(5,\); check num_features or channel_dim"):
        function(x, None, None, None, four, training=mode, channel_dim=-1, **options)


@every_family
def test_a_single_value_per_channel_is_torchs_error(family):
    x = torch.randn(1, 3)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as theirs:
        F.batch_norm(x, None, None, training=True)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as ours:
        training(family)(x)
    assert str(ours.value) == str(theirs.value)


SIZED = [family for family in families.FAMILIES if families.SPECS[family].ghost_size != "none"]


@pytest.mark.parametrize("family", SIZED)
def test_ghost_sizes_are_bounded(family):
    """65,537 samples are refused before anything is allocated, by the layer and by the function."""
    spec, (function, options) = families.SPECS[family], families.function(family)
    for size in (65_537, spec.least_ghost_size - 1, 2.5, "4"):
        message = rf"ghost_size={size!r}: must be an integer from {spec.least_ghost_size} to 65536"
        with pytest.raises(ValueError, match=message):
            families.build(family, 2, ghost_size=size)
        with pytest.raises(ValueError, match=message):
            function(families.example(2), None, None, training=True, **(options | {"ghost_size": size}))


VALUES = {
    "ghost_size": [0], "noise_eps": [-1, "small"], "components": ["mean"], "law": ["x"], "dof": ["n"],
    "draw": ["shuffle", None], "normalizer": ["xbn", None], "min_std": [-1, None], "clamp_output": [-1, float("nan")],
    "self_weight": [1, -0.1, None, "0.1"], "alpha": [2, "1/N"], "running_var_from": ["x"], "r_max": [0.5],
    "d_max": [-1], "warmup_steps": [-1], "transition_steps": [1.5], "transition": ["smooth", None],
    "uneven": ["yes"], "generator": [3], "eps": [-1], "history": [-1], "prior_samples": [-1, None],
}  # fmt: skip


@every_family
def test_options_are_checked_by_the_layer_and_by_the_function(family):
    spec, (function, options) = families.SPECS[family], families.function(family)
    checked = {option.name for option in spec.options} | {"uneven", "eps"}
    checked |= {"generator"} if family in families.DRAWING else set()
    assert checked <= VALUES.keys(), "give values that the new option refuses"
    for option in checked:
        for value in VALUES[option]:
            with pytest.raises(ValueError, match=f"^{option}={value!r}: must be "):
                families.build(family, 2, **{option: value})
            if option in ("history", "uneven"):  # a function takes a History; only ranks read `uneven`
                continue
            with pytest.raises(ValueError, match=f"^{option}={value!r}: must be "):
                function(families.example(2), None, None, training=True, **(options | {option: value}))
    for noise in registry.noises() if spec.noise is not None else ():
        if noise is spec.noise:
            for option in {each.name for each in registry.options_of(noise)} | {"generator", "uneven", "ghost_size"}:
                with pytest.raises(ValueError, match=f"^{option}={VALUES[option][0]!r}: must be "):
                    noise(**({"ghost_size": 4} | {option: VALUES[option][0]}))
