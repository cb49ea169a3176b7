"""Unpickle CIFAR's Python files without running anything that they ask for."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from ghostnoise.lab.errors import UserError


def _as_bytes(text: str, encoding: str) -> bytes:
    """What `_codecs.encode` does in pickles of Python 3, which spell bytes as latin-1 text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes spelled in {encoding}")
    return text.encode("latin1")


_RECONSTRUCT = np.empty(0).__reduce__()[0]  # numpy renamed its module, not the function
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _as_bytes,
}


class _Restricted(pickle.Unpickler):
    """Builds containers, numbers, bytes and numpy arrays, and nothing else."""

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")  # text of Python 2
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UserError(
                f"{self.path}: asks for {module}.{name}, which no CIFAR file needs; it was not executed; "
                "replace the file by the official one"
            )
        return _ALLOWED[module, name]


def unpickle(data: bytes, path: Path) -> Any:
    """The object in `data`, the contents of `path`: containers, numbers, bytes and numpy arrays only."""
    try:
        return _Restricted(data, path).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise UserError(
            f"{path}: not a pickle of CIFAR's ({type(error).__name__}: {error}); replace the file by the official one"
        ) from None
