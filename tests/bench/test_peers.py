import sys

import pytest
import torch

from ghostnoise import functional
from ghostnoise.bench import peers
from ghostnoise.bench.rows import Row
from ghostnoise.lab.errors import UserError

# Stand-ins with the interfaces of the two libraries, for where they are not installed.
COMPOSER = """
import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import module_surgery

class Trainer(Algorithm):
    pass

class GhostBatchNorm2d(torch.nn.Module):
    def __init__(self, base_batchnorm, ghost_batch_size):
        super().__init__()
        self.base, self.size = base_batchnorm, ghost_batch_size

    def forward(self, x):
        return torch.cat([self.base(chunk) for chunk in x.split(self.size)])

GhostBatchNorm1d = GhostBatchNorm2d
"""
TABNET = """
import torch

class GBN(torch.nn.Module):
    def __init__(self, input_dim, virtual_batch_size=128, momentum=0.01):
        super().__init__()
        self.bn, self.size = torch.nn.BatchNorm1d(input_dim), virtual_batch_size

    def forward(self, x):
        return torch.cat([self.bn(chunk) for chunk in x.split(self.size)])
"""


RELEASED_NORM = """
import torch

class {name}(torch.nn.BatchNorm2d):
    def __init__(self, channels, batch_size):
        super().__init__(channels)
"""
RELEASED_NOISE = """
import torch

class GhostNoiseInjectorR(torch.nn.Module):
    def __init__(self, batch_size, channel_last):
        super().__init__()
        self.given = batch_size, channel_last

    def forward(self, x):
        return x + 1
"""


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    folder = tmp_path / "composer" / "algorithms" / "ghost_batchnorm"
    folder.mkdir(parents=True)
    (folder / "ghost_batchnorm.py").write_text(COMPOSER)
    (tmp_path / "composer" / "__init__.py").write_text("raise ImportError('the trainer is not needed')")
    (tmp_path / "pytorch_tabnet").mkdir()
    (tmp_path / "pytorch_tabnet" / "tab_network.py").write_text(TABNET)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("composer", "pytorch_tabnet"))]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.startswith("pytorch_tabnet")]:
        del sys.modules[name]


@pytest.mark.usefixtures("absent")
def test_absent_peers_are_named_with_what_brings_them():
    assert peers.absent() == [
        "Composer's ghost batch norm is not installed: pip install --no-deps mosaicml",
        "tabnet's ghost batch norm is not installed: pip install --no-deps pytorch-tabnet",
    ]
    assert peers.ghost_batch_norms(Row((64, 4, 2, 2))) == {}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("row", [Row((64, 4, 3, 2)), Row((64, 4, 3, 2), "channels_last"), Row((64, 4))])
def test_installed_peers_normalize_ghost_batches(row):
    assert peers.absent() == []
    layers = peers.ghost_batch_norms(row)
    assert list(layers) == ["Composer GBN-32", "tabnet GBN-32"]
    x, _ = row.draw(torch.device("cpu"))
    expected = functional.ghost_batch_norm(x, None, None, training=True, ghost_size=32)
    for layer in layers.values():
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("installed")
def test_loading_composer_leaves_no_stand_ins():
    before = set(sys.modules)
    assert peers.composer() is not None
    assert not {name for name in set(sys.modules) - before if name.startswith("composer")}


def test_tokens_have_no_ghost_batch_norm():
    assert peers.ghost_batch_norms(Row((64, 4, 8))) == {}


@pytest.mark.parametrize(("shape", "channel_dim"), [((6, 3, 4, 2), 1), ((6, 3), 1), ((6, 4, 3), -1)])
def test_the_naive_loop_is_ghost_noise(shape, channel_dim, monkeypatch):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    indices = torch.arange(24).remainder(5).view(6, 4)
    drawn = iter(indices)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: next(drawn))
    naive = peers.NaiveGhostNoise(4, channel_dim)(x)
    ours = functional.ghost_noise(x, 4, channel_dim=channel_dim, indices=indices)
    torch.testing.assert_close(naive, ours, rtol=1e-9, atol=1e-9)
    dy = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(shape)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (naive, ours)), rtol=1e-9, atol=1e-9)


@pytest.fixture
def checkout(tmp_path):
    """A folder with files like those of the paper's repository."""
    folder = tmp_path / "nodo"
    folder.mkdir()
    for file, name in (("ghost_batch_norm", "GhostBatchNorm2d"), ("exclusive_batch_norm", "ExclusiveBatchNorm2d")):
        (folder / f"{file}.py").write_text(RELEASED_NORM.format(name=name))
    (folder / "ghost_noise_injector_replacement.py").write_text(RELEASED_NOISE)
    return tmp_path


@pytest.mark.parametrize("row", [Row((64, 4, 3, 2)), Row((64, 4)), Row((64, 5, 8))])
def test_the_papers_code_is_a_peer_if_its_folder_is_given(checkout, row):
    layers = peers.released_layers(row, checkout)
    x, _ = row.draw(torch.device("cpu"))
    assert all(layer(x).shape == x.shape for layer, _ in layers.values())
    assert {name: noise for name, (_, noise) in layers.items()} == (
        {"released GNI-12": True}
        if row.tokens
        else {"released GNI-32": True, "released GBN-32": False, "released XBN-32": False}
    )
    noise, _ = layers[f"released GNI-{row.ghost_size}"]
    assert noise.given == (row.ghost_size, row.tokens)


def test_a_folder_without_the_papers_code_is_refused(checkout, tmp_path):
    (checkout / "nodo" / "exclusive_batch_norm.py").write_text("x = 1")
    for folder, what in ((checkout, "ExclusiveBatchNorm2d"), (tmp_path / "other", "ghost_batch_norm.py")):
        with pytest.raises(UserError, match=rf"--released .*{what}.*give the folder of a checkout"):
            peers.released(folder)
