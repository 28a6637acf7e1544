"""Device names: auto, cpu, cuda, cuda:1."""

from __future__ import annotations

import re

import torch

from covey.errors import ModelError

DEVICE = r"auto|cpu|cuda(:[0-9]{1,4})?"


def device_of(name: str) -> torch.device:
    """Return the device with this name, and check that it exists.

    The name `auto` means a GPU if there is one, and otherwise the CPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"model: the device is {name!r}, but torch finds no CUDA device")
    if not re.fullmatch(DEVICE, name):
        raise ModelError(
            f"model: unknown device {name!r}; use auto, cpu, cuda, cuda:0, cuda:1, ..."
        )
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ModelError(
            f"model: the device {name!r} does not exist; torch finds {count} CUDA devices"
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton kernels and CUDA graphs use the current device
    return device
