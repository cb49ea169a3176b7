"""The networks by name: source, size, and possible placements of noise."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from ghostnoise.lab.config.methods import NONE, Placement, methods
from ghostnoise.lab.models.convmixer import convmixer
from ghostnoise.lab.models.norm_free import norm_free_resnet
from ghostnoise.lab.models.plain import conv1d, digits_net, mlp
from ghostnoise.lab.models.resnet import Bottleneck, PreactBlock, resnet
from ghostnoise.lab.models.slots import Normalization, Slots, Task
from ghostnoise.lab.models.vit import SimpleViT
from ghostnoise.methods.weight_standardization import WSConv1d, WSConv2d

RESIDUAL: tuple[Placement, ...] = ("inside", "after", "activation", "branch")
CIFAR = (3, 32, 32)
SIGNAL = (1, 40)
PAPER = "Kosson, Fan and Jaggi 2024, arXiv:2305.17205"
RESNET = "He et al. 2016, arXiv:1512.03385"
RELEASED = "the paper's released code, github.com/epfml/ghost-noise"


@dataclass(frozen=True)
class Network:
    """A network and its standard size: `parameters` are for images of `shape`, `classes` and `widths`."""

    title: str
    source: str
    parameters: int
    normalization: Normalization
    placements: tuple[Placement, ...]
    """Possible placements of noise; the first is that of ghost noise in the paper."""
    builder: Callable[[Slots, Task], nn.Module]
    shape: tuple[int, ...]
    classes: int
    widths: tuple[int, ...]
    channel_dim: int = 1

    @property
    def methods(self) -> list[str]:
        """The methods that the network can have."""
        batch = self.normalization == "batch"
        without = [name for name, kind in methods().items() if kind.replaces_batch_norm] if batch else [NONE]
        return without + [name for name in methods() if self.offered(name)]

    def offered(self, method: str) -> list[Placement]:
        """Return the possible placements of a method's noise; the first is the default."""
        return [place for place in self.placements if place in methods()[method].placements]


CATALOG: dict[str, Network] = {
    "resnet18": Network(
        "ResNet-18 for small images", RESNET, 11_220_132, "batch", RESIDUAL,
        partial(resnet, blocks=(2, 2, 2, 2)), CIFAR, 100, (64,),
    ),
    "resnet20": Network(
        "ResNet-20 for small images", RESNET, 272_474, "batch", RESIDUAL,
        partial(resnet, blocks=(3, 3, 3)), CIFAR, 10, (16,),
    ),
    "resnet8": Network(
        "ResNet-8 for small images", RESNET, 78_042, "batch", RESIDUAL,
        partial(resnet, blocks=(1, 1, 1)), CIFAR, 10, (16,),
    ),
    "resnet50": Network(
        "ResNet-50", RESNET, 25_557_032, "batch", RESIDUAL,
        partial(resnet, blocks=(3, 4, 6, 3), block=Bottleneck, large=True), (3, 224, 224), 1000, (64,),
    ),
    "wsln-resnet18": Network(
        "ResNet-18 with weight standardization and layer norm", PAPER, 11_224_932, "layer", RESIDUAL,
        partial(resnet, blocks=(2, 2, 2, 2), conv=WSConv2d), CIFAR, 100, (64,),
    ),
    "preact-resnet18": Network(
        "Pre-activation ResNet-18 for small images", RELEASED, 11_219_236, "batch", RESIDUAL,
        partial(resnet, blocks=(2, 2, 2, 2), block=PreactBlock), CIFAR, 100, (64,),
    ),
    "preact-wsln-resnet18": Network(
        "Pre-activation ResNet-18 with weight standardization and layer norm", RELEASED, 11_224_036, "layer", RESIDUAL,
        partial(resnet, blocks=(2, 2, 2, 2), block=PreactBlock, conv=WSConv2d, weight_std="fan_in"), CIFAR, 100, (64,),
    ),
    "nf-resnet26": Network(
        "NF-ResNet-26 for small images", "Brock et al. 2021, arXiv:2101.08692", 13_958_994, "none",
        ("activation",), partial(norm_free_resnet, blocks=(2, 2, 2, 2)), CIFAR, 10, (64,),
    ),
    "simple-vit": Network(
        "Simple ViT", "Beyer et al. 2022, arXiv:2205.01580", 18_928_234, "layer",
        ("after", "inside", "activation"), partial(SimpleViT, depth=6, heads=16), CIFAR, 10, (512,), channel_dim=-1,
    ),
    "convmixer": Network(
        "ConvMixer-256/8", "Trockman and Kolter 2022, arXiv:2201.09792", 594_186, "batch",
        ("inside", "after", "activation"), partial(convmixer, depth=8), CIFAR, 10, (256,),
    ),
    "mlp": Network(
        "Perceptron", PAPER, 5_351_524, "batch", ("inside", "after", "activation"), mlp, CIFAR, 100, (1024, 1024, 1024),
    ),
    "digits-net": Network(
        "Small convolutional network", "the demo of this library", 24_058, "batch", RESIDUAL,
        digits_net, (1, 8, 8), 10, (16,),
    ),
    "conv1d": Network(
        "Small convolutional network for signals", "the demo of this library", 28_490, "batch", RESIDUAL,
        conv1d, SIGNAL, 10, (64,),
    ),
    "wsln-conv1d": Network(
        "The same with weight standardization and layer norm", "this library", 28_682, "layer", RESIDUAL,
        partial(conv1d, conv=WSConv1d), SIGNAL, 10, (64,),
    ),
    "nf-resnet1d": Network(
        "NF-ResNet of two bottlenecks for signals", "this library, after Brock et al. 2021, arXiv:2101.08692", 22_812,
        "none", ("activation",), partial(norm_free_resnet, blocks=(1, 1)), SIGNAL, 10, (16,),
    ),
    "vit1d": Network(
        "Transformer of two layers for signals", "this library, after Beyer et al. 2022, arXiv:2205.01580", 100_426,
        "layer", ("after", "inside", "activation"), partial(SimpleViT, depth=2, heads=8), SIGNAL, 10, (64,),
        channel_dim=-1,
    ),
    "convmixer1d": Network(
        "ConvMixer-64/4 for signals", "this library, after Trockman and Kolter 2022, arXiv:2201.09792", 20_170, "batch",
        ("inside", "after", "activation"), partial(convmixer, depth=4), SIGNAL, 10, (64,),
    ),
}  # fmt: skip


def having(method: str) -> list[str]:
    """Return the networks that can have a method."""
    return [name for name, network in CATALOG.items() if method in network.methods]
