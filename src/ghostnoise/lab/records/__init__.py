"""Records of finished runs: one file per experiment, written by `runs export` and read by `runs import`."""

from ghostnoise.lab.records.files import Records, export, read
from ghostnoise.lab.records.folders import import_files, recorded

__all__ = ["Records", "export", "import_files", "read", "recorded"]
