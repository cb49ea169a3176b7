"""`flex_norm` against loops over samples in float64, on every path that torch has, and the errors of a wrong decide."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import ghostnoise
from ghostnoise import flex_norm
from ghostnoise.tables import (
    Affine,
    Moments,
    drawn_samples,
    excluding_sample,
    ghost_batches,
    ghost_noise,
    normalize,
    over_channels,
    partition,
    whole_batch,
)
from support.reference import ghost_batch_of

B, C, EPS = 7, 4, 1e-5
INDICES = torch.tensor([[0, 1, 1], [6, 2, 3], [4, 4, 5], [0, 6, 2], [1, 2, 3], [5, 5, 0], [3, 1, 6]])
ORDER = torch.tensor([3, 0, 6, 1, 5, 2, 4])


def with_noise(m, weight, bias):
    norm = normalize(whole_batch(m), EPS)
    hat = norm.detach().moments(m.detach())
    noise = ghost_noise(whole_batch(hat), drawn_samples(hat, INDICES), 0.1)
    return norm.before(noise).then(weight, bias)


METHODS = {
    "instance": lambda m, weight, bias: normalize(m, 0.1).then(weight, bias),
    "batch": lambda m, weight, bias: normalize(whole_batch(m), EPS, 0.0, weight, bias),
    "ghosts": lambda m, weight, bias: normalize(ghost_batches(m, 3), EPS).then(weight, bias),
    "exclusive": lambda m, weight, bias: normalize(excluding_sample(m, 3), EPS, 0.0, weight, bias),
    "partition": lambda m, weight, bias: normalize(partition(m, ORDER, 2), EPS, 0.0, weight, bias),
    "drawn": lambda m, weight, bias: normalize(drawn_samples(m, INDICES), EPS).then(weight, bias),
    "groups": lambda m, weight, bias: normalize(over_channels(m, 2), 0.1).then(weight, bias),
    "responses": lambda m, weight, bias: Affine(0.0, (m.var + m.mean.square() + 0.1).rsqrt(), 0).then(weight, bias),
    "floored": lambda m, weight, bias: normalize(excluding_sample(m), EPS, 1.5, weight, bias),
    "noise": with_noise,
}
MEMBERS = {
    "instance": lambda b: [b],
    "batch": lambda b: range(B),
    "ghosts": lambda b: ghost_batch_of(b, B, 3),
    "exclusive": lambda b: [n for n in ghost_batch_of(b, B, 3) if n != b],
    "partition": lambda b: [ORDER[n] for n in ghost_batch_of(b, B, 2)],
    "drawn": lambda b: INDICES[b],
    "floored": lambda b: [n for n in range(B) if n != b],
    "noise": lambda b: range(B),
}


def reference(name, x, weight, bias):
    """Normalize sample by sample, (B, C, S)."""
    made = []
    if name in ("groups", "responses"):
        values = x.reshape(B, 2, -1) if name == "groups" else x
        mean, var = values.mean(2), values.var(2, correction=0)
        if name == "groups":
            mean, var = (table.repeat_interleave(C // 2, 1) for table in (mean, var))
        else:
            mean, var = torch.zeros_like(mean), var + mean.square()
        normal = (x - mean[..., None]) / (var + 0.1).sqrt()[..., None]
        return normal * weight[:, None] + bias[:, None]
    for b in range(B):
        values = torch.cat([x[n] for n in MEMBERS[name](b)], 1)
        std = (values.var(1, correction=0) + (0.1 if name == "instance" else EPS)).sqrt()
        std = std.clamp_min(1.5) if name == "floored" else std
        made.append((x[b] - values.mean(1, keepdim=True)) / std[:, None])
    normal = torch.stack(made)
    if name == "noise":
        hat = normal.detach()
        whole = hat.transpose(0, 1).flatten(1)
        drawn = hat[INDICES].transpose(1, 2).flatten(2)
        scale = ((whole.var(1, correction=0) + 0.1) / (drawn.var(2, correction=0) + 0.1)).sqrt()
        normal = (normal - (drawn.mean(2) - whole.mean(1))[..., None]) * scale[..., None]
    return normal * weight[:, None] + bias[:, None]


def inputs(*spatial, dtype=torch.float64, seed=0, offset=3.0):
    generator = torch.Generator().manual_seed(seed)
    x = offset + 2 * torch.randn(B, C, *spatial, dtype=torch.float64, generator=generator)
    weight, bias = torch.randn(2, C, dtype=torch.float64, generator=generator)
    dy = torch.randn(B, C, *spatial, dtype=torch.float64, generator=generator).to(dtype)
    return [t.to(dtype).requires_grad_() for t in (x, weight, bias)], dy


def run(name, x, weight, bias, **options):
    return flex_norm(x, METHODS[name], weight, bias, **options)


def expected(name, given, dy):
    """The output and all gradients in float64."""
    wide = [t.detach().double().requires_grad_() for t in given]
    y = reference(name, wide[0].flatten(2) if wide[0].ndim > 2 else wide[0][..., None], *wide[1:]).view(dy.shape)
    return [y.detach(), *torch.autograd.grad(y, wide, dy.double())]


def found(function, given, dy):
    y = function(*given)
    return [y.detach(), *torch.autograd.grad(y, given, dy)]


TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def assert_close(ours, theirs, dtype=torch.float64):
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other).abs().max() <= TOLERANCE[dtype] * max(other.abs().max().item(), 1)


every = pytest.mark.parametrize("name", METHODS)


@every
@pytest.mark.parametrize("spatial", [(), (1,), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_methods_equal_loops_over_samples(name, spatial, dtype):
    given, dy = inputs(*spatial, dtype=dtype)
    ours = found(partial(run, name), given, dy)
    assert [each.dtype for each in ours] == [dtype] * 4
    assert_close(ours, expected(name, given, dy), dtype)
    with torch.no_grad():
        assert torch.equal(run(name, *given), ours[0])


@every
def test_float32_is_accurate_far_from_zero(name):
    given, dy = inputs(2, 3, dtype=torch.float32, offset=1e4)
    if name != "responses":  # which divides by the mean itself
        assert_close(found(partial(run, name), given, dy), expected(name, given, dy), torch.float32)


@every
@pytest.mark.parametrize("spatial", [(), (3,)])
def test_derivatives(name, spatial):
    given, _ = inputs(*spatial)
    if name != "noise":  # whose noise is held constant
        assert gradcheck(partial(run, name), given, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(partial(run, name), given)
    dy = inputs(*spatial, seed=1)[1]
    for wanted in range(3):
        one = [t.detach().requires_grad_(n == wanted) for n, t in enumerate(given)]
        (gradient,) = torch.autograd.grad(run(name, *one), one[wanted], dy)
        torch.testing.assert_close(gradient, found(partial(run, name), given, dy)[1 + wanted])


@every
@pytest.mark.parametrize("spatial", [(), (2, 3)])
def test_the_paths_of_torch_agree(name, spatial):
    given, dy = inputs(*spatial, dtype=torch.float32)
    function, wanted = partial(run, name), expected(name, given, dy)

    def loss(*each):
        return (function(*each) * dy).sum()

    detached = [t.detach() for t in given]
    assert_close(torch.func.grad(loss, argnums=(0, 1, 2))(*detached), wanted[1:], torch.float32)
    batch = [torch.stack([t, t + 0.5]) for t in detached]
    one, other = torch.func.vmap(function)(*batch)
    assert_close([one], wanted[:1], torch.float32)
    assert_close([other], [run(name, *(t + 0.5 for t in detached)).double()], torch.float32)
    mapped = torch.func.vmap(function, in_dims=(None, 0, None))(detached[0], batch[1], detached[2])
    assert_close([mapped[0]], wanted[:1], torch.float32)
    for reentrant in (False, True):
        again = found(partial(checkpoint, function, use_reentrant=reentrant), given, dy) if not reentrant else None
        if reentrant:
            leaves = [t.detach().requires_grad_() for t in given]
            checkpoint(function, *leaves, use_reentrant=True).backward(dy)
            again = [wanted[0], *(t.grad for t in leaves)]
        assert_close(again, wanted, torch.float32)
    y = function(*given)
    y.backward(dy, retain_graph=True)
    first = [t.grad.clone() for t in given]
    y.backward(dy)
    assert_close([t.grad for t in given], [2 * gradient.double() for gradient in first], torch.float32)
    with torch.inference_mode():
        assert_close([function(*given)], wanted[:1], torch.float32)
    with torch.autograd.graph.save_on_cpu():
        assert_close(found(function, given, dy), wanted, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(found(function, given, dy), wanted, torch.float32)


@every
@pytest.mark.parametrize("spatial", [(), (2, 3)])
def test_compiled(name, spatial):
    torch.compiler.reset()
    given, dy = inputs(*spatial, dtype=torch.float32)
    compiled = torch.compile(partial(run, name), fullgraph=True, backend="aot_eager")
    assert_close(found(compiled, given, dy), expected(name, given, dy), torch.float32)


@every
def test_memory_formats(name):
    given, dy = inputs(2, 3, dtype=torch.float32)
    wanted = expected(name, given, dy)
    for arranged in (
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: torch.nn.functional.pad(t, [1, 2] * 4)[(slice(1, -2),) * 4],
    ):
        x = arranged(given[0].detach()).requires_grad_()
        ours = found(partial(run, name), [x, *given[1:]], arranged(dy))
        assert ours[0].stride() == torch.empty_like(x).stride()
        assert_close(ours, wanted, torch.float32)
    x = given[0].detach().movedim(1, -1).requires_grad_()
    ours = found(partial(run, name, channel_dim=-1), [x, *given[1:]], dy.movedim(1, -1))
    assert_close([each.movedim(-1, 1) for each in ours[:2]] + ours[2:], wanted, torch.float32)


@every
def test_a_mask_that_is_true_everywhere_changes_nothing(name):
    given, dy = inputs(2, 3)
    mask = torch.ones(B, 2, 3, dtype=torch.bool)
    assert_close(found(partial(run, name, mask=mask), given, dy), expected(name, given, dy))


def test_without_parameters_and_with_numbers():
    x = inputs(3)[0][0]
    torch.testing.assert_close(flex_norm(x, lambda m: Affine(1, 2.0, torch.zeros(()).double())), 2 * (x - 1))
    torch.testing.assert_close(flex_norm(x, lambda m: Affine(m.mean.new_ones(C), 1, m.mean[:, :1] * 0)), x - 1)


def test_what_does_not_need_x_does_not_save_it():
    x, saved = inputs(3)[0][0], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = flex_norm(x, lambda m: Affine(m.mean.detach(), 2.0, 0.0))
    assert saved == []
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 2.0))


hidden = torch.ones(C, dtype=torch.float64, requires_grad=True)
WRONG = [
    (lambda m: m, TypeError, "must return an Affine"),
    (lambda m: (m.mean, m.var), TypeError, "must return an Affine"),
    (lambda m: Affine("0", 1.0, 0.0), TypeError, "returned a str as center: must be a tensor or a number"),
    (lambda m: Affine(m.mean.float(), 1.0, 0.0), TypeError, "a center of dtype torch.float32: must be torch.float64"),
    (lambda m: Affine(0.0, m.mean[:2], 0.0), ValueError, r"a scale of shape \(2, 4\): must be \(B, C\) = \(7, 4\)"),
    (lambda m: Affine(0.0, 1.0, m.mean[None]), ValueError, r"a shift of shape \(1, 7, 4\)"),
    (lambda m: Affine(0.0, 1.0, m.mean[0, :3]), ValueError, r"a shift of shape \(3,\)"),
    (lambda m: Affine(m.mean, m.var.sqrt() / 0, 0.0), ValueError, "a scale that is not finite for finite moments"),
    (lambda m: Affine(m.mean, float("nan"), 0.0), ValueError, "a scale that is not finite"),
    (lambda m: Affine(m.mean * hidden, 1.0, 0.0), ValueError, r"a center that depends on a tensor of shape \(4,\)"),
    (lambda m: Affine(0.0, 1.0, (2 * hidden)[None]), ValueError, "a shift that depends on a tensor"),
    (lambda m: Affine(0.0, hidden[None], 0.0), ValueError, "a scale that depends on a tensor"),
]


@pytest.mark.parametrize(("decide", "kind", "words"), WRONG)
def test_errors_say_what_decide_returned(decide, kind, words):
    with pytest.raises(kind, match=words):
        flex_norm(inputs(3)[0][0], decide)


def test_a_decide_that_is_no_function():
    with pytest.raises(TypeError, match="must be a function of moments"):
        flex_norm(torch.randn(2, 3), Affine(0.0, 1.0, 0.0))


def test_values_that_are_not_finite_are_no_errors_of_decide():
    x = inputs(3)[0][0].detach()
    x[2, 1, 0] = torch.inf
    y = run("ghosts", x, None, None)
    assert y[:3, 1].isnan().any()
    assert y[3:].isfinite().all()
    large = Affine(0.0, 1e308, 0.0)
    assert flex_norm(x, lambda m: Affine(0.0, m.mean.new_full((B, C), 1e308), 0.0)).shape == x.shape
    assert flex_norm(x, lambda m: large).shape == x.shape


def test_a_single_position_has_no_variance():
    seen: list[Moments] = []
    x = inputs()[0][0]
    flex_norm(x, lambda m: seen.append(m) or normalize(whole_batch(m)))
    assert seen[0].n == 1
    assert seen[0].var.shape == (B, C)
    assert not seen[0].var.any()
    torch.testing.assert_close(seen[0].mean, x)


def test_it_is_public():
    assert ghostnoise.flex_norm is flex_norm
