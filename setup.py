"""Build the C++ operators as part of the package, and tag the wheel for every Python version.

The library is on torch's stable ABI, and torch loads it, so one wheel per platform serves all versions of Python and
torch. It needs torch's headers and libraries: those of the environment that the package is installed in. Without them,
or without a compiler, the installation succeeds without the library; GHOSTNOISE_REQUIRE_NATIVE=1 makes this an error,
and GHOSTNOISE_NO_NATIVE=1 does not compile. By default, the kernels are compiled for the instruction set of this
machine; GHOSTNOISE_PORTABLE=1 compiles them for all, of which each machine takes the best one.
"""

import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("src/ghostnoise/engine/native/src")
OPERATORS = ("operators", "pass_operators", "fused_operators")
KERNELS = ("fused", "forward_passes", "noise", "backward_passes", "pools", "conversions")  # what takes longest is first
REQUIRED = os.environ.get("GHOSTNOISE_REQUIRE_NATIVE", "0") == "1"
SKIPPED = os.environ.get("GHOSTNOISE_NO_NATIVE", "0") == "1"
PORTABLE = os.environ.get("GHOSTNOISE_PORTABLE", "0") == "1"
MACOS, WINDOWS = sys.platform == "darwin", sys.platform == "win32"
X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
SUFFIX = ".dylib" if MACOS else ".dll" if WINDOWS else ".so"
TORCH_TARGET = "0x020a000000000000"  # the oldest torch whose stable ABI has all that is used: 2.10

FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden"]
WARNINGS = ["-Wall", "-Wextra"]
if {"CI", "GHOSTNOISE_STRICT"} & os.environ.keys():  # elsewhere, a newer compiler may warn of more
    WARNINGS.append("-Werror")
# Kernels do not throw, and run in torch's threads: they need no runtime of OpenMP.
KERNEL_FLAGS = ["-O3", "-fno-exceptions", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd"]
OPERATOR_FLAGS = ["-O2"]
# The instructions of each level. Every processor with AVX2 also has F16C.
LEVELS = {"baseline": []}
if X86:
    LEVELS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    LEVELS["avx512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ]
# The macros by which GCC and Clang say that -march=native has the instructions of a level.
NATIVE = {
    "avx512": ("__AVX512F__", "__AVX512BW__", "__AVX512DQ__", "__AVX512VL__", "__FMA__", "__F16C__"),
    "avx2": ("__AVX2__", "__FMA__", "__F16C__"),
}


def torch_folder() -> Path:
    """Return the folder of the installed torch, which an isolated build environment hides but does not remove."""
    spec = importlib.util.find_spec("torch")
    found = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    found += [Path(sysconfig.get_paths()[scheme]) / "torch" for scheme in ("purelib", "platlib")]
    for folder in found:
        if (folder / "include/torch/csrc/stable/c/shim.h").is_file():
            return folder
    raise CompileError("it needs torch 2.10 or newer; install torch first, then reinstall ghostnoise")


def machine_level(compiler: list[str]) -> list[str]:
    """Return the level of this machine alone; all levels if the compiler does not say."""
    if not X86:
        return ["baseline"]
    command = [*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        return list(LEVELS)
    macros = {line.split()[1] for line in asked.stdout.splitlines() if line.startswith("#define ")}
    return [next((level for level, needed in NATIVE.items() if macros.issuperset(needed)), "baseline")]


def macos_target() -> tuple[str, str]:
    """Return the oldest version of macOS that the library runs on, and its architecture."""
    _, version, arch = sysconfig.get_platform().split("-")
    arch = platform.machine() if arch == "universal2" else arch  # compiled for this one alone
    version = os.environ.get("MACOSX_DEPLOYMENT_TARGET", version)
    return ("11.0" if arch == "arm64" and version.startswith("10.") else version), arch


class BuildNative(build_ext):
    """Compile the operators once, and the kernels once for each level, into one library that is no Python module."""

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
        if SKIPPED:
            return
        try:
            if WINDOWS and "CXX" not in os.environ:
                raise CompileError("on Windows, it has been compiled with GCC and Clang only; CXX=clang++ tries")
            self.compile(target, torch_folder())
        except (OSError, subprocess.CalledProcessError, CompileError) as error:
            raise CompileError(f"ghostnoise installs without its native CPU library: {error}") from error

    def compile(self, target: Path, torch: Path) -> None:
        """Run the compiler CXX with the flags of CXXFLAGS."""
        compiler, wanted = os.environ.get("CXX", "c++").split(), os.environ.get("CXXFLAGS", "").split()
        levels = list(LEVELS) if PORTABLE else machine_level(compiler)
        compiler += FLAGS
        if MACOS:
            version, arch = macos_target()
            compiler += [f"-mmacosx-version-min={version}", "-arch", arch]
        macros = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", *(f"-DGN_WITH_{level.upper()}" for level in levels)]
        # System headers do not warn.
        jobs = [(file, "", [*OPERATOR_FLAGS, *macros, "-isystem", str(torch / "include")]) for file in OPERATORS]
        jobs += [
            (file, level, [*KERNEL_FLAGS, *LEVELS[level], f"-DGN_ISA={level}"]) for file in KERNELS for level in levels
        ]
        cores = os.cpu_count() or 1
        # Shown by `pip install -v`.
        number, names = len(jobs), " and ".join(levels)
        print(f"compiling {number} files for {names}, {cores} at a time: about {25 * len(levels)} s on two cores")
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as pool:

            def compiled(job: tuple[str, str, list[str]]) -> str:
                source, level, flags = job
                made = f"{folder}/{source}-{level}.o"
                files = ["-c", str(SOURCES / f"{source}.cpp"), "-o", made]
                subprocess.run([*compiler, *WARNINGS, *flags, *wanted, *files], check=True)
                print(f"compiled {source}{level and f' for {level}'}", flush=True)
                return made

            # The first alone, so that a compiler that does not accept the flags reports it once.
            first, *others = jobs
            objects = [compiled(first), *pool.map(compiled, others)]
            # No path to torch's libraries: `import torch` has loaded them before, and they are found by their names.
            libraries = ["-shared", f"-L{torch / 'lib'}", "-ltorch_cpu"]
            subprocess.run([*compiler, *wanted, *objects, *libraries, "-o", str(target)], check=True)


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
    ext_modules=[Extension("ghostnoise.engine.native._library", sources=[], optional=not REQUIRED)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
