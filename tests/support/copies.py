"""The copies of the native functions that this machine can run, the best one last."""

from ghostnoise.engine.backends.native import library

FOUND = library.library()
COPIES = () if isinstance(FOUND, str) else library.LEVELS[: library.LEVELS.index(FOUND.level) + 1]
