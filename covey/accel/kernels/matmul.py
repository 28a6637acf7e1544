"""Matrix products of bfloat16 inputs with float32 results that are never rounded to bfloat16."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch


@functools.cache
def _has_out_dtype(device: torch.device) -> bool:
    """Return whether a device can multiply bfloat16 matrices into a float32 result."""
    if device.type != "cuda":
        return False
    try:
        left = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        total = torch.ones(16, 16, device=device)
        _mm(left, left, total)
        _addmm(left, left, total)
        return bool((total == 32.0).all())
    except (TypeError, RuntimeError, NotImplementedError):
        return False


def _mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    cast(Any, torch.mm)(left, right, out_dtype=torch.float32, out=out)


def _addmm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    cast(Any, torch.addmm)(out, left, right, out_dtype=torch.float32, out=out)


def matmul(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write left @ right to `out`, which is float32 or has the dtype of the inputs."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif _has_out_dtype(left.device):
        _mm(left, right, out)
    else:
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def add_matmul(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Add left @ right to `out`, which is float32 or has the dtype of the inputs."""
    if left.dtype == out.dtype:
        out.addmm_(left, right)
    elif _has_out_dtype(left.device):
        _addmm(left, right, out)
    else:
        out.addmm_(left.to(out.dtype), right.to(out.dtype))
