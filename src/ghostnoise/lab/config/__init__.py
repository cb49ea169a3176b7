"""Configuration of experiments: the settings of a run, overrides, recipes, grids and their plan of runs."""
