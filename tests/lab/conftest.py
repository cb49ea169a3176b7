from dataclasses import replace

import pytest

from ghostnoise.lab.config import methods


@pytest.fixture
def raised(monkeypatch):
    """Sets the numerics number of a method."""

    def set_number(method, number):
        known = methods.methods()
        monkeypatch.setattr(methods, "methods", lambda: known | {method: replace(known[method], numerics=number)})

    return set_number
