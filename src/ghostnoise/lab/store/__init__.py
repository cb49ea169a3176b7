"""Run folders: the only truth about a run, whatever happens to the process that writes them."""

from ghostnoise.lab.store.folder import RunFolder

__all__ = ["RunFolder"]
