"""Seeds as the command line has them."""

import re

from ghostnoise.lab.errors import UserError

PART = re.compile(r"(\d{1,18})(?:\.\.(\d{1,18}))?")
MOST = 100_000


def read(text: str) -> list[int]:
    """The seeds of `3`, `0..4` or `0,2,5`, in that order, each once."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        found = PART.fullmatch(part.strip())
        if found is None:
            raise UserError(f"--seeds {text}: must be like 3, 0..4 or 0,2,5")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last - first >= MOST:
            raise UserError(f"--seeds {text}: {part.strip()} must run upwards, over {MOST:,} seeds at most")
        seeds |= dict.fromkeys(range(first, last + 1))
    return list(seeds)
