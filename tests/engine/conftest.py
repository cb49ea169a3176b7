import pytest

from ghostnoise.engine import library, native


@pytest.fixture(params=library.copies())
def passes(request, monkeypatch):
    """The native backend, on every copy of its passes that this machine can run."""
    handle = library.library().handle
    monkeypatch.setattr(library, "library", lambda: library.Library(handle, request.param))
    return native
