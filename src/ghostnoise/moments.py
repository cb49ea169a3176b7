"""The small tables that a batch is reduced to (Moments), and what a method makes of them (Affine).

Shapes: B samples, C channels, S spatial positions. A table is (B, C), or anything that broadcasts to it, such as
(1, C) for what all samples share. Inside ghost batches it is (G, n, C): G ghost batches of n samples.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Mean and biased variance: of each sample over its own positions, or pooled over several samples."""

    mean: Tensor
    var: Tensor

    def detach(self) -> "Moments":
        """The same numbers as constants: no gradient flows through them."""
        return Moments(self.mean.detach(), self.var.detach())


class Affine(NamedTuple):
    """What a method decides: `y = scale * (x - center) + shift`, each a table that broadcasts to (B, C).

    The center stands apart because `scale * x + shift` loses the digits of x when |mean| is large against std.
    """

    center: Tensor
    scale: Tensor
    shift: Tensor

    def then(self, outer: "Affine") -> "Affine":
        """This transformation followed by `outer`, as one transformation with this one's center."""
        return Affine(self.center, outer.scale * self.scale, outer.scale * (self.shift - outer.center) + outer.shift)

    def moments(self, moments: Moments) -> Moments:
        """The moments after this transformation of a batch that had `moments` before it."""
        return Moments(self.scale * (moments.mean - self.center) + self.shift, self.scale.square() * moments.var)


def table_dtype(device: torch.device) -> torch.dtype:
    """The dtype of tables: float64, and float32 on the devices that have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
