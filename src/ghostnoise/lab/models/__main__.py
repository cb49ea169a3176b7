"""Print the networks with their numbers of parameters: `python -m ghostnoise.lab.models`."""

import torch
from rich.console import Console
from rich.table import Table

from ghostnoise.lab.config.schema import ModelSettings, NormSettings
from ghostnoise.lab.models.building import build
from ghostnoise.lab.models.catalog import CATALOG


def count(name: str) -> int:
    """Return the number of parameters of a network at its standard size."""
    network = CATALOG[name]
    norm = NormSettings(method="bn" if network.normalization == "batch" else "none")
    with torch.device("meta"):
        model = build(ModelSettings(name=name), norm, network.shape, network.classes)
    return sum(parameter.numel() for parameter in model.parameters())


def sizes() -> Table:
    """Return a table of the networks: parameters, images, classes, norm, and default placement of noise."""
    made = Table("name")
    for heading in ("parameters", "images", "classes"):
        made.add_column(heading, justify="right")
    made.add_column("norm")
    made.add_column("noise")
    for name, network in CATALOG.items():
        images = "×".join(map(str, network.shape))
        made.add_row(
            name, f"{count(name):,}", images, str(network.classes), network.normalization, network.placements[0]
        )
    return made


def sources() -> Table:
    """Return a table of the sources of the networks."""
    made = Table("name", "network", "source")
    for name, network in CATALOG.items():
        made.add_row(name, network.title, network.source)
    return made


if __name__ == "__main__":
    console = Console()
    console.print(sizes())
    console.print(sources())
