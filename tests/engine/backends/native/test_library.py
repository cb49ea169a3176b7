import ctypes
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from ghostnoise.engine.backends.native import abi, library

SOURCES = Path(__file__).parents[4] / "src/ghostnoise/engine/backends/native/src"


def test_no_library(monkeypatch, tmp_path):
    monkeypatch.setenv("GHOSTNOISE_NATIVE_FOLDER", str(tmp_path))
    assert "was not built; install a wheel, or reinstall with a C++ compiler" in library.library.__wrapped__()


def test_a_file_that_is_not_a_library(monkeypatch, tmp_path):
    (tmp_path / library.FILE).write_text("nothing")
    monkeypatch.setenv("GHOSTNOISE_NATIVE_FOLDER", str(tmp_path))
    assert "does not load" in library.library.__wrapped__()


@pytest.mark.parametrize("source", ["long long gn_abi() { return 1; }", "int gn_level() { return 0; }"])
def test_a_library_from_other_sources_is_not_used(tmp_path, source):
    """It would be called with the wrong arguments: there is one warning, and `aten` serves."""
    (tmp_path / "old.cpp").write_text(f'extern "C" {source}')
    command = ["c++", "-shared", "-fPIC", str(tmp_path / "old.cpp"), "-o", str(tmp_path / library.FILE)]
    subprocess.run(command, check=True)
    script = """
import warnings, torch, ghostnoise
from ghostnoise.engine.backends.select import load, select
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    layer = ghostnoise.BatchNorm1d(3)
    for _ in range(2):
        layer(torch.randn(4, 3))
print(len([warning for warning in caught if "native" in str(warning.message)]), select(torch.randn(2, 3, 4)).name)
print(load("native").unavailable())
"""
    environment = {**library.os.environ, "GHOSTNOISE_NATIVE_FOLDER": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    counts, reason = done.stdout.splitlines()
    assert counts == "1 aten"
    assert reason.startswith("the C++ library was built from other sources")


def test_the_number_changes_with_the_table(monkeypatch):
    before = abi.number()
    monkeypatch.setitem(abi.SIGNATURES, "moments", abi.SIGNATURES["moments"] + "p")
    assert abi.number() != before


def test_the_header_declares_the_functions_of_the_table():
    header = re.sub(r"//.*", "", (SOURCES / "exports.h").read_text())
    header = re.sub(r"^#.*$", "", header, flags=re.MULTILINE)
    for macro in ("GN_TENSOR", "GN_TABLE"):
        header = re.sub(rf"{macro}\((\w+)\)", r"void *\1, i64 \1_b, i64 \1_inner", header)
    declared = {}
    for name, arguments in re.findall(r"GN_EXPORT\((\w+)\)\((.*?)\);", header, flags=re.DOTALL):
        kinds = ("p" if "*" in one else {"i64": "i", "double": "d"}[one.split()[0]] for one in arguments.split(","))
        declared[name] = "".join(kinds)
    assert declared == abi.SIGNATURES


def test_the_header_declares_the_structs_of_the_table():
    header = re.sub(r"//.*", "", (SOURCES / "exports.h").read_text())
    declared = {}
    for name, members in re.findall(r"struct (\w+) \{(.*?)\};", header, flags=re.DOTALL):
        kinds = []
        for statement in filter(None, map(str.strip, members.split(";"))):
            plain = {"i64": "i", "double": "d"}.get(statement.split()[0])
            kinds += ["p" if "*" in one else plain for one in statement.split(",")]
        declared[name] = "".join(kinds)
    assert declared == abi.STRUCTS


def test_the_members_of_a_struct_are_packed_in_their_order():
    kinds = abi.STRUCTS["BackwardCall"]
    values = [number + 0.5 if kind == "d" else number for number, kind in enumerate(kinds)]
    packed = abi.packer("BackwardCall")(*values)
    assert len(packed) == 8 * len(kinds)
    assert list(struct.unpack("".join("d" if kind == "d" else "q" for kind in kinds), packed)) == values
    with pytest.raises(struct.error):
        abi.packer("BackwardCall")(*values, 0)


def test_every_status_is_an_error():
    with pytest.raises(RuntimeError, match="the native function update_running does not support the dtype with code 9"):
        library.run("update_running", 9, 0, 0, 0, 0, 0, 0, 0.1)
    with pytest.raises(TypeError, match="update_running takes 8 arguments, not 9"):
        library.run("update_running", 9, 0, 0, 0, 0, 0, 0, 0.1, 0)
    with pytest.raises(ctypes.ArgumentError):
        library.run("update_running", 0.5, 0, 0, 0, 0, 0, 0, 0.1)


def test_threads_only_for_large_work():
    assert library.threads(library.GRAIN - 1) == 1
    assert library.threads(library.GRAIN) == library.torch.get_num_threads()


def test_addresses_are_taken_in_the_gate_alone():
    """Every other file gives tensors to the gate, so none is read without a check."""
    for path in SOURCES.parent.glob("*.py"):
        assert ("data_ptr" in path.read_text()) == (path.name == "gate.py"), path.name
