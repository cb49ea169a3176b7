"""Implementations to compare with: ghost batch norm of two libraries, the paper's code, and a loop over samples.

Libraries that are not installed are left out and listed. The paper's code is compared if its folder is given.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ghostnoise.bench.rows import Row
from ghostnoise.lab.errors import UserError

# Without dependencies: the measured module needs only torch and numpy, and mosaicml would install dozens of packages.
REMEDIES = {"Composer": "pip install --no-deps mosaicml", "tabnet": "pip install --no-deps pytorch-tabnet"}


def composer() -> Any | None:
    """Return Composer's module of ghost batch norm, or None.

    It is loaded as a single file, with stubs for the parts of Composer that only its trainer uses: importing the
    package would need all of its dependencies.
    """
    package = importlib.util.find_spec("composer")
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder, "algorithms", "ghost_batchnorm", "ghost_batchnorm.py")
        spec = importlib.util.spec_from_file_location("ghostnoise_bench_composer", path)
        if path.is_file() and spec and spec.loader:
            module = importlib.util.module_from_spec(spec)
            with _composer_stubs():
                spec.loader.exec_module(module)
            return module
    return None


def tabnet() -> Any | None:
    """Return pytorch-tabnet's module of ghost batch norm, or None."""
    if importlib.util.find_spec("pytorch_tabnet") is None:
        return None
    return importlib.import_module("pytorch_tabnet.tab_network")


def absent() -> list[str]:
    """Return a line for each library that is not installed, with the command that installs it."""
    found = {"Composer": composer(), "tabnet": tabnet()}
    return [
        f"{name}'s ghost batch norm is not installed: {REMEDIES[name]}" for name, module in found.items() if not module
    ]


def ghost_batch_norms(row: Row) -> dict[str, nn.Module]:
    """Return the layers of the libraries for this row, by name."""
    layers: dict[str, nn.Module] = {}
    if row.tokens:
        return layers
    if module := composer():
        wrapper = module.GhostBatchNorm2d if row.images else module.GhostBatchNorm1d
        base = row.baseline()[1](row.channels)
        layers[f"Composer GBN-{row.ghost_size}"] = wrapper(base_batchnorm=base, ghost_batch_size=row.ghost_size)
    if module := tabnet():
        layer = module.GBN(row.channels, virtual_batch_size=row.ghost_size)
        layers[f"tabnet GBN-{row.ghost_size}"] = OverPositions(layer) if row.images else layer
    return layers


# Files in the folder nodo of the paper's repository, and their classes.
RELEASED = {
    "ghost_batch_norm": "GhostBatchNorm2d",
    "exclusive_batch_norm": "ExclusiveBatchNorm2d",
    "ghost_noise_injector_replacement": "GhostNoiseInjectorR",
}


def released(folder: Path) -> dict[str, Any]:
    """Return the classes of the paper's code in a checkout of its repository (github.com/epfml/ghost-noise)."""
    found: dict[str, Any] = {}
    for file, name in RELEASED.items():
        path = folder / "nodo" / f"{file}.py"
        spec = importlib.util.spec_from_file_location(f"ghostnoise_bench_released_{file}", path)
        try:
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found[name] = getattr(module, name)
        except (OSError, ImportError, SyntaxError, AttributeError, AssertionError) as error:
            raise UserError(
                f"--released {folder}: {path} with the class {name} cannot be loaded ({error}); give the folder of a "
                "checkout of github.com/epfml/ghost-noise"
            ) from None
    return found


def released_layers(row: Row, folder: Path) -> dict[str, tuple[nn.Module, bool]]:
    """Return the layers of the paper's code for this row by name, and whether they are noise alone."""
    classes, size = released(folder), row.ghost_size
    found = {f"released GNI-{size}": (classes["GhostNoiseInjectorR"](size, channel_last=row.tokens), True)}
    for label, name in (("GBN", "GhostBatchNorm2d"), ("XBN", "ExclusiveBatchNorm2d")):
        layer = None if row.tokens else classes[name](row.channels, batch_size=size)
        if layer is not None:
            found[f"released {label}-{size}"] = (layer if row.images else AsImages(layer), False)
    return found


class AsImages(nn.Module):
    """Apply a layer for images (B, C, H, W) to features (B, C)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        y: Tensor = self.layer(x[:, :, None, None])
        return y[:, :, 0, 0]


class OverPositions(nn.Module):
    """Apply a layer that takes 3 dimensions to images (B, C, H, W), viewed as (B, C, S), in either memory format."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        y: Tensor = self.layer(x.flatten(2))
        return y.reshape(x.shape)


class NaiveGhostNoise(nn.Module):
    """Ghost noise by its definition: for each sample, draw samples, compute their statistics, inject (eq. 10)."""

    def __init__(self, ghost_size: int, channel_dim: int = 1, eps: float = 1e-3) -> None:
        super().__init__()
        self.ghost_size, self.channel_dim, self.eps = ghost_size, channel_dim, eps

    def forward(self, x: Tensor) -> Tensor:
        """Inject noise, one sample at a time."""
        x = x.movedim(self.channel_dim, 1)
        around = [0, *range(2, x.ndim)]
        with torch.no_grad():
            var, mean = torch.var_mean(x, around, correction=0, keepdim=True)
        samples = []
        for k in range(len(x)):
            with torch.no_grad():
                drawn = x[torch.randint(len(x), (self.ghost_size,), device=x.device)]
                ghost_var, ghost_mean = torch.var_mean(drawn, around, correction=0, keepdim=True)
                ratio = ((ghost_var + self.eps) / (var + self.eps)).sqrt()
            samples.append((x[k : k + 1] - (ghost_mean - mean)) / ratio)
        return torch.cat(samples).movedim(1, self.channel_dim)


@contextmanager
def _composer_stubs() -> Iterator[None]:
    parts = {"core": ("Algorithm", "Event", "State"), "loggers": ("Logger",), "utils": ("module_surgery",)}
    stubs = {"composer": ModuleType("composer")}
    for name, contents in parts.items():
        stubs[f"composer.{name}"] = module = ModuleType(f"composer.{name}")
        for content in contents:
            setattr(module, content, type(content, (), {}))
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
