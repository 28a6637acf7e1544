"""Kernels for CUDA devices, written in Triton, each beside the function that launches it.

They are imported only where a CUDA device is used: elsewhere Triton need not be installed.
"""
