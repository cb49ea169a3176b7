"""The version of the package, and of the numbers that it computes. Imports nothing."""

__version__ = "0.1.0"

NUMERICS = 1
"""Raise this whenever the results of all methods change by more than rounding; for one, raise `MethodSpec.numerics`.

Every run records the number of its method, in which both are counted (`lab.config.methods.numerics`). A sweep trains
finished runs again if they were made with another number.
"""
