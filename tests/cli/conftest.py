import pytest

from ghostnoise.lab.data import download
from support.file_server import serving

NETS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

def bare():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())

def batches():
    torch.manual_seed(1)
    return [(torch.randn(100, 1, 8, 8), torch.zeros(100)) for _ in range(20)]
"""


@pytest.fixture
def server(monkeypatch):
    """A server without files, used without a proxy and in small chunks."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "CHUNK", 10_000)
    with serving({}) as made:
        yield made


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """The name of a module of the user in the current folder."""
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return name


@pytest.fixture(autouse=True)
def no_terminal_width(monkeypatch):
    """Output as in a pipe: test runners may set the width of a terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)
