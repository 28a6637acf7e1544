"""Programmatic dependent launch: a kernel that starts up before the kernel before it has ended."""

from __future__ import annotations

import functools

import torch


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Return whether a device has programmatic dependent launch, as Hopper and later GPUs do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
