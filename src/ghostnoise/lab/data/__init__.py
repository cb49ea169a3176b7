"""Data sets: found in their official layouts or downloaded, verified, split, and loaded in batches."""

from ghostnoise.lab.data.files import data_folder
from ghostnoise.lab.data.opening import open_source, present, shape_and_classes
from ghostnoise.lab.data.source import Batch, DatasetInfo, Source

__all__ = ["Batch", "DatasetInfo", "Source", "data_folder", "open_source", "present", "shape_and_classes"]
