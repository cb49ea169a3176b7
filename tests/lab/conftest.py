from dataclasses import replace

import pytest

from ghostnoise.lab.config import methods
from ghostnoise.lab.config.schema import NormSettings


@pytest.fixture
def raised(monkeypatch):
    """Sets the numerics number of a method."""

    def set_number(method, number):
        known = methods.methods()
        monkeypatch.setattr(methods, "methods", lambda: known | {method: replace(known[method], numerics=number)})

    return set_number


@pytest.fixture
def described(monkeypatch):
    """Adds the description of a method, or replaces it."""

    def forget():
        for derived in (methods.options, NormSettings.owners, NormSettings.defaults):
            derived.cache_clear()

    def describe(info):
        monkeypatch.setitem(methods.methods(), info.name, info)
        forget()

    yield describe
    monkeypatch.undo()
    forget()
