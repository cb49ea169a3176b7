import os
import subprocess
import sys

import numpy
import pytest
import torch
from ghostnoise.engine.backends import select as backends
from ghostnoise.engine.backends.aten import Aten

import ghostnoise
from ghostnoise import doctor

CPUINFO = """processor\t: 0
model name\t: A Fast One
flags\t\t: fpu avx2 avx512f nonsense

processor\t: 1
model name\t: A Fast One
flags\t\t: fpu avx2 avx512f nonsense
"""


@pytest.fixture
def native(monkeypatch):
    """Replace the native backend by one with this reason why it cannot run, or None."""

    def replace(reason):
        class Replaced(Aten):
            name = "native"

            def unavailable(self):
                return reason

        load = backends.load
        monkeypatch.setattr(backends, "load", lambda name: Replaced() if name == "native" else load(name))

    return replace


def test_report_names_versions_cpu_and_threads():
    report = doctor.report()
    for text in (ghostnoise.__version__, torch.__version__, numpy.__version__):
        assert text in report
    assert f"threads     {torch.get_num_threads()}" in report
    assert torch.backends.cpu.get_cpu_capability() in report
    assert "aten      usable" in report


def test_the_report_gives_the_reason_why_a_backend_is_not_usable(native):
    native("no compiler was there at install")
    report = doctor.report()
    assert "native    not usable: no compiler was there at install" in report
    assert "auto      selects aten for a CPU tensor" in report


def test_a_usable_native_backend_is_selected(native):
    native(None)
    report = doctor.report()
    assert "native    usable" in report
    assert "auto      selects native for a CPU tensor" in report


def test_huge_pages_are_listed():
    assert "huge pages" in doctor.report()


def test_cpu_is_read_from_cpuinfo(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    monkeypatch.setattr(doctor, "CPUINFO", path)
    assert doctor.cpu() == ("A Fast One", ["avx2", "avx512f"])


def test_without_cpuinfo_the_platform_names_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "nothing")
    name, features = doctor.cpu()
    assert name
    assert features == []
    assert "features    unknown" in doctor.report()


def test_devices_have_names(monkeypatch):
    """Apple's GPU is a part of the chip, and torch has no name for it."""
    assert doctor.device_name(torch.device("cpu")) == doctor.device_name(torch.device("mps")) == doctor.cpu()[0]
    monkeypatch.setattr(torch.cuda, "get_device_name", "GPU of {}".format)
    assert doctor.device_name(torch.device("cuda", 1)) == "GPU of cuda:1"


def test_cores_are_those_of_this_machine():
    assert 1 <= doctor.cores() <= os.cpu_count()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes are not bound to cores here")
def test_cores_are_those_that_a_process_is_bound_to():
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from ghostnoise import doctor
print(doctor.cores())
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"1\n"
