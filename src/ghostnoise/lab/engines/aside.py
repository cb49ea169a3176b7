"""Jobs whose runs another process has: looked at again until they are over or free."""

import time

from ghostnoise.lab.engines.job import Ended, Job, Place
from ghostnoise.lab.store import RunFolder, scan
from ghostnoise.version import NUMERICS

LOOKED_AT_EVERY = 0.5  # seconds


class Aside:
    """Jobs that are put aside."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.jobs: dict[str, Job] = {}
        self.looked = 0.0

    def put(self, job: Job) -> None:
        """Look at this one again later."""
        self.jobs[job.identity] = job
        self.looked = time.monotonic()

    def look(self) -> tuple[list[Ended], list[Job]]:
        """What is over by now, and what is free to be run here; looks from time to time only."""
        if not self.jobs or time.monotonic() - self.looked < LOOKED_AT_EVERY:
            return [], []
        self.looked = time.monotonic()
        ended, free = [], []
        for job in list(self.jobs.values()):
            over = result(job, self.place)
            if over is not None:
                ended.append(over)
            elif not RunFolder(self.place.folder(job), lambda text: None).owned():
                free.append(job)
            else:
                continue
            del self.jobs[job.identity]
        return ended, free

    def clear(self) -> list[Job]:
        """Give up on all of them."""
        jobs, self.jobs = list(self.jobs.values()), {}
        return jobs


def pause() -> None:
    """Wait until it is worth another look."""
    time.sleep(LOOKED_AT_EVERY / 2)


def result(job: Job, place: Place) -> Ended | None:
    """How the job's run ended, if it did."""
    found = scan.look(place.folder(job), lambda text: None, NUMERICS)
    return Ended(job, found.status) if found.status in ("finished", "diverged") else None
