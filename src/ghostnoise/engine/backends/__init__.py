"""The backends that run the passes over x: `aten` is the reference, `native` serves CPUs and `triton` GPUs."""
