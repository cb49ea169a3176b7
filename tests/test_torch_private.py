import ast
import contextlib
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ghostnoise
from ghostnoise import torch_private

SOURCE = Path(ghostnoise.__file__).parent
# Attributes that torch's documentation names although they start with an underscore: none.
METHODS = ("_is_view", "_is_zerotensor", "_base", "_version", "_typed_storage")


def private_uses(path):
    """Yield the private attributes of torch that a file uses."""
    tree = ast.parse(path.read_text())
    roots = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {each.asname for each in node.names if each.name.startswith("torch.") and each.asname}
            yield from (each.name for each in node.names if each.name.startswith("torch.") and "._" in each.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            roots |= {each.asname or each.name for each in node.names}
            for each in node.names:
                if each.name.startswith("_") or "._" in node.module:
                    yield f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            chain = node.value
            while isinstance(chain, ast.Attribute):
                chain = chain.value
            if (isinstance(chain, ast.Name) and chain.id in roots) or node.attr in METHODS:
                yield ast.unparse(node)


def test_private_attributes_of_torch_are_used_in_one_file():
    found = {
        str(path.relative_to(SOURCE)): uses
        for path in SOURCE.rglob("*.py")
        if path.name != "torch_private.py" and (uses := list(private_uses(path)))
    }
    assert found == {}


def test_private_uses_are_found(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(
        "import torch\nimport torch._dynamo\nfrom torch.nn.modules.batchnorm import _BatchNorm\n"
        "from torch import nn\ntorch._C.x()\nnn.modules._y\ntorch.__version__\nself._z\nx._is_view()"
    )
    assert sorted(private_uses(path)) == [
        "nn.modules._y", "torch._C", "torch._dynamo", "torch.nn.modules.batchnorm._BatchNorm", "x._is_view",
    ]  # fmt: skip


def test_every_name_is_exported_and_there():
    for name in torch_private.__all__:
        assert getattr(torch_private, name) is not None


def test_transforms():
    seen = []
    assert not torch_private.transformed()
    torch.func.grad(lambda x: seen.append(torch_private.transformed()) or x.sum())(torch.ones(3))
    assert seen == [True]


def test_vmap_levels():
    seen = []

    def inner(x, y):
        seen.append((len(torch_private.vmap_levels(x)), len(torch_private.vmap_levels(y))))
        return x + y

    torch.func.vmap(inner, (0, None))(torch.ones(3, 2), torch.ones(2))
    torch.func.vmap(torch.func.vmap(inner, (0, None)), (0, 0))(torch.ones(3, 2), torch.ones(3, 2))
    assert seen == [(1, 0), (2, 1)]
    assert torch_private.vmap_levels(torch.ones(2)) == set()


def test_tangents():
    x = torch.ones(3)
    assert not torch_private.has_tangent(x, None)
    with forward_ad.dual_level():
        assert torch_private.has_tangent(None, forward_ad.make_dual(x, x))
        assert not torch_private.has_tangent(x)


def test_tensors_without_values():
    seen = []
    for mode in (contextlib.nullcontext(), TorchDispatchMode(), FakeTensorMode()):
        with mode:
            seen.append(torch_private.is_symbolic())
    make_fx(lambda x: seen.append(torch_private.is_symbolic()) or x + 1)(torch.ones(2))
    assert seen == [False, False, True, True]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_traces():
    seen = []
    assert not torch_private.is_traced()
    torch.jit.trace(lambda x: seen.append(torch_private.is_traced()) or x + 1, torch.ones(2), check_trace=False)
    assert seen == [True]


def test_backward_passes():
    seen = []

    def run(x):
        seen.append(torch_private.in_backward())
        return x.cos()

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]


def test_gamma_draws_follow_the_generator():
    shape = torch.full((1000,), 3.0, dtype=torch.float64)
    first, second = (torch_private.standard_gamma(shape, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    assert abs(first.mean() - 3) < 5 * (3 / 1000) ** 0.5
    torch_private.standard_gamma(shape)


@pytest.mark.usefixtures("one_rank")
def test_groups_by_name():
    group = torch.distributed.new_group([0])
    assert torch_private.process_group_by_name(group.group_name) is group
    with pytest.raises(RuntimeError):
        torch_private.process_group_by_name("unknown")


def test_the_state_of_a_batch_norm_is_that_of_its_attributes():
    def attributes(layer):
        return layer.weight, layer.bias, layer.running_mean, layer.running_var, layer.num_batches_tracked

    plain, untracked = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    assert all(
        one is other for one, other in zip(torch_private.batch_norm_state(plain), attributes(plain), strict=True)
    )
    assert torch_private.batch_norm_state(untracked) == (None,) * 5
    del plain.bias
    plain.bias = torch.ones(3)  # as wrappers replace a parameter
    assert torch_private.batch_norm_state(plain)[1] is plain.bias
    torch.nn.utils.parametrize.register_parametrization(plain, "weight", torch.nn.Softplus())
    assert torch.equal(torch_private.batch_norm_state(plain)[0], plain.weight)


def test_an_eager_call_of_an_autograd_function():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * 2

    x = torch.ones(3, requires_grad=True)
    torch_private.eager_apply(Double)(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_a_tensor_of_a_transform_that_has_ended():
    """It is still a wrapper of `torch.func`, outside of all transforms."""
    kept = []
    x = torch.randn(8, 3, 4)
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(x)
    torch.testing.assert_close(ghostnoise.BatchNorm1d(3)(kept[0]), ghostnoise.BatchNorm1d(3)(x))
