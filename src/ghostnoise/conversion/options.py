"""The options of methods that `convert` takes, for type checkers and editors; `convert` itself asks the registry."""

from typing import Literal, TypedDict

from torch import Generator


class Options(TypedDict, total=False):
    """All options of all methods; each method takes those of its layer."""

    # exports: begin, written by tools/exports.py
    alpha: float | Literal["1/N^2"] | None
    clamp_output: float | None
    components: Literal["both", "shift", "scale"]
    concentration: float
    d_max: float
    dof: Literal["paper", "exact"]
    draw: Literal["replacement", "partition"]
    generator: Generator | None
    history: int
    law: Literal["fc", "conv"]
    min_std: float
    noise_eps: float
    normalizer: Literal["batch", "exclusive"]
    p: float
    prior_samples: float
    r_max: float
    running_var_from: Literal["ghost", "batch", "each", "each-scaled"]
    self_weight: float
    transition: Literal["limits", "correction"]
    transition_steps: int
    uneven: bool
    warmup_steps: int
    # exports: end
