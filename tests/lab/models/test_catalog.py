"""The networks in the catalog and in the guide."""

import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from ghostnoise.lab import models
from ghostnoise.lab.config.methods import NormSettings, methods
from ghostnoise.lab.config.schema import ModelSettings
from ghostnoise.lab.models.catalog import having

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "networks.md"
NAMES = [
    "resnet18", "resnet20", "resnet8", "resnet50", "wsln-resnet18", "preact-resnet18", "preact-wsln-resnet18",
    "nf-resnet26", "simple-vit", "convmixer", "mlp", "digits-net", "conv1d", "wsln-conv1d", "nf-resnet1d", "vit1d",
    "convmixer1d",
]  # fmt: skip


def test_names():
    assert models.names() == list(models.CATALOG) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_network_has_the_parameters_of_its_entry(name):
    network = models.CATALOG[name]
    norm = NormSettings(method="bn" if network.normalization == "batch" else "none")
    with torch.device("meta"):
        model = models.build(ModelSettings(name=name), norm, network.shape, network.classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == network.parameters


def test_entries_are_whole_and_fixed():
    for name, network in models.CATALOG.items():
        assert network.title
        assert network.source
        assert network.methods[0] == ("bn" if network.normalization == "batch" else "none")
        assert set(network.methods) & {"bn", "none"} == {network.methods[0]}
        for method in methods():
            assert (name in having(method)) == (method in network.methods)
        with pytest.raises(FrozenInstanceError):
            network.parameters = 0


def test_the_guide_matches_the_catalog():
    rows = [line.strip("| ").split(" | ") for line in GUIDE.read_text().splitlines() if re.match(r"\| `[a-z]", line)]
    listed = {cells[0].strip("`"): cells for cells in rows if len(cells) == 6}
    assert list(listed) == NAMES
    for name, (_, source, parameters, normalization, place, _) in listed.items():
        network = models.CATALOG[name]
        assert parameters == f"{network.parameters:,}", name
        assert normalization == network.normalization, name
        assert place == network.placements[0] == models.placement(name, "gni"), name
        if not source.startswith("the paper"):
            assert re.findall(r"arxiv.org/abs/([\d.]+)", source) == re.findall(r"arXiv:([\d.]+)", network.source), name


def test_the_guide_lists_the_placements_of_each_method():
    for place in ("inside", "after", "activation", "branch"):
        (row,) = [line for line in GUIDE.read_text().splitlines() if line.startswith(f'| `"{place}"`')]
        assert re.findall(r"`(\w+)`", row.split("|")[3]) == [
            name for name, info in methods().items() if place in info.placements
        ]
