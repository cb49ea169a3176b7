import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from ghostnoise import functional, methods
from ghostnoise.engine import op
from ghostnoise.ghosts import Itself
from ghostnoise.methods import Noise
from ghostnoise.moments import Moments

INDICES = torch.randint(6, (6, 5), generator=torch.Generator().manual_seed(0))


def constant_ghosts(batch):
    """Ghost batches of the normalized x that are the same whatever x is, as gradcheck needs it."""
    generator = torch.Generator().manual_seed(1)
    mean, var = (torch.rand(6, 2, dtype=torch.float64, generator=generator) + 0.5 for _ in range(2))
    return Moments(mean * batch.unit.sqrt(), var * batch.unit)


def constant_noise(shift=True, scale=True):
    return Noise(constant_ghosts, 1e-3, shift, scale, normalized=True)


METHODS = {
    "batch": (methods.batch(1e-5), None),
    "ghost": (methods.ghost(1e-5, 3), None),
    "ragged ghost": (methods.ghost(1e-5, 4), None),
    "exclusive": (methods.exclusive(1e-5, 3, 0.0), None),
    "ragged exclusive": (methods.exclusive(1e-5, 4, 0.0), None),
    "floored exclusive": (methods.exclusive(1e-5, None, 0.9), None),
    "instance, which has no layer": (methods.Normalizer(Itself(), 1e-5), None),
    "noisy batch": (methods.batch(1e-5), constant_noise()),
    "shifted batch": (methods.batch(1e-5), constant_noise(scale=False)),
    "scaled batch": (methods.batch(1e-5), constant_noise(shift=False)),
    "noisy ragged ghost": (methods.ghost(1e-5, 4), constant_noise()),
    "noisy exclusive": (methods.exclusive(1e-5, 3, 0.0), constant_noise()),
}
every_method = pytest.mark.parametrize(("normalizer", "noise"), METHODS.values(), ids=METHODS)


def inputs(dtype=torch.float64, shape=(6, 2, 3, 2)):
    generator = torch.Generator().manual_seed(2)
    tensors = (torch.randn(size, dtype=torch.float64, generator=generator) for size in (shape, (2,), (2,)))
    return tuple(tensor.to(dtype).requires_grad_() for tensor in tensors)


def test_a_method_without_a_layer_needs_nothing_from_the_engine():
    """Instance normalization is one line of `methods`; its gradient comes from differentiating `pool`."""
    x, weight, bias = inputs()
    y, _ = op.normalize(x, methods.Normalizer(Itself(), 1e-5), None, weight, bias)
    torch.testing.assert_close(y, torch.nn.functional.instance_norm(x, weight=weight, bias=bias))


@every_method
def test_gradients(normalizer, noise):
    def fused(x, weight, bias):
        return op.normalize(x, normalizer, noise, weight, bias)[0]

    def composite(x, weight, bias):
        return op._composite(x, weight, bias, normalizer, noise)[0]

    assert torch.autograd.gradcheck(fused, inputs(), check_forward_ad=True)
    assert torch.autograd.gradcheck(composite, inputs(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(fused, inputs())
    assert torch.autograd.gradgradcheck(composite, inputs())


@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_two_forms_agree(normalizer, noise, dtype):
    x, weight, bias = inputs(dtype)
    dy = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        for composite in (False, True):
            patch.setattr(op, "_needs_composite", lambda *tensors, answer=composite: answer)
            y, seen = op.normalize(x, normalizer, noise, weight, bias)
            tables = (*seen.moments, *seen.stats)
            results.append((y, *tables, *torch.autograd.grad(y, (x, weight, bias), dy)))
            assert not any(table.requires_grad for table in tables)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    for fused, composite in zip(*results, strict=True):
        torch.testing.assert_close(fused, composite, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(6, 2), (6, 2, 3)])
def test_inject_has_the_gradient_of_a_constant_transformation(shape):
    x, _, _ = inputs(shape=shape)

    def run(x):
        return op.inject(x, constant_noise())

    assert torch.autograd.gradcheck(run, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, x)
    dual = forward_ad.make_dual
    with forward_ad.dual_level():
        tangent = torch.randn_like(x)
        out = forward_ad.unpack_dual(run(dual(x.detach(), tangent)))
        torch.testing.assert_close(out.tangent, torch.autograd.grad(run(x), x, tangent)[0])


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
    y = op.normalize(x.detach(), *METHODS["batch"], weight, bias)[0]
    gradients = torch.autograd.grad(y.cos().sum(), (weight, bias))
    full = op.normalize(x, *METHODS["batch"], weight, bias)[0]
    for ours, theirs in zip(gradients, torch.autograd.grad(full.cos().sum(), (weight, bias)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not op.normalize(x.detach(), *METHODS["batch"])[0].requires_grad


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


# Tables of (B, C) that are saved beside x. Ghost batches' own statistics are smaller, and not counted.
SAVED = {"batch": 0, "ghost": 0, "exclusive": 2, "noisy batch": 2, "noise": 1, "analytical": 1}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_saved_for_backward(name):
    """A normalizer saves x and at most two tables, noise one table; x is saved as it is, not as a copy."""
    x = torch.randn(64, 32, 8, 8, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        CALLS[name](x)
    whole = [tensor.data_ptr() for tensor in saved if tensor.numel() > 64 * 32]
    assert whole == ([] if name in ("noise", "analytical") else [x.data_ptr()])
    assert sum(tensor.numel() == 64 * 32 for tensor in saved) == SAVED[name]
