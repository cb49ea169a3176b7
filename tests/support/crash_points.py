"""Train tiny runs with faults, and resume them. Children are forked from a process that has trained already, so that a
run takes a fraction of a second.

    python -m support.crash_points FOLDER points ACTION FIRST EVERY

trains a run with a fault at each operation on its folder, from the first in steps of EVERY, and resumes it. It prints a
line of JSON for each point, and last the number of operations of the undisturbed run.

    python -m support.crash_points FOLDER kills COUNT SEED

kills each of several kinds of runs COUNT times at random, and resumes them.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from ghostnoise import cli
from ghostnoise.lab.store import checkpoints
from ghostnoise.lab.store.folder import history, read
from support.faults import NEEDS_SPACE, Faults, steps

SETTINGS = [
    "digits", "model.name=mlp", "model.widths=[8]", "data.limit=256", "train.batch_size=16", "train.epochs=4",
    "optim.warmup_epochs=0", "norm.ghost_size=4", "train.device=cpu",
]  # fmt: skip
METERED = ["meter.every=2", "meter.batches=1", "meter.draws=4"]
KINDS = {"plain": [], "bf16": ["train.amp=bf16"], "EMA": ["train.ema=0.9"], "metered": METERED}
ALL = [setting for settings in KINDS.values() for setting in settings]
TIMINGS = ("seconds", "images_per_second", "ended")


def train(runs, faults=None, more=ALL):
    """Train, and return the exit code and the lines on standard error."""
    errors = io.StringIO()
    arguments = ["train", *SETTINGS, *more, "--runs", str(runs), "--quiet", "--checkpoint-seconds", "0.000001"]
    quiet = contextlib.redirect_stdout(io.StringIO())
    with contextlib.redirect_stderr(errors), quiet, (faults or Faults(runs)).injected():
        code = cli.main(arguments)
    return {"code": code, "errors": errors.getvalue().splitlines()}


def forked(work):
    """Call `work(send)` in a child process, and return what it sent last and its exit code."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            send = lambda value: os.write(writing, (json.dumps(value) + "\n").encode())  # noqa: E731
            work(send)
            os._exit(0)
        except BaseException as error:  # the child must not return
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as sent:
        lines = sent.read().splitlines()
    _, status = os.waitpid(child, 0)
    return json.loads(lines[-1]) if lines else None, os.waitstatus_to_exitcode(status)


def outcome(runs):
    """Return the result and the metrics without timings, and the names of all files."""
    (folder,) = (runs / "digits").iterdir()
    run = read(folder)
    lines, result = history(run), run.result
    kept = [{name: value for name, value in each.items() if name not in TIMINGS} for each in (result, *lines)]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {"kept": kept, "files": [name.rpartition("-")[0] if name.endswith(".pt") else name for name in files]}


def point(runs, at, action):
    """Train with a fault at one operation, then without; return what happened."""

    def disturbed(send):
        faults = Faults(runs, at, action)
        faults.dying = lambda: send({"steps": steps(faults.renamed)})
        ended = train(runs, faults)
        send(ended | {"steps": steps(faults.renamed), "failed": faults.failed})

    def resumed(send):
        send(train(runs))

    first, code = forked(disturbed)
    kept = [
        int(path.name.split("-")[1])
        for folder in runs.glob("digits/*/checkpoints")
        for path in (*checkpoints.saved(folder), *checkpoints.saved(folder, "final"))
        if checkpoints.read(checkpoints.intact(path))
    ]
    second, second_code = forked(resumed)
    found = outcome(runs) if second_code == 0 and second["code"] == 0 else None
    return {
        "at": at, "exit": code, "first": first, "kept": max(kept, default=0), "exit of second": second_code,
        "second": second, "outcome": found,
    }  # fmt: skip


def points(folder, action, first, every):
    faults = Faults(folder / "whole")
    assert train(folder / "whole", faults)["code"] == 0
    expected = outcome(folder / "whole")
    for at in range(int(first), len(faults.kinds), int(every)):
        if action != "kill" and faults.kinds[at] not in NEEDS_SPACE:
            continue
        runs = folder / f"{at}"
        found = point(runs, at, action)
        found["kind"], found["same"] = faults.kinds[at], found.pop("outcome") == expected
        print(json.dumps(found), flush=True)
        shutil.rmtree(runs)
    print(json.dumps({"operations": len(faults.kinds)}), flush=True)


def kills(folder, count, seed):
    chance = random.Random(int(seed))
    for kind, more in KINDS.items():
        assert train(folder / kind / "whole", more=more)["code"] == 0
        began = time.monotonic()
        assert not _killed(folder / kind / "again", more, None)
        took = time.monotonic() - began  # without imports, which the first run has done
        expected, killed, finished = outcome(folder / kind / "whole"), 0, 0
        runs = folder / kind / "0"
        while killed < int(count) or (runs / "digits").exists():
            killed += _killed(runs, more, chance.uniform(0, 0.5 * took) if killed < int(count) else None)
            if list(runs.glob("digits/*/run.json")):
                assert outcome(runs) == expected, (kind, finished)
                finished += 1
                runs = folder / kind / f"{finished}"
        left = [str(path) for path in folder.rglob("*") if path.name.endswith((".part", ".damaged"))]
        print(json.dumps({"kind": kind, "kills": killed, "finished": finished, "left": left}), flush=True)


def _killed(runs, more, delay):
    """Train in a child, kill it after a delay, and return whether it was still running."""
    child = os.fork()
    if not child:
        try:
            os._exit(train(runs, more=more)["code"])
        except BaseException as error:  # the child must not return
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code == -signal.SIGKILL


if __name__ == "__main__":
    {"points": points, "kills": kills}[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:])
