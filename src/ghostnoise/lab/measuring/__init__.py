"""The noise in a network's layers, from the command line: of a run, a recipe, or anybody's network and data."""
