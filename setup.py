"""Build the native CPU library beside the package. Without a compiler, the installation succeeds without it."""

import os
import platform
import runpy
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NATIVE = Path("src/ghostnoise/engine/backends/native")
SOURCES = NATIVE / "src"
FILES = ("forward_passes", "backward_passes", "pools", "coefficients", "noise", "fused")
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
# The copies of the library's functions, and the instructions of each. Every processor with AVX2 also has F16C.
COPIES = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64", "i686"):
    COPIES["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    COPIES["avx512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ]


class BuildNative(build_ext):
    """Compile each file once for each instruction set into one library with a C ABI, which is not a Python module."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link, without OpenMP if the compiler lacks it. A failure is only a warning."""
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
                arguments = [f"-DGN_ISA={copy}", "-c", str(SOURCES / f"{source}.cpp"), "-o", made]
                subprocess.run([compiler, *FLAGS, *openmp, *COPIES[copy], *arguments], check=True)
                return made

            objects = list(pool.map(compiled, product(FILES, COPIES)))
            abi = runpy.run_path(str(NATIVE / "abi.py"))["number"]()
            library = [str(SOURCES / "library.cpp"), f"-DGN_ABI={abi}LL", *(["-DGN_X86"] if "avx2" in COPIES else [])]
            subprocess.run([compiler, *FLAGS, *openmp, "-shared", *library, *objects, "-o", str(target)], check=True)


setup(
    ext_modules=[Extension("ghostnoise.engine.backends.native._library", sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative},
)
