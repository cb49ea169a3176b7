"""Builds the native CPU library beside the package; without a compiler the install succeeds without it."""

import os
import platform
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("src/ghostnoise/engine/backends/native/src")
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
# The copies of the passes, and what the compiler may use for each. f16c came before AVX2 in every processor.
COPIES = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64", "i686"):
    COPIES["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    COPIES["avx512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ]


class BuildNative(build_ext):
    """Compiles the passes once for each instruction set into one library with a C ABI, which is no Python module."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link; try without OpenMP where the compiler has none. A failure is a warning: it is optional."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            try:
                self.compile_into(target, ["-fopenmp"])
            except subprocess.CalledProcessError:
                self.compile_into(target, ["-fopenmp-simd"])
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"ghostnoise installs without its native CPU library: {error}") from error

    def compile_into(self, target: Path, openmp: list[str]) -> None:
        """Run the compiler."""
        compiler = os.environ.get("CXX", "c++")
        openmp = [*openmp, *os.environ.get("CXXFLAGS", "").split()]
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

            def compiled(pair: tuple[str, str]) -> str:
                source, copy = pair
                made = f"{folder}/{source}-{copy}.o"
                what = [f"-DGN_ISA={copy}", "-c", str(SOURCES / f"{source}.cpp"), "-o", made]
                subprocess.run([compiler, *FLAGS, *openmp, *COPIES[copy], *what], check=True)
                return made

            objects = list(pool.map(compiled, product(("passes", "pools", "tables", "noise", "whole"), COPIES)))
            level = [str(SOURCES / "level.cpp"), *(["-DGN_X86"] if "avx2" in COPIES else [])]
            subprocess.run([compiler, *FLAGS, *openmp, "-shared", *level, *objects, "-o", str(target)], check=True)


setup(
    ext_modules=[Extension("ghostnoise.engine.backends.native._library", sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative},
)
