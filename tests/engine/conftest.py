import pytest

from copies import COPIES, FOUND
from ghostnoise.engine.backends.native import library
from ghostnoise.engine.backends.native import passes as native


@pytest.fixture(params=COPIES)
def passes(request, monkeypatch):
    """The native backend, on every copy of its passes that this machine can run."""
    monkeypatch.setattr(library, "library", lambda: library.Library(FOUND.handle, request.param))
    return native
