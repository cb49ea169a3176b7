"""Where randomness comes from: the device's default generator, or an explicit one."""

from typing import Any

import torch


def drawn_by(generator: torch.Generator | None) -> dict[str, Any]:
    """The keyword for torch's random functions, left out if None: with `generator=None` they do not compile."""
    if generator is None:
        return {}
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg="an explicit generator under torch.compile: its draws cannot be part of a graph; leave generator= out "
            "and seed with torch.manual_seed, or compile without fullgraph=True"
        )
    return {"generator": generator}
