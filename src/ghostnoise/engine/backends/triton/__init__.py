"""The passes on GPUs, as Triton kernels."""
