"""The source of randomness: the default generator of the device, or an explicit one; and draws from a seed."""

from typing import Any

import torch
from torch import Tensor

from ghostnoise.tables import table_dtype
from ghostnoise.torch_private import break_graph, is_exporting


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


def draw_rows(high: int, rows: int, columns: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw integers in [0, high), uniformly and independently: (rows, columns)."""
    if not torch.compiler.is_compiling():
        if generator is None:
            return torch.randint(high, (rows, columns), device=device)
    elif generator is None and device.type == "cpu" and not is_exporting():
        drawn: Tensor = torch.ops.ghostnoise.draw_rows(torch.empty(0, device=device), high, rows, columns)
        return drawn
    return torch.randint(high, (rows, columns), device=device, **drawn_by(generator))


def _draw_rows(place: Tensor, high: int, rows: int, columns: int) -> Tensor:
    return torch.randint(high, (rows, columns), device=place.device)


def _fake_draw_rows(place: Tensor, high: int, rows: int, columns: int) -> Tensor:
    return torch.empty((rows, columns), dtype=torch.int64, device=place.device)


# On CPUs, the code that Inductor generates for `torch.randint` takes several times as long as the operator itself. As
# an op it is called as it is. `torch.compile` merges calls of an op that have the same arguments, even of a random one;
# it never merges calls of `torch.empty`, so each call has its own result of that as an argument.
_LIBRARY = torch.library.Library("ghostnoise", "FRAGMENT")
_LIBRARY.define(
    "draw_rows(Tensor place, SymInt high, SymInt rows, SymInt columns) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),  # so that the backward pass does not draw again
)
_LIBRARY.impl("draw_rows", _draw_rows, "CompositeExplicitAutograd")
torch.library.register_fake("ghostnoise::draw_rows", _fake_draw_rows, lib=_LIBRARY)


def draw_present(counts: Tensor, ghost_size: int, rows: int, generator: torch.Generator | None) -> Tensor:
    """Draw a ghost batch for each of `rows` samples out of those with a count (n,) above 0: (rows, N).

    Does not synchronize with the device. If there is no such sample, the result is an arbitrary valid index.
    """
    device = counts.device
    present = (counts > 0).cumsum(0)
    uniform = torch.rand(rows, ghost_size, dtype=table_dtype(device), device=device, **drawn_by(generator))
    rank = (uniform * present[-1]).long().clamp_max((present[-1] - 1).clamp_min(0))  # a product may be rounded up
    return torch.searchsorted(present, rank + 1).clamp_max(counts.shape[0] - 1)


def draw_seed(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw a seed (1,) on the device, in one operation; when a CUDA graph is replayed, it draws another seed."""
    return torch.randint(2**63 - 1, (1,), device=device, **drawn_by(generator))


def philox_normals(seed: Tensor, rows: range, columns: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Draw four standard normal numbers for each row and column, as the C++ operators draw them.

    The words of `_philox` are two pairs, and each pair becomes two independent normal numbers (Box and Muller). The
    uniform numbers are rounded to float32; the rest is computed in `dtype`.
    """
    made: list[Tensor] = []
    words = _philox(seed, rows, columns)
    for first, second in (words[:2], words[2:]):
        uniform = ((first >> 1).to(torch.float32) * 2**-31 + 2**-32).to(dtype)
        angle = ((second ^ 2**31) - 2**31).to(torch.float32).to(dtype) * (torch.pi * 2**-31)  # signed
        radius = (-2 * uniform.log()).sqrt()
        made += [radius * angle.cos(), radius * angle.sin()]
    return tuple(made)


def _philox(seed: Tensor, rows: range, columns: int) -> list[Tensor]:
    """Return the four words of Philox 4x32 with 10 rounds (Salmon et al., 2011) for each row and column.

    The counter is (row, column, 0, 0), and the 64 bits of the seed are the key. The words are int64 in [0, 2**32).
    """
    words = [torch.arange(rows.start, rows.stop, device=seed.device)[:, None].expand(-1, columns)]
    words.append(torch.arange(columns, device=seed.device).expand(len(rows), -1))
    words += [torch.zeros_like(words[0])] * 2
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]  # the bits of unsigned products
        words = [_high(second) ^ words[1] ^ low, _low(second), _high(first) ^ words[3] ^ high, _low(first)]
        low, high = _low(low + 0x9E3779B9), _low(high + 0xBB67AE85)
    return words


def _low(product: Tensor) -> Tensor:
    return product & 0xFFFFFFFF


def _high(product: Tensor) -> Tensor:
    return product >> 32 & 0xFFFFFFFF
