"""Timers and peak-memory counters of the speed benchmarks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], device: str) -> float:
    """Time a call, from an idle device to an idle device."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def event_seconds(call: Callable[[], Any]) -> float:
    """Time a call on the GPU's own clock, which leaves out what the CPU does before it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def forget(device: str) -> None:
    """Free unused memory and reset the peak counters."""
    gc.collect()  # a policy and its CUDA graphs refer to each other
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks(device: str) -> dict[str, float | None]:
    """Return torch's peak of allocated and reserved memory; None on a CPU."""
    if not device.startswith("cuda"):
        return {"peak_gib": None, "reserved_gib": None}
    found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_gib": round(found[0] / 2**30, 2), "reserved_gib": round(found[1] / 2**30, 2)}


def copy_bandwidth(device: str, megabytes: int) -> float:
    """Return the bytes per second, read and written, of the best of ten large copies."""
    source = torch.zeros(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(seconds_of(lambda: target.copy_(source), device) for _ in range(10))
    return 2 * source.nbytes / best
