import pytest

from ghostnoise.lab.data import download
from support.file_server import serving


@pytest.fixture
def server(monkeypatch):
    """A server without files, used without a proxy, in small chunks and without encryption."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "SCHEMES", download.SCHEMES | {"http"})
    monkeypatch.setattr(download, "CHUNK", 10_000)
    with serving({}) as made:
        yield made
