"""The batch norms of the registry, each with the options of an instance for tests.

A family is the name of a method that has a batch norm. A new method in `ghostnoise.methods` appears here by itself, and
so in all tests that are parametrized over `FAMILIES` or `LAYERS`.
"""

import inspect

import torch

from ghostnoise.methods import registry

SPECS = {name: spec for name, spec in registry.specs().items() if spec.norm is not None}
FAMILIES = list(SPECS)
OPTIONS = {
    name: ({} if spec.ghost_size == "none" else {"ghost_size": 4 if spec.partitions else 5}) | spec.example
    for name, spec in SPECS.items()
}
SHAPES = {1: (10, 3, 7), 2: (10, 3, 4, 5), 3: (10, 3, 2, 3, 4)}
LAYERS = [(family, dimensions) for family in FAMILIES for dimensions in SHAPES]
NOISY = [name for name, spec in SPECS.items() if spec.noise is not None]
DRAWING = [name for name, spec in SPECS.items() if "generator" in inspect.signature(spec.norm).parameters]
PLAIN_AT_INFERENCE = [name for name, spec in SPECS.items() if not spec.changes_inference]


def layer_class(family, dimensions):
    return SPECS[family].norms[dimensions - 1]


def build(family, dimensions, num_features=3, **options):
    return layer_class(family, dimensions)(num_features, **(OPTIONS[family] | options))


def function(family):
    """Return the function of a family, and the keywords that its layer of `build` calls it with."""
    return SPECS[family].norm.function, {key: value for key, value in OPTIONS[family].items() if key != "history"}


def needs_running_statistics(family):
    """Return whether a family refuses `track_running_stats=False`."""
    try:
        build(family, 2, track_running_stats=False)
    except ValueError:
        return True
    return False


def plain(dimensions, num_features=3, **options):
    return getattr(torch.nn, f"BatchNorm{dimensions}d")(num_features, **options)


def example(dimensions, dtype=torch.float32):
    generator = torch.Generator().manual_seed(dimensions)
    return (torch.randn(SHAPES[dimensions], dtype=torch.float64, generator=generator) * 2 + 1).to(dtype)


UNTRACKED = [family for family in FAMILIES if not needs_running_statistics(family)]
