"""A worker process of the local runner; `test_local` runs jobs with it."""

import os

import pytest

from ghostnoise.lab.runners import worker


@pytest.mark.skipif(not hasattr(os, "nice"), reason="niceness of POSIX")
@pytest.mark.parametrize(("niceness", "expected"), [(19, "19"), (0, ""), (-5, "")])
def test_a_session_has_the_niceness_of_its_worker(niceness, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "nice", lambda increment: niceness)
    monkeypatch.setattr(worker, "AUTOGROUP", str(tmp_path / "autogroup"))
    worker._share_niceness()
    assert not (tmp_path / "autogroup").exists()
    (tmp_path / "autogroup").touch()
    worker._share_niceness()
    assert (tmp_path / "autogroup").read_text() == expected
