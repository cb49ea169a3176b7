"""Run folders: crash-safe storage of settings, metrics, checkpoints and results."""

from ghostnoise.lab.store.folder import RunFolder

__all__ = ["RunFolder"]
