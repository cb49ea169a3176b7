"""Many runs at once: expand a grid, skip what is done, and have an engine run the rest."""

from ghostnoise.lab.sweep.run import Options, Outcome, sweep

__all__ = ["Options", "Outcome", "sweep"]
