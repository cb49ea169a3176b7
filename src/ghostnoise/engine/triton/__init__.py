"""Triton kernels for CUDA and ROCm."""
