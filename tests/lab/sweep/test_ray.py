"""The Ray runner: options and addresses that it refuses, and a cluster that it starts on this machine."""

import os
import socket
import subprocess
import sys

import pytest

from ghostnoise.lab.errors import UserError
from ghostnoise.lab.sweep import ray
from ghostnoise.lab.sweep.execute import Place
from ghostnoise.lab.sweep.ray import RayRunner
from support.ray_cases import SHORT, job, outcome, plain


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cpus": 0}, "--cpus-per-run 0: must be more than 0"),
        ({"gpus": 1.5}, "--gpus-per-run 1.5: must be 0, a fraction of 1, or a whole number"),
        ({"storage": "s3://bucket/runs"}, "--storage s3://bucket/runs: must be a folder that every node can write"),
        ({"address": "nowhere"}, "--address nowhere: must be HOST:PORT or auto"),
        ({"address": "nowhere:port"}, "--address nowhere:port: must be HOST:PORT"),
        ({"address": "ray://head:10001"}, "run the command on a node of the cluster, with --address auto"),
    ],
)
def test_invalid_options_are_refused(tmp_path, given, message):
    with pytest.raises(UserError) as caught:
        RayRunner(Place(tmp_path), **given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_ray_the_error_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install .*\[ray\]'"):
        RayRunner(Place(tmp_path))


def test_an_address_where_nobody_listens(tmp_path):
    with socket.socket() as taken:  # bound, so that no other process takes the port, but not listening
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"--address {address}: cannot be reached .*`ray start --head`"):
            RayRunner(Place(tmp_path), address=address)


def test_an_address_where_something_else_listens(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "ANSWER_WITHIN", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UserError, match="the server at this address is not a Ray cluster"):
            RayRunner(Place(tmp_path), address=address)


LOCAL = """
import os, pathlib, signal, sys
before = signal.getsignal(signal.SIGTERM)
from ghostnoise.lab.config import recipe
from ghostnoise.lab.events import Ended
from ghostnoise.lab.run import Run
from ghostnoise.lab.sweep.execute import Place
from ghostnoise.lab.sweep.ray import RayRunner

runner = RayRunner(Place(pathlib.Path(sys.argv[1])), cpus=0.5)
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
runner.run([Run.planned("digits", settings)],
           lambda run, event: ended.append(event.status) if isinstance(event, Ended) else None, lambda: False)
runner.close()
assert ended == ["finished"], ended
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_cluster_on_this_machine_listens_on_the_loopback_address_only(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", LOCAL, str(tmp_path), *SHORT], capture_output=True, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "digits").iterdir()
    assert [outcome(folder)] == plain([job()], tmp_path / "plain")
