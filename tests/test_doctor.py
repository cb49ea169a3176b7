import os
import subprocess
import sys

import numpy
import pytest
import torch

import ghostnoise
from ghostnoise import doctor
from ghostnoise.engine import ops

CPUINFO = """processor\t: 0
model name\t: A Fast One
flags\t\t: fpu avx2 avx512f nonsense

processor\t: 1
model name\t: A Fast One
flags\t\t: fpu avx2 avx512f nonsense
"""


@pytest.fixture
def missing(monkeypatch):
    """Replace the reasons why the operators of types of devices cannot be used."""
    return lambda **reasons: monkeypatch.setattr(ops, "MISSING", reasons)


def test_report_names_versions_cpu_and_threads():
    report = doctor.report()
    for text in (ghostnoise.__version__, torch.__version__, numpy.__version__):
        assert text in report
    assert f"threads        {torch.get_num_threads()}" in report
    assert torch.backends.cpu.get_cpu_capability() in report


def test_the_report_gives_the_reason_why_operators_run_in_plain_pytorch(missing):
    missing(cpu="no compiler was there at install", cuda="no device")
    report = doctor.report()
    assert "cpu operators  plain PyTorch: no compiler was there at install" in report
    assert "cuda operators plain PyTorch: no device" in report
    assert doctor.operators("cpu") == doctor.operators("mps") == "plain PyTorch"


def test_operators_that_can_be_used(missing, monkeypatch):
    missing(cpu=None, cuda=None)
    monkeypatch.setattr(doctor, "instruction_set", lambda: "avx2")
    assert "cpu operators  C++ (avx2)" in doctor.report()
    assert "cuda operators Triton" in doctor.report()
    monkeypatch.setattr(doctor, "instruction_set", lambda: None)
    assert doctor.report().splitlines()[-2] == "cpu operators  C++"
    assert (doctor.operators("cpu"), doctor.operators("cuda")) == ("C++", "Triton")


def test_the_instruction_set_is_that_of_the_library():
    known = (None,) if doctor.missing("cpu") else ("baseline", "avx2", "avx512")
    assert doctor.instruction_set() in known


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
    assert "features       unknown" in doctor.report()


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
