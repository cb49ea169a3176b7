"""`ghostnoise bench layers`: forward + backward of single layers."""

from collections.abc import Callable
from dataclasses import asdict

import torch

from ghostnoise.bench import limit, peers
from ghostnoise.bench.contenders import compiled, contenders, usable_backends
from ghostnoise.bench.rows import Row, rows
from ghostnoise.bench.settings import Record, Settings, conditions
from ghostnoise.bench.timing import Length, Timing, interleave
from ghostnoise.engine.backends.select import Name

LIMITS = {False: "bandwidth limit", True: "limit for noise"}


def plan(settings: Settings) -> tuple[list[Row], list[str]]:
    """Return the rows, and a line for everything that is left out."""
    if settings.released is not None:
        peers.released(settings.released)  # raises before anything is measured
    return rows(settings), [*usable_backends(settings.device)[1], *peers.absent()]


def measure(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Time every contender and the bandwidth limits on a row, and return a record for each."""
    torch.manual_seed(0)
    usable: list[Name] = usable_backends(settings.device)[0]
    found = contenders(row, usable, settings.device, settings.released)
    found += compiled(found) if settings.compiled else []
    x, dy = row.draw(settings.device)
    steps = {contender.name: contender.step(x, dy) for contender in found}
    steps |= {name: limit.streams(x, noise) for noise, name in LIMITS.items()}
    timings = interleave(
        steps,
        Length(settings.seconds, settings.rounds, warmup=1 if settings.quick else 2),
        most_rounds={contender.name: contender.most_rounds for contender in found if contender.most_rounds},
        synchronize=synchronizer(settings.device),
        on_progress=on_progress,
    )
    shared: Record = {"bench": "layers", "row": row.name, "shape": row.size, "memory_format": row.memory_format}
    shared |= {"fixed_cost": row.fixed_cost}
    baseline = timings[found[0].name]
    records = [
        shared
        | {"contender": contender.method, "kind": contender.kind, "backend": contender.backend or ""}
        | times(timings[contender.name], baseline)
        | {"over_limit": over_limit(timings, contender.name, LIMITS[contender.noise])}
        for contender in found
    ]
    records += [
        shared
        | {"contender": name, "kind": "limit", "backend": ""}
        | times(timings[name], baseline)
        | {"over_limit": 1.0}
        for name in LIMITS.values()
    ]
    return [record | conditions(settings) for record in records]


def times(timing: Timing, baseline: Timing) -> Record:
    """Return milliseconds, and the ratios of the medians and of the best times to the baseline of the row."""
    fields = {key if key == "n" else f"{key}_ms": value for key, value in asdict(timing).items()}
    return fields | {"ratio_p50": timing.p50 / baseline.p50, "ratio_best": timing.best / baseline.best}


def over_limit(timings: dict[str, Timing], name: str, limit_name: str) -> float:
    """Return the ratio of the medians of a contender and its limit."""
    return timings[name].p50 / timings[limit_name].p50


def synchronizer(device: torch.device) -> Callable[[], object]:
    """Return a function that waits for the device: accelerators run asynchronously."""
    return (lambda: None) if device.type == "cpu" else lambda: torch.accelerator.synchronize(device)
