"""The source of randomness: the default generator of the device, or an explicit one."""

from typing import Any

import torch

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
