"""The bandwidth limit: the time to move the bytes of a layer without its computation."""

from collections.abc import Callable

import torch
from torch import Tensor


def streams(x: Tensor, noise: bool = False) -> Callable[[], object]:
    """Return a step that reads and writes tensors of the size of x as often as a layer must, in allocated memory.

    | pass | reads | writes | corresponds to |
    | --- | --- | --- | --- |
    | sum(x) | 1 | | moments |
    | y = 2·x | 1 | 1 | normalization |
    | sum(dy), sum(x) | 2 | | the two sums of the backward |
    | dx = dy + x | 2 | 1 | gradient of x |

    2 reads and 1 write forward, 4 reads and 1 write backward. For standalone noise, whose backward is dx = scale·dy,
    the last two lines are one: dx = 2·dy, 1 read and 1 write. All are PyTorch's vectorized kernels, on all threads. The
    memory is contiguous and was written before, so that no page faults are counted. Small tensors stay in the cache;
    for them this is the time of a few calls rather than a limit.
    """
    source = x.detach().flatten().clone()
    gradient, out, gradient_out = (torch.ones_like(source) for _ in range(3))
    total = source.new_zeros(())

    def forward() -> None:
        torch.sum(source, dim=0, out=total)
        torch.mul(source, 2, out=out)

    def normalizer() -> None:
        forward()
        torch.sum(gradient, dim=0, out=total)
        torch.sum(source, dim=0, out=total)
        torch.add(gradient, source, out=gradient_out)

    def noise_alone() -> None:
        forward()
        torch.mul(gradient, 2, out=gradient_out)

    return noise_alone if noise else normalizer
