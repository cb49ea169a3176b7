import pytest

from ghostnoise.lab.data import transfer
from lab.data.serving import serving


@pytest.fixture
def server(monkeypatch):
    """A server without files, which is asked without a proxy, and for few bytes at a time."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(transfer, "CHUNK", 10_000)
    with serving({}) as made:
        yield made
