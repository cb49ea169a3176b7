"""Swap layers in any model, and back."""

from ghostnoise.conversion.report import Row, Summary, summary
from ghostnoise.conversion.schedules import ConstantSchedule, CosineSchedule, LinearSchedule, OffAfter, Schedule
from ghostnoise.conversion.surgery import convert, revert

__all__ = [
    "ConstantSchedule",
    "CosineSchedule",
    "LinearSchedule",
    "OffAfter",
    "Row",
    "Schedule",
    "Summary",
    "convert",
    "revert",
    "summary",
]
