"""The C++ library that is built at installation: find it, check its ABI, load it, and call its functions.

It has a C ABI (`abi`), so the same file serves every version of Python, and it does not depend on torch. On Linux it
needs libgomp, which is not part of the wheel: torch has loaded its own before, and both use the same threads.
"""

import ctypes
import functools
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from ghostnoise.engine.backends.native import abi

FILE = "_library" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")  # as in setup.py
LEVELS = ("baseline", "avx2", "avx512")
GRAIN = 2**15  # elements, as for torch's own operators
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
HUGE_PAGES = "GHOSTNOISE_HUGE_PAGES"

Argument = int | float | bytes | ctypes.Array[ctypes.c_int64]


class Library:
    """The loaded library, with its functions for one instruction set."""

    def __init__(self, handle: ctypes.CDLL, level: str) -> None:
        self.handle, self.level = handle, level
        self.functions: dict[str, tuple[Any, int]] = {}
        for name, signature in abi.SIGNATURES.items():
            function = getattr(handle, f"gn_{name}_{level}")
            function.argtypes = [abi.TYPES[kind] for kind in signature]
            self.functions[name] = function, len(signature)

    def run(self, name: str, *arguments: Argument) -> None:
        """Call a function. Addresses are given as integers, those of structs as their bytes."""
        function, count = self.functions[name]
        if len(arguments) != count:  # ctypes accepts more arguments than declared
            raise TypeError(f"the native function {name} takes {count} arguments, not {len(arguments)}")
        status = function(*arguments)
        if status != 0:
            raise _error(status, name, arguments)


def _error(status: int, name: str, arguments: tuple[Argument, ...]) -> Exception:
    if status == 2:
        return MemoryError(f"the native function {name} could not allocate memory for its tables; use a smaller batch")
    if status == 3:
        return IndexError(f"the native function {name} got indices outside of the batch: they must lie in [0, B)")
    first = arguments[0]
    code = int.from_bytes(first[:8], sys.byteorder) if isinstance(first, bytes) else first
    return RuntimeError(f"the native function {name} does not support the dtype with code {code}")


@functools.cache
def library() -> Library | str:
    """Return the library, or the reason why there is none."""
    folder = Path(os.environ.get("GHOSTNOISE_NATIVE_FOLDER") or Path(__file__).parent)  # elsewhere: another build
    if not (folder / FILE).is_file():
        return "the C++ library was not built; install a wheel, or reinstall with a C++ compiler on the machine"
    try:
        handle = ctypes.CDLL(str(folder / FILE))
    except OSError as error:
        return f"the C++ library does not load: {error}"
    if _abi_number(handle) != abi.number():
        reason = "the C++ library was built from other sources (its ABI number differs); reinstall to build it again"
        warnings.warn(f"ghostnoise runs without its native backend: {reason}", RuntimeWarning, stacklevel=2)
        return reason
    handle.gn_request_huge_pages(int(_requests_huge_pages()))
    return Library(handle, LEVELS[handle.gn_level()])


def _abi_number(handle: ctypes.CDLL) -> int | None:
    try:
        function = handle.gn_abi
    except AttributeError:
        return None
    function.restype = ctypes.c_int64
    return int(function())


@functools.cache
def _requests_huge_pages() -> bool:
    return os.environ.get(HUGE_PAGES, "1") != "0"


def huge_pages() -> str:
    """Describe for `ghostnoise doctor` whether huge pages are requested for the memory of large results."""
    if _requests_huge_pages():
        return f"requested for large results (set {HUGE_PAGES}=0 to disable)"
    return f"not requested ({HUGE_PAGES}=0)"


def thread_limit() -> str:
    """Describe for `ghostnoise doctor` how many threads the library uses."""
    found = library()
    if isinstance(found, str) or found.handle.gn_openmp():
        return f"{torch.get_num_threads()} (set by torch.set_num_threads)"
    return f"{torch.get_num_threads()} (the native backend uses 1: it was built without OpenMP)"


def run(name: str, *arguments: Argument) -> None:
    """Call a function of the library, which must be available."""
    library().run(name, *arguments)  # type: ignore[union-attr]


def threads(elements: int) -> int:
    """Return torch's number of threads, or 1 if the work is too small to justify waking the thread pool."""
    return torch.get_num_threads() if elements >= GRAIN else 1
