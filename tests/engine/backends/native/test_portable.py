"""The code for compilers without GCC's extensions, such as Visual C++, compiled here with `-DGN_PORTABLE`."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

SOURCES = Path(__file__).parents[4] / "src/ghostnoise/engine/backends/native/src"
FLAGS = ["-std=c++17", "-fno-exceptions", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-parameter"]  # without OpenMP
CONVERSIONS = """
#include "vectors.h"

GN_PUBLIC void to_float(const float16 *from, float *to, i64 n) {
    for (i64 i = 0; i < n; ++i)
        to[i] = load(from[i]);
}
GN_PUBLIC void to_half(const float *from, float16 *to, i64 n) {
    for (i64 i = 0; i < n; ++i)
        store(to[i], from[i]);
}
GN_PUBLIC i64 sums(const float *from, float *to) {
    constexpr i64 LANES = Pack<float>::LANES;
    Pack<float> packs[LANES];
    for (i64 i = 0; i < LANES; ++i)
        packs[i].load_from(from + LANES * i);
    sum_lanes(packs);
    packs[0].lanes *= packs[0].lanes;
    for (i64 i = 0; i < LANES; ++i)
        to[i] = packs[0].lanes[i];
    return LANES;
}
"""


@pytest.fixture(scope="module")
def conversions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("portable")
    (folder / "conversions.cpp").write_text(CONVERSIONS)
    target = folder / "conversions.so"
    command = [
        "c++",
        *FLAGS,
        "-O1",
        "-shared",
        "-fPIC",
        "-DGN_PORTABLE",
        f"-I{SOURCES}",
        str(folder / "conversions.cpp"),
    ]
    subprocess.run([*command, "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def converted(function, values, dtype):
    to = torch.empty(len(values), dtype=dtype)
    function(ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(to.data_ptr()), ctypes.c_int64(len(values)))
    return to


def assert_identical(actual, expected):
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(0), expected.nan_to_num(0))
    numbers = ~expected.isnan()
    assert torch.equal(actual.signbit()[numbers], expected.signbit()[numbers])


def test_every_float16_as_float(conversions):
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    assert_identical(converted(conversions.to_float, values, torch.float32), values.float())


def test_floats_are_rounded_to_float16_as_torch_does(conversions):
    """All float16 values, the points halfway to their neighbours and around these, and random bits."""
    torch.manual_seed(0)
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    halfway = (halves.double() + halves.roll(1).double()).div(2).float()
    near = [torch.nextafter(halfway, torch.tensor(limit)) for limit in (torch.inf, -torch.inf)]
    bits = torch.randint(-(2**31), 2**31, (2**20,)).to(torch.int32).view(torch.float32)
    values = torch.cat([halves, halfway, *near, bits])
    assert_identical(converted(conversions.to_half, values, torch.float16), values.half())


def test_sums_of_lanes(conversions):
    values, to = torch.arange(256, dtype=torch.float32), torch.empty(16)
    lanes = conversions.sums(ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(to.data_ptr()))
    assert lanes in (4, 8, 16)
    assert torch.equal(to[:lanes], values[: lanes**2].view(lanes, lanes).sum(1).square())


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.cpp")), ids=lambda path: path.stem)
def test_every_file_compiles_without_extensions_and_without_openmp(path):
    command = ["c++", *FLAGS, "-fsyntax-only", "-DGN_PORTABLE", "-DGN_ISA=baseline", "-DGN_ABI=1LL", str(path)]
    subprocess.run(command, check=True)
