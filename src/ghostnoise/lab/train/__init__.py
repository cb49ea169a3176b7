"""Train one run from start to end; an interrupted run resumes with bit-identical results."""

from ghostnoise.lab.train.run import Options, train

__all__ = ["Options", "train"]
