"""Ghost batch norms of other libraries, before and after their conversion."""

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pytorch_tabnet import tab_network
from torch import nn

import ghostnoise
from ghostnoise.conversion import wrappers
from support import ghost_wrappers, networks

TUTORIAL = Path(__file__).parents[2] / "docs/tutorials/tabular.md"
SIZE = 8
# The wrapper, the shape of its input without the batch, and the option that updates the running statistics as it does.
WRAPPERS = {
    "pytorch-tabnet": (lambda: tab_network.GBN(3, SIZE, momentum=0.02), (3,), "each"),
    "pytorch_tabular": (lambda: ghost_wrappers.GBN(3, SIZE), (3,), "each"),
    "Composer": (lambda: ghost_wrappers.ComposerGhostBatchNorm2d(nn.BatchNorm2d(3), SIZE), (3, 4, 4), "each-scaled"),
}


@pytest.fixture(params=WRAPPERS)
def case(request):
    """A model with a wrapper in float64, a copy of it, a function that makes an input, and the option."""
    build, shape, option = WRAPPERS[request.param]
    torch.manual_seed(0)
    model = nn.Sequential(build()).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model, copy.deepcopy(model), lambda size: torch.randn(size, *shape, dtype=torch.float64) * 2 + 1, option


def assert_equal_states(ours, theirs):
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-12, atol=1e-12)


def test_outputs_gradients_and_running_statistics_equal_theirs(case):
    theirs, ours, batch, option = case
    ghostnoise.convert(ours, "gbn", running_var_from=option)
    for _ in range(3):
        x = batch(4 * SIZE)
        results = []
        for model in (ours, theirs):
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            results.append((y, *torch.autograd.grad(y.pow(3).sum(), [leaf, *model.parameters()])))
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    assert_equal_states(ours, theirs)
    assert int(ours.state_dict()[next(key for key in ours.state_dict() if "num_batches" in key)]) == 12
    x = batch(3 * SIZE)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-12, atol=1e-12)


def test_by_default_the_momentum_is_applied_once_per_batch(case):
    theirs, ours, batch, _ = case
    ghostnoise.convert(ours, "gbn")
    x = batch(4 * SIZE)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    buffers = {name.rsplit(".")[-1]: buffer for name, buffer in ours.named_buffers()}
    momentum = wrappers.wrappers(ours)[0].norm.momentum
    expected = momentum * x.transpose(0, 1).flatten(1).mean(1)
    torch.testing.assert_close(buffers["running_mean"], expected, rtol=1e-12, atol=1e-12)
    assert buffers["num_batches_tracked"] == 1


def test_state_dict_keys_stay_and_load_both_ways(case):
    theirs, ours, batch, _ = case
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    keys = list(ours.state_dict())
    ghostnoise.convert(ours, "gbn")
    assert list(ours.state_dict()) == keys
    ours(batch(2 * SIZE)).pow(3).sum().backward()
    optimizer.step()
    theirs.load_state_dict(ours.state_dict())
    assert_equal_states(ours, theirs)
    theirs(batch(2 * SIZE))
    ours.load_state_dict(theirs.state_dict())
    assert_equal_states(ours, theirs)


def test_revert_restores_the_wrapper(case):
    theirs, ours, batch, _ = case
    wrapper = ours[0]
    ghostnoise.revert(ghostnoise.convert(ours, "gni", ghost_size=2))
    assert ours[0] is wrapper
    assert type(wrapper) is type(theirs[0])
    x = batch(20)
    assert torch.equal(ours(x), theirs(x))
    assert_equal_states(ours, theirs)


def test_copies_and_saved_networks_compute_the_same():
    ours = ghostnoise.convert(nn.Sequential(tab_network.GBN(3, SIZE)), "gbn")
    x = torch.randn(4 * SIZE, 3)
    expected = ours(x)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(x), expected)
        assert type(twin[0]) is type(ours[0])
        assert isinstance(twin[0], tab_network.GBN)


def test_any_method_and_a_ghost_size_that_is_given(case):
    _, ours, batch, _ = case
    for method, size in (("gni", 4), ("xbn", SIZE), ("bn", ...)):
        ghostnoise.convert(ours, method, size)
        ours(batch(12))
    assert wrappers.wrappers(ours)[0].size == SIZE
    (row,) = ghostnoise.summary(ours)
    assert row.method == "bn"
    assert row.notes.startswith("in ")
    ghostnoise.convert(ours, "gbn")
    assert ghostnoise.summary(ours)[0].ghost_size == SIZE


