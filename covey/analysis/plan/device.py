"""What a run is put on: a kind of device and how much memory it has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from covey.errors import ModelError

FRAMEWORK_BYTES = {"cpu": 440 * 2**20, "cuda": 560 * 2**20}
"""Before any tensor: on a CPU Python with all that covey imports, on a GPU CUDA's context and the
workspace of its matrix products. Measured by benchmarks/memory.py."""
FRAMEWORK_WHY = {
    "cpu": "Python, torch and transformers",
    "cuda": "CUDA's context and workspaces",
}
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where a container keeps how much it may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A CPU with its main memory, or one GPU."""

    kind: Literal["cpu", "cuda"]
    memory: int
    """Bytes."""
    name: str

    @staticmethod
    def here(wanted: str = "auto") -> Device:
        """Return what `model.device` means on this machine."""
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        if wanted.startswith("cuda"):
            if not torch.cuda.is_available():
                raise ModelError(
                    f"model: device {wanted!r} was asked for, but torch sees no CUDA device"
                )
            properties = torch.cuda.get_device_properties(wanted)
            return Device(kind="cuda", memory=properties.total_memory, name=properties.name)
        return Device(kind="cpu", memory=main_memory(), name="main memory")

    @property
    def framework(self) -> int:
        """Bytes that are taken before any tensor is."""
        return FRAMEWORK_BYTES[self.kind]

    @property
    def framework_why(self) -> str:
        """What takes them."""
        return FRAMEWORK_WHY[self.kind]

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        return {"kind": self.kind, "memory_bytes": self.memory, "name": self.name}


def main_memory() -> int:
    """Return this machine's memory, or what a container lets this process have of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or no limit, which is written as "max"
        return total
