import pytest
from ghostnoise.engine.backends.native import library
from ghostnoise.engine.backends.native.backend import Native

from support.copies import COPIES, FOUND


@pytest.fixture(params=COPIES)
def native(request, monkeypatch):
    """The native backend, with each copy of its functions that this machine can run."""
    monkeypatch.setattr(library, "library", lambda: library.Library(FOUND.handle, request.param))
    return Native()
