from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from ghostnoise import functional, methods
from ghostnoise.engine import op
from ghostnoise.methods import Injection
from ghostnoise.moments import Affine

INDICES = torch.randint(6, (6, 5), generator=torch.Generator().manual_seed(0))
BOTH = Injection(1e-3, shift=True, scale=True)


def instance(moments):
    """A method that is not in the library: a new one needs nothing from the engine."""
    return methods.standardize(moments, 1e-5)


def noisy_batch(moments):
    """Batch norm followed by noise that is the same whatever x is, as gradcheck needs it."""
    generator = torch.Generator().manual_seed(1)
    tables = (torch.rand(6, 2, dtype=torch.float64, generator=generator) + 0.5 for _ in range(3))
    return methods.batch(moments, 1e-5).then(Affine(*tables))


METHODS = {
    "batch": partial(methods.batch, eps=1e-5),
    "ghost": partial(methods.ghost, eps=1e-5, ghost_size=4),
    "ragged ghost": partial(methods.ghost, eps=1e-5, ghost_size=5),
    "exclusive": partial(methods.exclusive, eps=1e-5, ghost_size=3, min_std=0.0),
    "instance": instance,
    "noisy batch": noisy_batch,
}


def inputs(dtype=torch.float64, shape=(6, 2, 3, 2)):
    generator = torch.Generator().manual_seed(2)
    tensors = (torch.randn(size, dtype=torch.float64, generator=generator) for size in (shape, (2,), (2,)))
    return tuple(tensor.to(dtype).requires_grad_() for tensor in tensors)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_gradients(method):
    def fused(x, weight, bias):
        return op.normalize(x, method, weight, bias)[0]

    def composite(x, weight, bias):
        return op._composite(x, weight, bias, method)[0]

    assert torch.autograd.gradcheck(fused, inputs(), check_forward_ad=True)
    assert torch.autograd.gradcheck(composite, inputs(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(fused, inputs())
    assert torch.autograd.gradgradcheck(composite, inputs())


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_two_forms_agree(method, dtype):
    x, weight, bias = inputs(dtype)
    dy = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)
    results = []
    for run in (op._Normalize.apply, op._composite):
        y, mean, var = run(x, weight, bias, method)
        results.append((y, mean, var, *torch.autograd.grad(y, (x, weight, bias), dy)))
        assert not mean.requires_grad
        assert not var.requires_grad
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    for fused, composite in zip(*results, strict=True):
        torch.testing.assert_close(fused, composite, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(6, 2), (6, 2, 3)])
def test_inject_has_the_gradient_of_a_constant_transformation(shape):
    x, _, _ = inputs(shape=shape)
    tables = [torch.rand(6, 2, dtype=torch.float64) + 0.5 for _ in range(3)]

    def run(x):
        return op.inject(x, lambda moments: Affine(*tables))

    assert torch.autograd.gradcheck(run, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, x)
    dual = forward_ad.make_dual
    with forward_ad.dual_level():
        tangent = torch.randn_like(x)
        out = forward_ad.unpack_dual(op.inject(dual(x.detach(), tangent), lambda moments: Affine(*tables)))
        torch.testing.assert_close(out.tangent, tangent * tables[1].view(6, 2, *[1] * (x.ndim - 2)))


def test_torch_func_transforms():
    x, weight, bias = inputs()
    loss = lambda x: functional.ghost_batch_norm(x, None, None, weight, bias, True, ghost_size=2).cos().sum()  # noqa: E731
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.autograd.grad(loss(x), x)[0])
    stacked = torch.stack([x.detach(), x.detach() * 2 + 1])
    mapped = torch.func.vmap(lambda x: functional.exclusive_batch_norm(x, None, None, training=True))(stacked)
    for one, of_all in zip(stacked, mapped, strict=True):
        torch.testing.assert_close(functional.exclusive_batch_norm(one, None, None, training=True), of_all)


@pytest.mark.parametrize("noise", [False, True])
def test_compile_without_graph_breaks(noise):
    """The composite form is what a compiler sees; it is one graph, with the results of eager."""
    x, weight, bias = inputs()

    def run(x, weight, bias):
        if noise:
            return functional.ghost_noise_batch_norm(x, None, None, weight, bias, True, ghost_size=5, indices=INDICES)
        return functional.ghost_batch_norm(x, None, None, weight, bias, True, ghost_size=4)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    y, expected = compiled(x, weight, bias), run(x, weight, bias)
    torch.testing.assert_close(y, expected)
    for ours, theirs in zip(
        torch.autograd.grad(y.cos().sum(), (x, weight, bias)),
        torch.autograd.grad(expected.cos().sum(), (x, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_only_what_needs_a_gradient_gets_one():
    x, weight, bias = inputs()
    y, _ = op.normalize(x.detach(), METHODS["batch"], weight, bias)
    gradients = torch.autograd.grad(y.cos().sum(), (weight, bias))
    full, _ = op.normalize(x, METHODS["batch"], weight, bias)
    for ours, theirs in zip(gradients, torch.autograd.grad(full.cos().sum(), (weight, bias)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not op.normalize(x.detach(), METHODS["batch"])[0].requires_grad


class Largest(TorchDispatchMode):
    """Records the most elements and bytes that any op returned."""

    def __init__(self):
        super().__init__()
        self.elements = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.elements = max(self.elements, tensor.numel())
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


CALLS = {
    "batch": lambda x: functional.batch_norm(x, None, None, training=True),
    "ghost": lambda x: functional.ghost_batch_norm(x, None, None, training=True, ghost_size=24),
    "exclusive": lambda x: functional.exclusive_batch_norm(x, None, None, training=True, ghost_size=24),
    "noisy batch": lambda x: functional.ghost_noise_batch_norm(x, None, None, training=True, ghost_size=200),
    "noise": lambda x: functional.ghost_noise(x, 200),
    "analytical": lambda x: functional.analytical_ghost_noise(x, 200, kind="conv"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_larger_than_x_is_made(call, dtype):
    """Not even in bytes, although statistics of bfloat16 are taken in float32, nor B x N x C for 200 draws."""
    x = torch.randn(64, 32, 16, 16).to(dtype).requires_grad_()
    with Largest() as largest:
        call(x).backward(torch.ones_like(x))
    assert largest.elements == x.numel()
    assert largest.bytes <= x.numel() * x.element_size()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_saved_for_backward(call):
    """A normalizer saves x and two tables, noise one table; x is saved as it is, not as a copy."""
    x = torch.randn(64, 32, 8, 8, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        call(x)
    whole = [tensor for tensor in saved if tensor.numel() > 64 * 32]
    tables = [tensor for tensor in saved if 1 < tensor.numel() <= 64 * 32]
    if call in (CALLS["noise"], CALLS["analytical"]):
        assert len(whole) == 0
        assert len(tables) == 1
    else:
        assert [tensor.data_ptr() for tensor in whole] == [x.data_ptr()]
        assert len(tables) == 2
