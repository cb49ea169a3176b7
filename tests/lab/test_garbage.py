"""Garbage collection while many objects are made."""

import gc

import pytest

from ghostnoise.lab.garbage import uncollected


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_before_afterwards(enabled):
    @uncollected()
    def work(nested):
        assert not gc.isenabled()
        if nested:
            work(False)
            assert not gc.isenabled()
        else:
            raise ZeroDivisionError

    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError):
            work(True)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
