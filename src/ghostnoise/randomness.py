"""Where randomness comes from: the device's default generator, or an explicit one."""

from typing import Any

import torch


def drawn_by(generator: torch.Generator | None) -> dict[str, Any]:
    """The keyword for torch's random functions, left out if None: with `generator=None` they do not compile."""
    return {} if generator is None else {"generator": generator}