def test_without_a_ghost_size_other_batch_norms_stay(case):
    _, ours, _, _ = case
    ours.append(nn.BatchNorm1d(3))
    ghostnoise.convert(ours, "gbn")
    assert type(ours[1]) is nn.BatchNorm1d
    assert len(ghostnoise.summary(ours)) == 1
    with pytest.raises(ValueError, match="ghost_size is missing"):
        ghostnoise.convert(ours, "gbn", where=lambda name, module: True)
    ghostnoise.convert(ours, "gbn", ghost_size=16)
    assert [row.ghost_size for row in ghostnoise.summary(ours)] == [16, 16]


def test_batches_that_do_not_divide_evenly():
    """Theirs divides 20 samples into 7, 7 and 6; ours into 8 and 12."""
    theirs = tab_network.GBN(3, SIZE)
    ours = ghostnoise.convert(nn.Sequential(copy.deepcopy(theirs)), "gbn")
    x = torch.randn(20, 3)
    assert [len(part) for part in x.chunk(3)] == [7, 7, 6]
    expected = torch.cat([nn.BatchNorm1d(3)(x[:8]), nn.BatchNorm1d(3)(x[8:])])
    torch.testing.assert_close(ours(x), expected)
    torch.testing.assert_close(theirs(x)[:7], nn.BatchNorm1d(3)(x[:7]))


def test_excluded_and_shared_batch_norms():
    model = nn.Sequential(*(tab_network.GBN(3, SIZE) for _ in range(3)))
    ghostnoise.convert(model, "gbn", where=lambda name, module: name == "1.bn")
    assert [type(wrapper) is tab_network.GBN for wrapper in model] == [True, False, True]
    model[2].bn = model[0].bn
    ghostnoise.convert(model, "gbn")
    assert all(isinstance(wrapper, wrappers.Undivided) for wrapper in model)
    ghostnoise.revert(model)
    assert all(type(wrapper) is tab_network.GBN for wrapper in model)


class OwnForward(tab_network.GBN):
    def forward(self, x):
        return super().forward(x) + 1


def test_a_subclass_with_its_own_forward_is_refused():
    model = nn.Sequential(OwnForward(3, SIZE))
    with pytest.raises(ValueError, match=r"'0' \(OwnForward\) is a pytorch_tabnet.tab_network.GBN with a forward of"):
        ghostnoise.convert(model, "gbn")
    assert type(model[0].bn) is nn.BatchNorm1d


def train(model, steps):
    """Return the losses of a network that learns the sign of a column."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 6, dtype=torch.float64)
        output, sparsity = model(x)
        loss = nn.functional.cross_entropy(output, (x[:, 0] > 0).long()) - 1e-3 * sparsity
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_small_tabnet_learns_as_before():
    torch.manual_seed(0)
    settings = {"n_d": 4, "n_a": 4, "n_steps": 2, "virtual_batch_size": 16}
    theirs = tab_network.TabNet(6, 2, **settings, group_attention_matrix=torch.eye(6).double()).double()
    ours = ghostnoise.convert(copy.deepcopy(theirs), "gbn", running_var_from="each")
    before, after = train(theirs, 30), train(ours, 30)
    assert after == pytest.approx(before, rel=1e-6)
    assert after[-1] < 0.7 * after[0]
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-5)


def test_the_libraries_are_not_imported():
    code = """
import sys, torch, ghostnoise
for name in ("pytorch_tabnet", "pytorch_tabular", "composer"):
    sys.modules[name] = None
