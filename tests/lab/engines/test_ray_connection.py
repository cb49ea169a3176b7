"""A cluster of our own, in a process of its own."""

import os
import subprocess
import sys

import pytest

from lab.engines.ray_cases import SHORT, job, outcome, plain

LOCAL = """
import os, pathlib, signal, sys
before = signal.getsignal(signal.SIGTERM)
from ghostnoise.lab.config import recipe
from ghostnoise.lab.engines import Ended, Job
from ghostnoise.lab.engines.job import Place
from ghostnoise.lab.engines.ray import RayEngine

engine = RayEngine(Place(pathlib.Path(sys.argv[1])), cpus=0.5)
assert signal.getsignal(signal.SIGTERM) is before
listening = []
mine = {os.readlink(path) for pid in os.popen(f"ps -o pid= -s {os.getsid(0)}").read().split()
        for path in pathlib.Path(f"/proc/{pid}/fd").glob("*") if path.is_symlink()}
for line in [*open("/proc/net/tcp"), *open("/proc/net/tcp6")]:
    fields = line.split()
    if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
        listening.append(fields[1].partition(":")[0])
assert listening
assert set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F"}, listening
settings = recipe.resolve(recipe.load("digits", sys.argv[2:]).settings, device="cpu", processes=1)
ended = []
engine.run([Job("digits", recipe.identity(settings), "a run", settings)],
           lambda event: ended.append(event.status) if isinstance(event, Ended) else None, lambda: False)
engine.close()
assert ended == ["finished"], ended
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_cluster_of_our_own_is_heard_on_this_machine_alone(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", LOCAL, str(tmp_path), *SHORT], capture_output=True, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "digits").iterdir()
    assert [outcome(folder)] == plain([job()], tmp_path / "plain")
