"""Faults of the file system at one operation of a process: the process is killed there, or the disk is full.

`Faults` replaces the functions of `os` and `io` that change files, and counts the operations below a folder. The code
under test has no hooks: whatever it calls ends here.
"""

import builtins
import errno
import io
import os
from contextlib import contextmanager
from pathlib import Path

KILLED = 137
NEEDS_SPACE = ("create", "write", "fsync", "rename", "mkdir")
CREATING = os.O_CREAT | os.O_TRUNC


class Faults:
    """Counts the operations below `folder`, and fails at number `at`, counted from 0.

    Args:
        at: the operation; None only counts.
        action: "kill" ends the process, in the middle of a write; "full" fails once for lack of space, also in the
            middle of a write; "full on" fails from there on.
        dying: called before the process ends.
    """

    def __init__(self, folder, at=None, action="kill", dying=lambda: None):
        self.folder, self.at, self.action, self.dying = os.path.abspath(folder), at, action, dying
        self.kinds = []  # of all operations so far
        self.renamed = []  # the new paths of completed renames
        self.failed = False

    def hit(self, kind, half=lambda: None):
        number = len(self.kinds)
        self.kinds.append(kind)
        here = number == self.at if self.action != "full on" else self.at is not None and number >= self.at
        if not here or (self.action != "kill" and kind not in NEEDS_SPACE):
            return
        half()
        self.failed = True
        if self.action == "kill":
            self.dying()
            os._exit(KILLED)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def inside(self, path):
        if isinstance(path, int):
            return False
        path = os.path.abspath(os.fspath(path))
        return path == self.folder or path.startswith(self.folder + os.sep)

    @contextmanager
    def injected(self):
        real = {name: getattr(os, name) for name in ("open", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir")}
        real["truncate"], opened = os.truncate, io.open
        faults = self

        class Written(io.FileIO):
            def write(self, data):
                faults.hit("write", lambda: io.FileIO.write(self, bytes(data)[: len(data) // 2]))
                return super().write(data)

        def open_(file, mode="r", *args, **kwargs):
            if not faults.inside(file):
                return opened(file, mode, *args, **kwargs)
            if not set(mode) & set("wax+"):
                faults.hit("open")
                return opened(file, mode, *args, **kwargs)
            assert mode in ("wb", "ab"), mode
            faults.hit("create")
            return io.BufferedWriter(Written(file, mode.replace("b", "")))

        def os_open(path, flags, *args, **kwargs):
            if faults.inside(path):
                faults.hit("create" if flags & CREATING else "open")
            return real["open"](path, flags, *args, **kwargs)

        def fsync(handle):
            if faults.inside(os.readlink(f"/proc/self/fd/{handle}").removesuffix(" (deleted)")):
                faults.hit("fsync")
            return real["fsync"](handle)

        def moved(name):
            def move(source, target, **kwargs):
                if faults.inside(target):
                    faults.hit("rename")
                real[name](source, target, **kwargs)
                if faults.inside(target):
                    faults.renamed.append(os.fspath(target))

            return move

        def counted(name, kind):
            def call(path, *args, **kwargs):
                if faults.inside(path):
                    faults.hit(kind)
                return real[name](path, *args, **kwargs)

            return call

        patched = {
            "open": os_open, "fsync": fsync, "replace": moved("replace"), "rename": moved("rename"),
            "unlink": counted("unlink", "unlink"), "mkdir": counted("mkdir", "mkdir"),
            "rmdir": counted("rmdir", "unlink"), "truncate": counted("truncate", "truncate"),
        }  # fmt: skip
        for name, function in patched.items():
            setattr(os, name, function)
        builtins.open = io.open = open_
        try:
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            builtins.open = io.open = opened


def steps(renamed):
    """Return the numbers of the checkpoints among completed renames."""
    names = [Path(path).name for path in renamed]
    return [int(name.split("-")[1]) for name in names if name.startswith("step-") and name.endswith(".pt")]
