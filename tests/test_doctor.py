import os
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch

import ghostnoise
from ghostnoise import doctor
from ghostnoise.engine.backends import select as backends

CPUINFO = """processor\t: 0
model name\t: A Fast One
flags\t\t: fpu avx2 avx512f nonsense

processor\t: 1
model name\t: A Fast One
flags\t\t: fpu avx2 avx512f nonsense
"""


@pytest.fixture
def fake_backends(monkeypatch):
    """Replace the modules of backends; an exception is raised on import."""

    def replace(**modules):
        import_module = backends._module

        def module(name):
            found = modules.get(name) or import_module(name)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(backends, "_module", module)

    return replace


def backend(missing=None, refuses=None, name="native"):
    return SimpleNamespace(missing=lambda: missing, refuses=lambda x: refuses, __name__=f"ghostnoise.engine.{name}")


def test_report_names_versions_cpu_and_threads():
    report = doctor.report()
    for text in (ghostnoise.__version__, torch.__version__, numpy.__version__):
        assert text in report
    assert f"threads     {torch.get_num_threads()}" in report
    assert torch.backends.cpu.get_cpu_capability() in report
    assert "aten      usable" in report


def test_report_says_why_a_backend_is_not_usable_and_what_auto_takes(fake_backends):
    fake_backends(native=backend(missing="no compiler was there at install"))
    report = doctor.report()
    assert "native    not usable: no compiler was there at install" in report
    assert "auto      selects aten for a CPU tensor" in report


def test_a_usable_native_backend_is_taken(fake_backends):
    fake_backends(native=backend())
    report = doctor.report()
    assert "native    usable" in report
    assert "auto      selects native for a CPU tensor" in report


def test_a_backend_that_is_not_there_is_named(fake_backends):
    absent = ModuleNotFoundError("no module", name="ghostnoise.engine.backends.native")
    fake_backends(native=absent, triton=ModuleNotFoundError("no module", name="triton"))
    report = doctor.report()
    assert f"native    not usable: ghostnoise {ghostnoise.__version__} does not have it" in report
    assert "triton    not usable: the package triton is not installed; run pip install triton" in report
    assert "auto      selects aten" in report


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
