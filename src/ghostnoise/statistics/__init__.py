"""Per-sample moments, the samples that contribute to each statistic, and the analytical laws of ghost noise."""
