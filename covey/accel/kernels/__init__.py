"""Triton kernels for CUDA devices, and the functions that launch them.

The kernels are imported only if a CUDA device is used, so other systems do not need Triton.
"""
