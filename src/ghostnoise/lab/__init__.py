"""Experiments. The lab imports the library, and the library never imports the lab."""
