"""Data sets: found in official layouts or downloaded, verified, split, and handed out in batches."""

from ghostnoise.lab.data.files import data_folder
from ghostnoise.lab.data.opening import facts, open_source, present
from ghostnoise.lab.data.source import Batch, Facts, Source

__all__ = ["Batch", "Facts", "Source", "data_folder", "facts", "open_source", "present"]
