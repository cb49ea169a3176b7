import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ghostnoise.lab.data.pickles import unpickle
from ghostnoise.lab.errors import UserError
from lab.data.writing import python2_pickle, random_arrays

PATH = Path("data_batch_1")
ARRAYS = random_arrays((3, 2, 2), 10, 7, seed=0)
OFFICIAL = python2_pickle(ARRAYS.pixels, ARRAYS.labels.tolist())


class Runs:
    """Calls something when it is unpickled."""

    def __init__(self, call, *arguments):
        self.call = call, arguments

    def __reduce__(self):
        return self.call


def test_a_file_like_the_official_ones():
    found = unpickle(OFFICIAL, PATH)
    assert found[b"labels"] == ARRAYS.labels.tolist()
    assert found[b"batch_label"] == b"one"
    assert found[b"data"].dtype == np.uint8
    assert np.array_equal(found[b"data"], ARRAYS.pixels.reshape(7, 12))


@pytest.mark.parametrize("protocol", range(3))
def test_a_file_of_python_3(protocol):
    batch = {b"data": ARRAYS.pixels, b"labels": [1, 2]}
    found = unpickle(pickle.dumps(batch, protocol), PATH)
    assert np.array_equal(found[b"data"], ARRAYS.pixels)
    assert found[b"labels"] == [1, 2]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_a_file_asks_for_is_not_executed(tmp_path, protocol):
    trace = tmp_path / "ran"
    for asked in (
        Runs(os.system, f"touch {trace}"),
        Runs(subprocess.getoutput, f"touch {trace}"),
        Runs(eval, f"open({str(trace)!r}, 'w')"),
        Runs(getattr, Path(trace), "touch"),
        Runs(np.load, str(trace)),
        Runs(np.fromfile, str(trace)),
    ):
        with pytest.raises(UserError, match=r"data_batch_1: asks for [\w.]+, which .* was not executed; replace"):
            unpickle(pickle.dumps({b"data": asked}, protocol), PATH)
        assert not trace.exists()


def test_the_text_names_what_was_asked_for():
    with pytest.raises(UserError, match=r"asks for posix\.system"):
        unpickle(b"cposix\nsystem\n(S'true'\ntR.", PATH)
    with pytest.raises(UserError, match=r"asks for numpy\.testing\._private"):
        unpickle(b"cnumpy.testing._private.utils\nrunstring\n(S'1'\n}tR.", PATH)


def test_bytes_in_another_codec_are_refused():
    with pytest.raises(UserError, match="not a pickle of CIFAR's"):
        unpickle(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-7\x86R.", PATH)


@given(st.integers(0, len(OFFICIAL) - 1))
def test_a_cut_file_is_named(length):
    with pytest.raises(UserError, match=r"data_batch_1: not a pickle of CIFAR's \(.*replace the file") as raised:
        unpickle(OFFICIAL[:length], PATH)
    assert "\n" not in str(raised.value)
