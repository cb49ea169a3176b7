"""The C++ library that is built at install: found, loaded, and called with pointers and numbers.

It has a C ABI and knows nothing of torch.
"""

import ctypes
import functools
import importlib.machinery
import os
from pathlib import Path
from typing import Any

import torch

LEVELS = ("baseline", "avx2", "avx512")
GRAIN = 2**15  # elements, as for torch's own operators
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Library:
    """The loaded library, and which copy of its passes is in use."""

    def __init__(self, handle: ctypes.CDLL, level: str) -> None:
        self.handle, self.level = handle, level
        self.functions: dict[str, Any] = {}

    def run(self, name: str, *arguments: int | float | ctypes.Array[ctypes.c_int64]) -> None:
        """Run a pass. Pointers are given as integers."""
        function = self.functions.get(name)
        if function is None:
            function = self.functions[name] = getattr(self.handle, f"gn_{name}_{self.level}")
            function.argtypes = [_c_type(value) for value in arguments]
        if function(*arguments) != 0:
            raise RuntimeError(f"the native pass {name} was built without the dtype of code {arguments[0]}")


def _c_type(value: int | float | ctypes.Array[ctypes.c_int64]) -> Any:
    return {int: ctypes.c_int64, float: ctypes.c_double}.get(type(value), ctypes.c_void_p)


@functools.cache
def library() -> Library | str:
    """The library, or why there is none."""
    folder = Path(os.environ.get("GHOSTNOISE_NATIVE_FOLDER") or Path(__file__).parent)  # elsewhere: another build of it
    files = [path for suffix in importlib.machinery.EXTENSION_SUFFIXES for path in folder.glob(f"_library{suffix}")]
    if not files:
        return "the C++ library was not built; reinstall with a C++ compiler on the machine"
    try:
        handle = ctypes.CDLL(str(files[0]))
    except OSError as error:
        return f"the C++ library does not load: {error}"
    return Library(handle, LEVELS[handle.gn_level()])


def run(name: str, *arguments: int | float | ctypes.Array[ctypes.c_int64]) -> None:
    """Run a pass of the library, which is there."""
    found = library()
    assert isinstance(found, Library)
    found.run(name, *arguments)


def threads(elements: int) -> int:
    """Torch's number of threads; one for what is done before others have woken up."""
    return torch.get_num_threads() if elements >= GRAIN else 1
