"""Build the native CPU library as part of the package, and tag the wheel for every Python version.

The library has a C ABI and is loaded with ctypes, so one wheel per platform serves all versions of Python. Without a
compiler, the installation succeeds without the library; GHOSTNOISE_REQUIRE_NATIVE=1 makes this an error.
"""

import os
import platform
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("src/ghostnoise/engine/backends/native")
SOURCES = NATIVE / "src"
FILES = ("forward_passes", "backward_passes", "pools", "coefficients", "noise", "fused")
REQUIRED = os.environ.get("GHOSTNOISE_REQUIRE_NATIVE", "0") == "1"
MACOS, WINDOWS = sys.platform == "darwin", sys.platform == "win32"
X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
SUFFIX = ".dylib" if MACOS else ".dll" if WINDOWS else ".so"

# GCC and Clang. No exceptions: nothing throws, and the unwinder would need a newer glibc or a shared libgcc.
FLAGS = [
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions"),
    *("-fno-math-errno", "-fno-trapping-math"),
]
# libgomp alone stays shared: it is the one that torch has loaded, so both use the same threads.
LINK = ["-shared"] if MACOS or WINDOWS else ["-shared", "-static-libgcc", "-static-libstdc++"]
OPENMP = ["-fopenmp"], ["-fopenmp-simd"], []  # the first that works; Apple's Clang has no OpenMP runtime
# The copies of the library's functions, and the instructions of each. Every processor with AVX2 also has F16C.
COPIES = {"baseline": []}
if X86:
    COPIES["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    COPIES["avx512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ]

# Visual C++. Without /openmp: its runtime has other threads than torch.
MSVC_FLAGS = ["/O2", "/std:c++17", "/permissive-", "/fp:precise", "/wd4068"]
MSVC_COPIES = {"baseline": [], "avx2": ["/arch:AVX2"], "avx512": ["/arch:AVX512"]}


def definitions() -> list[tuple[str, str]]:
    """Return the macros of library.cpp."""
    abi = runpy.run_path(str(NATIVE / "abi.py"))["number"]()
    return [("GN_ABI", f"{abi}LL"), *([("GN_X86", "1")] if X86 else [])]


def macos_target() -> tuple[str, str]:
    """Return the oldest version of macOS that the library runs on, and its architecture."""
    _, version, arch = sysconfig.get_platform().split("-")
    arch = platform.machine() if arch == "universal2" else arch  # compiled for this one alone
    version = os.environ.get("MACOSX_DEPLOYMENT_TARGET", version)
    return ("11.0" if arch == "arm64" and version.startswith("10.") else version), arch


class BuildNative(build_ext):
    """Compile each file once for each instruction set into one library with a C ABI, which is not a Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of the library, without the name of a Python version."""
        return str(Path(*fullname.split("."))) + SUFFIX

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Return nothing: there is no module to initialize."""
        return []

    def build_extension(self, ext: Extension) -> None:
        """Compile and link. A failure is only a warning, unless the library is required."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            if self.compiler.compiler_type == "msvc" and "CXX" not in os.environ:
                self.compile_with_msvc(target)
            else:
                self.compile_with_gnu(target)
        except (OSError, subprocess.CalledProcessError, CompileError) as error:
            raise CompileError(f"ghostnoise installs without its native CPU library: {error}") from error

    def compile_with_gnu(self, target: Path) -> None:
        """Run GCC or Clang, without OpenMP if the compiler lacks it."""
        *preferred, without = OPENMP
        for openmp in preferred:
            try:
                self.run_gnu(target, openmp)
            except subprocess.CalledProcessError:
                continue
            return
        self.run_gnu(target, without)

    def run_gnu(self, target: Path, openmp: list[str]) -> None:
        """Run the compiler CXX with the flags of CXXFLAGS."""
        compiler = [*os.environ.get("CXX", "c++").split(), *FLAGS, *openmp, *os.environ.get("CXXFLAGS", "").split()]
        if MACOS:
            version, arch = macos_target()
            compiler += [f"-mmacosx-version-min={version}", "-arch", arch]
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

            def compiled(pair: tuple[str, str]) -> str:
                source, copy = pair
                made = f"{folder}/{source}-{copy}.o"
                arguments = [f"-DGN_ISA={copy}", "-c", str(SOURCES / f"{source}.cpp"), "-o", made]
                subprocess.run([*compiler, *COPIES[copy], *arguments], check=True)
                return made

            # The first alone, so that a compiler that does not accept the flags reports it once.
            first, *others = product(FILES, COPIES)
            objects = [compiled(first), *pool.map(compiled, others)]
            library = [str(SOURCES / "library.cpp"), *(f"-D{name}={value}" for name, value in definitions())]
            subprocess.run([*compiler, *library, *objects, *LINK, "-o", str(target)], check=True)

    def compile_with_msvc(self, target: Path) -> None:
        """Run Visual C++, which setuptools finds."""
        with tempfile.TemporaryDirectory() as folder:

            def compiled(files: Iterable[str], copy: str, macros: list[tuple[str, str]]) -> list[str]:
                paths = [str(SOURCES / f"{file}.cpp") for file in files]
                flags = [*MSVC_FLAGS, *MSVC_COPIES[copy]]
                made: list[str] = self.compiler.compile(paths, f"{folder}/{copy}", macros, extra_postargs=flags)
                return made

            objects = compiled(["library"], "baseline", definitions())
            for copy in COPIES:
                objects += compiled(FILES, copy, [("GN_ISA", copy)])
            self.compiler.link_shared_object(objects, str(target))


class Wheel(bdist_wheel):
    """A wheel for every Python on this platform, or on every platform if it contains no library."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag. On Linux, `make wheel` replaces its platform by the oldest glibc that the library needs."""
        built = self.get_finalized_command("build_ext").get_outputs()
        if not any(Path(path).exists() for path in built):
            return "py3", "none", "any"
        if MACOS:
            version, arch = macos_target()
            return "py3", "none", f"macosx_{version.replace('.', '_')}_{arch}"
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("ghostnoise.engine.backends.native._library", sources=[], optional=not REQUIRED)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
