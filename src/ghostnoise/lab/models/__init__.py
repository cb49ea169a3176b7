"""The networks of the paper, with the norm and the noise of the settings."""

from ghostnoise.lab.models.building import build, names, placement
from ghostnoise.lab.models.catalog import CATALOG, Network
from ghostnoise.lab.models.slots import Slots, Task

__all__ = ["CATALOG", "Network", "Slots", "Task", "build", "names", "placement"]
