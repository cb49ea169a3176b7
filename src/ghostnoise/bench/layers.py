"""`ghostnoise bench layers`: forward + backward of single layers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from ghostnoise.bench import limit, peers
from ghostnoise.bench.contenders import COMPILED, compiled, contenders
from ghostnoise.bench.rows import Row, rows
from ghostnoise.bench.settings import Record, Settings, conditions, plain
from ghostnoise.bench.timing import Length, Timing, interleave
from ghostnoise.lab.errors import UserError

LIMITS = {False: "bandwidth limit", True: "limit for noise"}


def plan(settings: Settings) -> tuple[list[Row], list[str]]:
    """Return the rows, and a line for everything that is left out."""
    if settings.released is not None:
        peers.released(settings.released)  # raises before anything is measured
    found = rows(settings)
    check_contenders(found, settings)
    return found, [*plain(settings.device), *peers.absent()]


def check_contenders(found: Sequence[Row], settings: Settings) -> None:
    """Check that the names of contenders are those of layers on these rows."""
    known = {each.name: None for row in found for each in contenders(row, settings.device, settings.released)}
    if found and (unknown := [name for name in settings.contenders if name not in known]):
        raise UserError(f"--contender {unknown[0]}: must be one of {', '.join(known)}")


def measure(row: Row, settings: Settings, on_progress: Callable[[float], object]) -> list[Record]:
    """Time every contender and the bandwidth limits on a row, and return a record for each.

    A compiled layer also has the ratio of its time to that of the layer itself, and what compiling adds, as a ratio to
    what it adds to the layer of `torch.nn`.
    """
    torch.manual_seed(0)
    found = contenders(row, settings.device, settings.released, settings.contenders)
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

    def added(name: str) -> float:
        return timings[name + COMPILED].p50 - timings[name].p50

    records = []
    for each in found:
        record = shared | {"contender": each.name, "kind": each.kind} | times(timings[each.name], baseline)
        record |= {"over_limit": timings[each.name].p50 / timings[LIMITS[each.noise]].p50}
        if each.name.endswith(COMPILED):
            eager = each.name.removesuffix(COMPILED)
            record |= {"over_eager": timings[each.name].p50 / timings[eager].p50}
            record |= {"added_ratio": added(eager) / added(found[0].name)}
        records.append(record)
    for name in LIMITS.values():
        limit_of_row = {"contender": name, "kind": "limit"} | times(timings[name], baseline)
        records.append(shared | limit_of_row | {"over_limit": 1.0})
    return [record | conditions(settings) for record in records]


def times(timing: Timing, baseline: Timing) -> Record:
    """Return milliseconds, and the ratios of the medians and of the best times to the baseline of the row."""
    fields = {key if key == "n" else f"{key}_ms": value for key, value in asdict(timing).items()}
    return fields | {"ratio_p50": timing.p50 / baseline.p50, "ratio_best": timing.best / baseline.best}


def synchronizer(device: torch.device) -> Callable[[], object]:
    """Return a function that waits for the device: accelerators run asynchronously."""
    return (lambda: None) if device.type == "cpu" else lambda: torch.accelerator.synchronize(device)
