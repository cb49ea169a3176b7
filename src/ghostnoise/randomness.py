"""The source of randomness: the default generator of the device, or an explicit one; and draws from a seed."""

from typing import Any

import torch
from torch import Tensor

from ghostnoise.torch_private import break_graph


def drawn_by(generator: torch.Generator | None) -> dict[str, Any]:
    """Return the keyword for torch's random functions; empty for None, since `generator=None` does not compile."""
    if generator is None:
        return {}
    if torch.compiler.is_compiling():
        break_graph(
            "an explicit generator under torch.compile: its draws cannot be part of a graph; leave generator= out and "
            "seed with torch.manual_seed, or compile without fullgraph=True"
        )
    return {"generator": generator}


def draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw a seed (1,) on the device, in one operation; when a CUDA graph is replayed, it draws another seed."""
    return torch.randint(2**63 - 1, (1,), device=device, **drawn_by(generator))


def philox_indices(seed: Tensor, batch_size: int, ghost_size: int) -> Tensor:
    """Draw a ghost batch for each sample, uniformly with replacement, as kernels draw them: (B, N).

    Column 4i + j of row b is word j of Philox 4x32 with 10 rounds (Salmon et al., 2011) for the counter (b, i, 0, 0)
    and the 64 bits of the seed as key, scaled to [0, B): word * B / 2**32, rounded down.
    """
    blocks = -(-ghost_size // 4)
    words = [torch.arange(batch_size, device=seed.device)[:, None].expand(-1, blocks)]
    words.append(torch.arange(blocks, device=seed.device).expand(batch_size, -1))
    words += [torch.zeros_like(words[0])] * 2
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]  # the bits of unsigned products
        words = [_high(second) ^ words[1] ^ low, _low(second), _high(first) ^ words[3] ^ high, _low(first)]
        low, high = _low(low + 0x9E3779B9), _low(high + 0xBB67AE85)
    drawn = torch.stack(words, 2).flatten(1)[:, :ghost_size]
    return drawn * batch_size >> 32


def _low(product: Tensor) -> Tensor:
    return product & 0xFFFFFFFF


def _high(product: Tensor) -> Tensor:
    return product >> 32 & 0xFFFFFFFF
