"""Benchmarks: the layers of this package against `nn.BatchNorm`, other libraries and the bandwidth limit."""
