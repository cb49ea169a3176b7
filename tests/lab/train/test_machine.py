import os
import platform
import signal
import subprocess
import sys
import threading

import pytest
import torch

from ghostnoise.lab.config import methods
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.train import machine
from ghostnoise.lab.train.machine import Clock, Machine, Stop, handle_signals


def test_auto_is_a_device_that_works():
    assert torch.ones(2, device=machine.select_device("auto")).sum() == 2
    assert machine.select_device("cpu") == torch.device("cpu")


def test_unknown_and_absent_devices():
    with pytest.raises(UserError, match=r"train\.device=tpu: must be auto, cpu, cuda or mps"):
        machine.select_device("tpu")
    for name, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
        if not there:
            with pytest.raises(UserError, match=f"train.device={name}: not available .* use one of: .*cpu"):
                machine.select_device(name)


def test_one_process_needs_no_communication():
    with machine.machine("cpu", {}) as here:
        assert (here.first, here.world, here.device.type) == (True, 1, "cpu")
        assert here.broadcast("a") == "a"
        assert here.gather(3) == [3]
        assert here.all_reduce(torch.ones(2)).tolist() == [1, 1]


TOGETHER = """
import gc, glob, pathlib, sys, time
import torch
from torch.nn.parallel import DistributedDataParallel
from ghostnoise.lab.train import machine

def threads():
    names = [pathlib.Path(path).read_text() for path in glob.glob("/proc/self/task/*/comm")]
    return sum("gloo" in name for name in names)

def train(here):
    network = DistributedDataParallel(torch.nn.Linear(4, 1))
    for _ in range(3):
        network(torch.ones(2, 4)).sum().backward()
    assert here.gather(here.rank) == ([] if here.rank else [0, 1])

gc.disable()
slow = pathlib.Path(sys.argv[1])
with machine.machine("cpu") as here:
    train(here)
    assert threads() >= 2, "threads of the group"
    if here.rank:
        time.sleep(0.5)
        slow.touch()
assert slow.exists(), "the first process did not wait"
assert threads() == 0, "threads would outlive the group"
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
def test_processes_exit_together_and_leave_no_threads(tmp_path):
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
               str(tmp_path / "slow")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


def test_environment_metadata():
    found = machine.environment(machine.Machine(torch.device("cpu")), thresholds=True, method="gni")
    assert found["torch"] == str(torch.__version__)
    assert found["threads"] == torch.get_num_threads()
    assert found["device_name"]
    assert found["malloc"] == "raised"
    assert found["numerics"] == methods.numerics("gni")


def test_the_environment_has_the_commit_or_the_version(monkeypatch, tmp_path):
    machine.commit.cache_clear()
    monkeypatch.setattr(machine.ghostnoise, "__file__", str(tmp_path / "__init__.py"))
    assert machine.commit() == f"v{machine.ghostnoise.__version__}"
    machine.commit.cache_clear()


def test_git_is_called_once(monkeypatch):
    machine.commit()
    monkeypatch.setattr(subprocess, "run", None)  # calling it again would raise
    machine.commit()


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_stays_in_the_process_with_raised_thresholds():
    """By default the memory of a large tensor is returned to the system; with raised thresholds it is kept."""
    code = """
import os, sys, torch
from ghostnoise.lab.train import machine
print(machine.raise_malloc_thresholds() if sys.argv[1] == "raise" else None)
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
x = torch.ones(2**26)
held = resident() - before
del x
print(round(held / 2**20), round((resident() - before) / 2**20))
"""

    def run(mode, **more):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | more
        done = subprocess.run([sys.executable, "-c", code, mode], capture_output=True, text=True, env=environment)
        raised, held, kept = done.stdout.split()
        assert 240 < int(held) < 300, "256 MB"
        return raised, int(kept)

    assert run("raise", MALLOC_ARENA_MAX="1")[0] == "False", "values from the environment are kept"
    assert run("leave")[1] < 50
    raised, kept = run("raise")
    assert raised == "True"
    assert kept > 200


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:18867"), True),
        (RuntimeError("Connection reset by peer"), True),
        (torch.distributed.DistNetworkError("gone"), True),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_only_lost_connections_are_taken_for_the_end_of_another_process(error, lost):
    assert machine._is_lost_connection(error) is lost


# When to save and when to stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_stored_and_the_handlers_are_restored(number):
    before = signal.getsignal(number)
    with handle_signals() as stop:
        assert stop.signal == 0
        os.kill(os.getpid(), number)
        assert stop.signal == number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_raises_immediately():
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with handle_signals(), pytest.raises(KeyboardInterrupt):
        twice()


def test_other_threads_do_not_handle_signals():
    seen = []

    def work():
        with handle_signals() as stop:
            seen.append(stop.signal)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0]


CPU = torch.device("cpu")


class Watch:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time


def test_one_process_saves_after_every_interval():
    watch = Watch()
    clock = Clock(Machine(CPU), Stop(), 60, watch)
    saves = []
    for _ in range(200):
        watch.time += 1
        save, number = clock.tick()
        assert number == 0
        if save:
            saves.append(watch.time)
            clock.reset()
    assert saves == [60, 120, 180]


def test_one_process_stops_after_the_next_step():
    clock = Clock(Machine(CPU), Stop(), 60, Watch())
    clock.stop.request(signal.SIGTERM)
    assert clock.tick() == (False, signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Synchronized(Machine):
    """A process whose peers contribute zeros to every sum; it records its messages."""

    def all_reduce(self, totals):
        messages.append(totals)
        return totals


messages: list[torch.Tensor] = []


def test_processes_synchronize_rarely_and_save_after_every_interval():
    watch, messages[:] = Watch(), []
    clock = Clock(Synchronized(CPU, 0, 2), Stop(), 60, watch)
    saves = []
    for _ in range(30_000):
        watch.time += 0.01
        save, _ = clock.tick()
        if save:
            saves.append(watch.time)
            clock.reset()
    assert len(messages) < 200, "about every 2 of 300 seconds"
    gaps = [later - earlier for earlier, later in zip([0, *saves], saves, strict=False)]
    assert len(saves) == 4
    assert all(60 <= gap < 63 for gap in gaps)


def test_the_clock_is_that_of_the_first_process_and_signals_of_any():
    watch, messages[:] = Watch(), []
    other = Clock(Synchronized(CPU, 1, 2), Stop(), 60, watch)
    watch.time = 1000
    other.stop.request(signal.SIGINT)
    assert other.tick() == (False, signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
