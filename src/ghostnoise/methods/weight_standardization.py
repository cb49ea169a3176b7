"""Weight standardization, with a learnable gain, at the magnitude of the layer's initialization."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ghostnoise import docstrings
from ghostnoise.tracing import Leaf

__all__ = ["WSConv1d", "WSConv2d", "WSLinear", "WeightStandardized", "standardize_weight"]

ARGUMENTS = {
    "in_channels": "the number of channels of the input.",
    "out_channels": "the number of channels of the output.",
    "kernel_size": "the size of the kernel.",
    "stride": "the distance between the positions of the kernel.",
    "padding": 'the number of positions that are added on every side, "same" or "valid".',
    "dilation": "the distance between the elements of the kernel.",
    "groups": "the number of groups into which the channels of input and output are divided.",
    "in_features": "the number of features of the input.",
    "out_features": "the number of features of the output.",
    "bias": "whether the layer has a learnable `bias`.",
    "padding_mode": 'what the added positions contain: "zeros", "reflect", "replicate" or "circular".',
    "device": "where parameters and buffers are created.",
    "dtype": "the dtype of the parameters.",
}


def standardize_weight(
    weight: Tensor, gain: Tensor | None = None, std: Tensor | float = 1.0, eps: float = 1e-5
) -> Tensor:
    """Standardize each output channel of `weight`: zero mean, and the standard deviation `gain * std` apart from eps.

        Ŵ = gain · std · (W - mean(W)) / sqrt(var(W) + eps)

    Each output channel must have two elements or more: a single one equals its mean, so that Ŵ would always be 0.

    Shape:
        weight (out, ...), gain (out,).
    """
    _check_fan_in("standardize_weight", weight)
    dims = tuple(range(1, weight.ndim))
    var, mean = torch.var_mean(weight, dims, correction=0, keepdim=True)
    scale = std * (var + eps).rsqrt()
    if gain is not None:
        scale = scale * gain.view(-1, *(1 for _ in dims))
    return (weight - mean) * scale


class WeightStandardized(Leaf):
    """A layer with a standardized weight: zero mean and a learnable magnitude for each output channel.

    `gain` (out,) starts at 1. The buffer `init_std`, kept in the state_dict, is the standard deviation that the
    initializer gives the weight, so that the layer starts with weights of their usual magnitude. Subclasses take the
    arguments of the layer whose weight they standardize.
    """

    weight: Tensor
    gain: Tensor
    init_std: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        docstrings.complete(cls, ARGUMENTS)

    def reset_parameters(self) -> None:
        """Initialize as the plain layer does, and the gain to 1."""
        _check_fan_in(type(self).__name__, self.weight)
        super().reset_parameters()  # type: ignore[misc]  # of a convolution or nn.Linear
        if "gain" not in self._parameters:
            self.register_parameter("gain", nn.Parameter(self.weight.new_empty(self.weight.shape[0])))
            self.register_buffer("init_std", self.weight.new_empty(()))
        nn.init.ones_(self.gain)
        # All plain layers draw from kaiming_uniform(a=sqrt(5)): U(-b, b) with b = 1/sqrt(fan_in).
        nn.init.constant_(self.init_std, 1 / math.sqrt(3 * math.prod(self.weight.shape[1:])))

    def standardized_weight(self) -> Tensor:
        """Return the weight that the layer uses."""
        return standardize_weight(self.weight, self.gain, self.init_std)


def _check_fan_in(name: str, weight: Tensor) -> None:
    if math.prod(weight.shape[1:]) < 2:
        raise ValueError(
            f"{name} got a weight of shape {tuple(weight.shape)}: each output channel must have 2 elements or more, "
            "because a single one equals its mean and is standardized to 0; use the plain layer, such as nn.Conv2d or "
            "nn.Linear, or a larger kernel, more input channels or fewer groups"
        )


class WSConv1d(WeightStandardized, nn.Conv1d):
    """Convolve with a standardized weight; the arguments are those of `nn.Conv1d`.

    Shape:
        (B, in_channels, L); the output is (B, out_channels, L'), where L' is that of `nn.Conv1d`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve."""
        y: Tensor = self._conv_forward(input, self.standardized_weight(), self.bias)
        return y


class WSConv2d(WeightStandardized, nn.Conv2d):
    """Convolve with a standardized weight; the arguments are those of `nn.Conv2d`.

    Shape:
        (B, in_channels, H, W); the output is (B, out_channels, H', W'), where H' and W' are those of `nn.Conv2d`.

    Examples:
        >>> weight = WSConv2d(3, 8, kernel_size=3).standardized_weight()
        >>> torch.allclose(weight.std((1, 2, 3), correction=0), torch.tensor(1 / 9), rtol=2e-3)  # 1/sqrt(3·27)
        True
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve."""
        y: Tensor = self._conv_forward(input, self.standardized_weight(), self.bias)
        return y


class WSLinear(WeightStandardized, nn.Linear):
    """Multiply by a standardized weight; the arguments are those of `nn.Linear`.

    Shape:
        (*, in_features); the output is (*, out_features).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Multiply."""
        return F.linear(input, self.standardized_weight(), self.bias)
