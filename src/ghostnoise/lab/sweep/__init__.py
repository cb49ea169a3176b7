"""Sweeps: expand the grid of an experiment, skip runs that have ended, and have a runner run the others."""

from ghostnoise.lab.sweep.run import Options, Outcome, list_runs, sweep

__all__ = ["Options", "Outcome", "list_runs", "sweep"]
