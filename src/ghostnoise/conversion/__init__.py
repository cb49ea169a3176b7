"""Conversion of the layers of any model to methods of this library, and back."""

from ghostnoise.conversion.convert import convert, revert
from ghostnoise.conversion.schedules import ConstantSchedule, CosineSchedule, LinearSchedule, OffAfter, Schedule
from ghostnoise.conversion.summary import LayerSummary, Summary, summary

__all__ = [
    "ConstantSchedule",
    "CosineSchedule",
    "LayerSummary",
    "LinearSchedule",
    "OffAfter",
    "Schedule",
    "Summary",
    "convert",
    "revert",
    "summary",
]
