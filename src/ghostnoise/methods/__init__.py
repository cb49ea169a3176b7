"""The methods, one file each: its function, its layers, and its specification in the registry."""
