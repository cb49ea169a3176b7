"""Measure and apply: the one differentiable op around a method, and its passes on each device."""
