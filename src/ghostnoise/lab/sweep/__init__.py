"""Sweeps: expand the grid of an experiment, skip runs that have ended, and have a runner train the others."""
