import pytest

from ghostnoise.lab.config import methods


@pytest.fixture
def raised(monkeypatch):
    """Sets the numerics number of a method."""
    return lambda method, number: monkeypatch.setattr(methods.methods()[method], "numerics", number)


@pytest.fixture
def described(monkeypatch):
    """Adds the kind of a method, or replaces it."""
    return lambda kind: monkeypatch.setitem(methods.methods(), kind.__name__, kind)
