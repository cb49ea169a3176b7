"""Build a network from its settings."""

from collections.abc import Iterable
from functools import lru_cache

from torch import nn

from ghostnoise.lab.config.methods import NormSettings, Placement, methods
from ghostnoise.lab.config.schema import ModelSettings
from ghostnoise.lab.errors import UserError
from ghostnoise.lab.models import foreign
from ghostnoise.lab.models.catalog import CATALOG, Network, having
from ghostnoise.lab.models.resnet import zero_init_last
from ghostnoise.lab.models.slots import Slots, Task, refuse_batch_norm_settings
from ghostnoise.text import nearest


def build(model: ModelSettings, norm: NormSettings, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a network for images (C, H, W) or signals (C, L) of `shape`, on the CPU.

    The weights come from torch's default generator. The global scope includes all ranks of torch.distributed; without
    other ranks it is the local scope.

    >>> build(ModelSettings(name="mlp", widths=[8]), NormSettings(method="gni", ghost_size=4), (1, 4, 4), 10)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=16, out_features=8, bias=False)
      (2): GhostNoiseBatchNorm1d(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True,
           ghost_size=4, noise_eps=0.001, components='both', draw='replacement', normalizer='batch')
      (3): ReLU()
      (4): Linear(in_features=8, out_features=10, bias=True)
    )
    """
    if len(shape) not in (2, 3) or min(shape) < 1 or classes < 1:
        raise UserError(
            f"shape={shape}, classes={classes}: must be (channels, height, width) or (channels, length) and a count, "
            "1 or more"
        )
    try:
        if foreign.named(model.name):
            made = foreign.build(model, norm, shape, classes)
        else:
            network = _find(model.name)
            _check_shape(model.name, network, shape)
            place = _placement(model.name, network, norm)
            slots = Slots(norm, network.normalization, place, network.channel_dim)
            made = network.builder(slots, Task(shape, classes, _widths(model, network)))
    except ValueError as error:  # of a layer
        raise UserError(str(error)) from error
    if model.zero_init_last and not zero_init_last(made):
        raise UserError(
            f"model.zero_init_last for {model.name!r}: only for networks with a norm at the end of each residual "
            "branch, such as 'resnet18' and 'resnet50'; leave it out"
        )
    return made


def names() -> list[str]:
    """Return the names of the networks of this library; "timm:NAME" is a network of timm."""
    return list(CATALOG)


@lru_cache(maxsize=1024)  # thousands of cells are checked
def placement(name: str, method: str) -> Placement | None:
    """Return the default placement of a method's noise in a network; None for methods without noise.

    >>> placement("resnet18", "gni"), placement("simple-vit", "gni"), placement("resnet18", "gbn")
    ('inside', 'after', None)
    """
    if foreign.named(name):
        return foreign.placement(name, method)
    network = _find(name)
    _check_method(name, network, method)
    return network.offered(method)[0] if methods()[method].placements else None


def _find(name: str) -> Network:
    if name in CATALOG:
        return CATALOG[name]
    near = nearest(name.lower(), CATALOG, cutoff=0)[0]
    raise UserError(
        f"model.name={name!r}: must be one of {_listed(CATALOG)}, 'timm:NAME' for a network of timm, or "
        f"'package.module:function' for your own; did you mean "
        f"{near!r}?"
    )


def _placement(name: str, network: Network, norm: NormSettings) -> Placement | None:
    default = placement(name, norm.method)
    offered = network.offered(norm.method)
    if norm.placement is not None and norm.placement not in offered:
        raise UserError(
            f"norm.placement={norm.placement!r} for {norm.method!r} in {name!r}: must be one of {_listed(offered)}; "
            f"the default is {default!r}"
        )
    if network.normalization != "batch":
        refuse_batch_norm_settings(norm, name)
    return norm.placement or default


def _check_shape(name: str, network: Network, shape: tuple[int, ...]) -> None:
    """Raise a UserError for signals in a network for images and the reverse; an MLP takes both."""
    if name == "mlp" or len(shape) == len(network.shape):
        return
    kinds = {2: "signals (channels, length)", 3: "images (channels, height, width)"}
    fitting = [other for other, each in CATALOG.items() if other == "mlp" or len(each.shape) == len(shape)]
    raise UserError(
        f"model.name={name!r} with samples of shape {shape}: it takes {kinds[len(network.shape)]}; use another data "
        f"set, or one of {_listed(fitting)}"
    )


def _check_method(name: str, network: Network, method: str) -> None:
    if method in network.methods:
        return
    lacks = "is batch-normalized" if network.normalization == "batch" else "has no batch norm"
    if method in methods() and methods()[method].placements:
        lacks = f"has no placement for it, unlike {_listed(having(method))}"
    raise UserError(f"norm.method={method!r} for {name!r}, which {lacks}: must be one of {_listed(network.methods)}")


def _widths(model: ModelSettings, network: Network) -> tuple[int, ...]:
    """Return the requested widths, or else the network's own."""
    if model.widths is None:
        return network.widths if model.width is None else (model.width,) * len(network.widths)
    if model.name != "mlp":
        raise UserError(f"model.widths={model.widths} for {model.name!r}: it takes one width; give model.width")
    if model.width is not None:
        raise UserError(f"model.width={model.width} and model.widths={model.widths}: give only one of them")
    return tuple(model.widths)


def _listed(values: Iterable[str]) -> str:
    return ", ".join(map(repr, values))