ghostnoise.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(3)), "gbn", 4)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_callback_of_the_tutorial_converts_the_network_of_a_classifier():
    (code,) = re.findall(r"^```python\n(import ghostnoise\n.*?)^```", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE)
    data = """
import numpy
table = numpy.random.default_rng(0).normal(size=(512, 5)).astype("float32")
labels = (table[:, 0] > 0).astype(int)
"""
    smaller = code.replace(
        "batch_size=16384, virtual_batch_size=128", "batch_size=256, virtual_batch_size=32, max_epochs=2"
    )
    assert smaller != code
    shown = "rows = ghostnoise.summary(classifier.network)\nprint(len(rows), {row.ghost_size for row in rows})\n"
    done = subprocess.run([sys.executable, "-c", data + smaller + shown], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "19 {32}"  # 4 in the splitter, 4 and an attention in each of 3 steps


# Batch renormalization of torchrl, which is a layer of its own, and layers of torch.nn instead of any of these.


def renorm(smooth=False):
    torch.manual_seed(0)
    layer = ghost_wrappers.BatchRenorm1d(3, warmup_steps=4, smooth=smooth, max_r=2.0, eps=1e-4)
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    return nn.Sequential(nn.Linear(3, 3), layer).double()


@pytest.mark.parametrize("smooth", [False, True])
def test_batch_renorm_of_torchrl_trains_as_before(smooth):
    theirs = renorm(smooth)
    ours = copy.deepcopy(theirs)
    layer, parameters = ours[1], list(ours.parameters())
    ghostnoise.convert(ours, "brn")
    assert ours[1] is layer
    assert type(layer) is ghostnoise.BatchRenorm1d
    assert (layer.r_max, layer.momentum, layer.eps) == (2.0, 0.01, 1e-4)
    assert all(one is other for one, other in zip(ours.parameters(), parameters, strict=True))
    for _ in range(5):
        x = torch.randn(16, 3, dtype=torch.float64) * 2 + 1
        results = [torch.autograd.grad(model(x).pow(3).sum(), list(model.parameters())) for model in (ours, theirs)]
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    assert_equal_states(ours, theirs)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    assert ghostnoise.summary(ours)[0].was == "BatchRenorm1d"


def test_options_that_are_given_and_other_methods():
    model = ghostnoise.convert(renorm(), "brn", warmup_steps=7)
    assert (model[1].warmup_steps, model[1].r_max) == (7, 2.0)
    ghostnoise.convert(model, "gbn", 4)
    model(torch.randn(8, 3).double())
    ghostnoise.convert(model, "brn")
    assert model[1].warmup_steps == 4


@pytest.mark.parametrize("method", [("brn",), ("gni", 4)])
def test_revert_restores_batch_renorm_of_torchrl(method):
    model, plain = renorm(smooth=True), renorm(smooth=True)
    before = vars(model[1]).keys()
    ghostnoise.revert(ghostnoise.convert(model, *method))
    assert type(model[1]) is ghost_wrappers.BatchRenorm1d
    assert vars(model[1]).keys() == before
    x = torch.randn(8, 3).double()
    assert torch.equal(model(x), plain(x))


def test_a_subclass_of_it_with_its_own_forward_stays():
    class Own(ghost_wrappers.BatchRenorm1d):
        def forward(self, x):
            return super().forward(x) + 1

    with pytest.raises(ValueError, match="no batch norm in this Sequential"):
        ghostnoise.convert(nn.Sequential(Own(3)), "brn")


FOREIGN = {name: (build, shape) for name, (build, shape, _) in WRAPPERS.items()} | {
    "torchrl": (lambda: ghost_wrappers.BatchRenorm1d(3), (3,)),
    "torch": (lambda: nn.BatchNorm1d(3), (3,)),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_layers_of_torch_with_the_same_keys(name):
    """Nothing of the other library or of this one is left, and eval mode is that of the trained network."""
    build, shape = FOREIGN[name]
    model = nn.Sequential(build())
    keys, x = list(model.state_dict()), torch.randn(2 * SIZE, *shape)
    ghostnoise.convert(model, "gbn", SIZE)
    model(x)
    expected = model.eval()(x)
    ghostnoise.revert(model, to="nn")
    assert {type(module).__module__.split(".")[0] for module in model.modules()} == {"torch"}
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(x), expected)
    model.train()(x)
    repr(model)
    assert not any("ghostnoise" in key for module in model.modules() for key in vars(module))


def test_synchronized_and_activated_layers_and_subclasses():
    activated = networks.layer("BatchNormAct2d")

    class Named(nn.BatchNorm2d):
        pass

    model = nn.Sequential(activated(3), Named(3), nn.LazyBatchNorm2d())
    ghostnoise.convert(model, "gbn", 4)
    ghostnoise.revert(model, to="nn")
    assert [type(layer) for layer in model] == [activated, nn.BatchNorm2d, nn.LazyBatchNorm2d]
    with pytest.raises(ValueError, match="to='torch': must be one of 'original', 'nn'"):
        ghostnoise.revert(model, to="torch")
