"""The version of the package, and of the numbers that it computes. Imports nothing."""

__version__ = "0.1.0"

NUMERICS = 1
"""Raise this whenever results change by more than rounding.

Every run records it. A sweep trains finished runs again if they were made with another number.
"""
