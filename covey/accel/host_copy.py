"""Copies from a device to main memory that run while the CPU does other work."""

from __future__ import annotations

import numpy as np
import torch


class HostCopy:
    """A copy of a tensor in main memory, made asynchronously.

    Later work of the device does not change the copy.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Queue the copy after all work that is already queued on the device."""
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def numpy(self) -> np.ndarray:
        """Return the copy; wait until it is complete, but not for later work of the device."""
        if self._event is not None:
            self._event.synchronize()
        found: np.ndarray = self._host.numpy()
        return found
