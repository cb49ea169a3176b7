"""What a sweep needs to know about the machine: the device and data of its runs, and the runner for them."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ghostnoise.lab import data
from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.plan import Point, Resolve
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.runners import Place, Runner, local, ray
from ghostnoise.lab.train import machine

RUNNERS = ("local", "ray")


def resolver(folder: Path | None, runner: str = "local") -> Resolve:
    """Return a function that resolves settings for this machine, as `train` does.

    A device of a cluster is not checked here: this machine may not have it.
    """
    place = data.data_folder(folder)

    @cache
    def device(name: str) -> str:
        return name if runner != "local" and name != "auto" else machine.select_device(name).type

    def resolve(settings: Settings) -> Settings:
        kind = device(settings.train.device)
        if settings.train.smoke:
            missing = not data.present(settings.data, place)
            resolved = recipe.resolve(settings, device=kind, processes=1, stand_in=missing)
        else:  # the same, without validating every cell of a grid again
            resolved = settings.model_copy(update={"train": recipe.with_value(settings.train, "device", kind)})
        recipe.check(resolved)
        return resolved

    return resolve


def need_data(points: Iterable[Point], folder: Path | None) -> None:
    """Raise if the data of no run are found; if some are found, the other runs fail one by one."""
    place, missing = data.data_folder(folder), None
    seen = {point.settings.data.model_dump_json(): point.settings.data for point in points}
    for each in seen.values():
        if data.present(each, place):
            return
        missing = missing or each
    if missing is not None:
        folder = getattr(missing, "folder", None)
        remedy = "copy them to that folder" if folder else f"run `ghostnoise data get {missing.name}`"
        raise UserError(
            f"{folder or missing.name}: its images were not found in {place}; {remedy}, or use --smoke, which "
            "does not need them"
        )


def make_runner(
    name: str, place: Place, points: Iterable[Point], workers: int | None, threads: int | None,
    cluster: Mapping[str, Any] = MappingProxyType({}),
) -> Runner:  # fmt: skip
    """Create a runner; `cluster` has the options of the Ray runner: address, cpus, gpus, storage."""
    devices = {point.settings.train.device for point in points}
    if name == "local":
        if "mps" in devices:
            workers = workers or 1
        return local.LocalRunner(place, workers, threads, local.gpus() if "cuda" in devices else ())
    own = {"cpus": threads or 1, "gpus": int("cuda" in devices)} | dict(cluster)
    return ray.RayRunner(place, threads=threads, **own)
