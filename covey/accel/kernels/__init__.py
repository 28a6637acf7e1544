"""Triton kernels for CUDA devices, each next to the function that launches it.

The kernels are imported only if a CUDA device is used, so other systems do not need Triton.
"""
