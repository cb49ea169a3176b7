"""The engine: the general level, the fused operators, and the operators on each device."""
