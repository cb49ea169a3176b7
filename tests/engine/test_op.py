import pytest
import torch
from ghostnoise.engine.plan import Plan
from ghostnoise.statistics.samples import Exclusive, GhostBatch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import ghostnoise
from ghostnoise import functional
from ghostnoise.engine import op
from support import plans
from support.plans import ConstantNoise, inputs, normalizer

# Noise that does not depend on x, so that gradcheck applies.
CONSTANT = {
    "noisy bn": Plan(normalizer(GhostBatch()), ConstantNoise(1e-3, "both")),
    "shifted bn": Plan(normalizer(GhostBatch()), ConstantNoise(1e-3, "shift")),
    "scaled bn": Plan(normalizer(GhostBatch()), ConstantNoise(1e-3, "scale")),
    "noisy ragged gbn": Plan(normalizer(GhostBatch(4)), ConstantNoise(1e-3, "both")),
    "noisy xbn": Plan(normalizer(Exclusive(3)), ConstantNoise(1e-3, "both")),
}
DIFFERENTIABLE = plans.NORMALIZERS | CONSTANT
INDICES = plans.indices()
ALL = DIFFERENTIABLE | plans.PLANS


def test_a_method_without_a_layer_needs_nothing_from_the_engine():
    """Instance normalization is a `Contributors` with a `pool`, which is differentiated."""
    x, weight, bias = inputs()
    y, _ = op.normalize(x, plans.PLANS["instance"], weight, bias)
    torch.testing.assert_close(y, torch.nn.functional.instance_norm(x, weight=weight, bias=bias))


@pytest.mark.parametrize("plan", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_gradients(plan):
    def eager(x, weight, bias):
        return op.normalize(x, plan, weight, bias)[0]

    def composite(x, weight, bias):
        return op._composite(x, weight, bias, plan)[0]

    assert torch.autograd.gradcheck(eager, inputs(), check_forward_ad=True)
    assert torch.autograd.gradcheck(composite, inputs(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(eager, inputs())
    assert torch.autograd.gradgradcheck(composite, inputs())


FORMS = {"eager": (False, False), "registered": (False, True), "composite": (True, False)}


@pytest.mark.parametrize("plan", ALL.values(), ids=ALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 2), (6, 2, 3, 2)])
def test_the_forms_agree(plan, dtype, shape, monkeypatch):
    if len(shape) == 2 and plan is plans.PLANS["instance"]:
        return  # a single value has no variance: its gradient is rounding error
    x, weight, bias = inputs(dtype, shape)
    dy = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)
    results = {}
    for form, (composite, registered) in FORMS.items():
        if registered and isinstance(plan.noise, ConstantNoise):
            continue
        monkeypatch.setattr(op, "needs_operators", lambda *tensors, answer=composite: answer)
        monkeypatch.setattr(op, "_needs_registered", lambda answer=registered: answer)
        y, measured = op.normalize(x, plan, weight, bias)
        tables = measured.moments if plan.normalizer.contributors.keeps_moments else measured.pooled
        tables = [table.double() for table in tables]  # of a single position, a backend may keep the dtype of x
        results[form] = (y, *tables, *torch.autograd.grad(y, (x, weight, bias), dy))
        assert not any(table.requires_grad for table in (*measured.moments, *measured.pooled))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    eager = results.pop("eager")
    for form, found in results.items():
        for ours, theirs in zip(found, eager, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text, form=form: f"{form}: {text}"
            )


@pytest.mark.parametrize("shape", [(6, 2), (6, 2, 3)])
def test_inject_has_the_gradient_of_a_constant_transformation(shape):
    x, _, _ = inputs(shape=shape)

    def run(x):
        return op.inject(x, ConstantNoise(1e-3, "both"))[0]

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
    """One graph, with the results of eager."""
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
    y = op.normalize(x.detach(), plans.PLANS["bn"], weight, bias)[0]
    gradients = torch.autograd.grad(y.cos().sum(), (weight, bias))
    full = op.normalize(x, plans.PLANS["bn"], weight, bias)[0]
    for ours, theirs in zip(gradients, torch.autograd.grad(full.cos().sum(), (weight, bias)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not op.normalize(x.detach(), plans.PLANS["bn"])[0].requires_grad


class Largest(TorchDispatchMode):
    """Records the largest number of elements and of bytes that an operator returned."""

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
    "analytical": lambda x: functional.analytical_ghost_noise(x, 200, law="conv"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_larger_than_x_is_allocated(call, dtype, monkeypatch):
    """Not even in bytes, although statistics of bfloat16 are computed in float32, nor B x N x C for 200 draws."""
    monkeypatch.setattr(op, "_needs_registered", lambda: False)  # so that the mode sees the operators of `aten`
    x = torch.randn(64, 32, 16, 16).to(dtype).requires_grad_()
    with ghostnoise.backend("aten"), Largest() as largest:
        call(x).backward(torch.ones_like(x))
    assert largest.elements == x.numel()
    assert largest.bytes <= x.numel() * x.element_size()


# The number of tables (B, C) that are saved besides x. The statistics of ghost batches are smaller and not counted.
SAVED = {"batch": 0, "ghost": 0, "exclusive": 2, "noisy batch": 2, "noise": 1, "analytical": 1}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_saved_for_backward(name):
    """A normalizer saves x itself and at most two tables; noise saves one table."""
    x = torch.randn(64, 32, 8, 8, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        CALLS[name](x)
    whole = [tensor.data_ptr() for tensor in saved if tensor.numel() > 64 * 32]
    assert whole == ([] if name in ("noise", "analytical") else [x.data_ptr()])
    assert sum(tensor.numel() == 64 * 32 for tensor in saved) == SAVED[name]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 32), (64, 32, 4, 4)])
def test_eager_and_dispatch_modes_give_the_same(name, dtype, shape):
    """A mode sees the registered op; the numbers are those without it, bit for bit."""
    results = []
    for mode in (None, Largest()):
        torch.manual_seed(0)
        x = torch.randn(shape).to(dtype).requires_grad_()
        with ghostnoise.backend("aten"):
            if mode is None:
                y = CALLS[name](x)
                y.backward(torch.ones_like(x))
            else:
                with mode:
                    y = CALLS[name](x)
                    y.backward(torch.ones_like(x))
        results.append((y, x.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_ranks_are_refused_where_they_cannot_exchange():
    with pytest.raises(RuntimeError, match=r"process_group with torch.func"):
        op._check_no_ranks(object())
