"""One run, start to finish, resumable to the bit."""

from ghostnoise.lab.train.run import Options, Outcome, train

__all__ = ["Options", "Outcome", "train"]
