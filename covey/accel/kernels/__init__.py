"""Triton kernels for CUDA devices, each next to the function that launches it.

They are imported only where a CUDA device is used, so other systems do not need Triton.
"""
