"""What a sweep needs to know of the machine: the device and data of its runs, and the engine for them."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ghostnoise.lab import data
from ghostnoise.lab.config import recipe
from ghostnoise.lab.config.plan import Point, Resolve
from ghostnoise.lab.config.schema import Settings
from ghostnoise.lab.engines import Engine, Place, local, ray
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.train import machine

ENGINES = ("local", "ray")


def resolver(folder: Path | None, engine: str = "local") -> Resolve:
    """Fills in what only the machine knows, as `train` does; a cluster has devices that this machine may not have."""
    place = data.data_folder(folder)

    @cache
    def device(name: str) -> str:
        return name if engine != "local" and name != "auto" else machine.choose(name).type

    def resolve(settings: Settings) -> Settings:
        kind = device(settings.train.device)
        if settings.train.smoke:
            missing = not data.present(settings.data, place)
            resolved = recipe.resolve(settings, device=kind, processes=1, stand_in=missing)
        else:  # the same, without validating all of a grid once more
            resolved = settings.model_copy(update={"train": settings.train.model_copy(update={"device": kind})})
        recipe.check(resolved)
        return resolved

    return resolve


def need_data(points: Iterable[Point], folder: Path | None) -> None:
    """Refuse a sweep of which no run has its images; where some have, the others fail one by one."""
    place, missing = data.data_folder(folder), None
    seen = {point.settings.data.model_dump_json(): point.settings.data for point in points}
    for each in seen.values():
        if data.present(each, place):
            return
        missing = missing or each
    if missing is not None:
        remedy = f"`ghostnoise data get {missing.name}` fetches them" if missing.folder is None else "put them there"
        raise UserError(
            f"{missing.folder or missing.name}: its images are not in {place}; {remedy}, --smoke needs none"
        )


def engine(
    name: str, place: Place, points: Iterable[Point], workers: int | None, threads: int | None,
    cluster: Mapping[str, Any] = MappingProxyType({}),
) -> Engine:  # fmt: skip
    """The engine called `name`; `cluster` are options of the Ray engine: address, cpus, gpus, storage."""
    devices = {point.settings.train.device for point in points}
    if name == "local":
        if "mps" in devices:
            workers = workers or 1
        return local.LocalEngine(place, workers, threads, local.gpus() if "cuda" in devices else ())
    own = {"cpus": threads or 1, "gpus": int("cuda" in devices)} | dict(cluster)
    return ray.RayEngine(place, threads=threads, **own)
