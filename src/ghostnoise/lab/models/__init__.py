"""The paper's networks, with the norm and the noise that the settings ask for."""

from ghostnoise.lab.models.building import build, names, placement
from ghostnoise.lab.models.catalog import CATALOG, Network
from ghostnoise.lab.models.slots import Slots, Task

__all__ = ["CATALOG", "Network", "Slots", "Task", "build", "names", "placement"]
