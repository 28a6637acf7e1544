"""Defines the memory forecast of a run: its device, the parts of the memory, and their peak."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from covey.accel.sizes import LONG
from covey.config import Config
from covey.errors import ModelError
from covey.lab.plan.activations import FLOAT
from covey.lab.plan.model_shape import Shape
from covey.lab.plan.task_facts import ASSUMED_PROMPT, TaskFacts, usable_prompt
from covey.objective import Objective

FRAMEWORK = {
    "cpu": (440 * 2**20, "Python, torch and transformers"),
    "cuda": (560 * 2**20, "CUDA context and workspaces"),
}
"""Maps each kind of device to the memory in use before any tensor exists, in bytes, and to the
software that uses this memory.

The numbers of bytes were measured by benchmarks/memory.py.
"""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The file with the memory limit of a container."""

ANY_GPU = "one GPU"
"""The name of a GPU if only the size of its memory is known."""
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")
"""Linux device files that exist only if a GPU driver is installed."""

Phase = Literal["sample", "prepare", "update", "step"]
PHASES: Mapping[Phase, str] = {
    "sample": "generating completions",
    "prepare": "log-probs without gradient",
    "update": "forward and backward passes",
    "step": "the optimizer step",
}
"""The phases of a training step, which do not overlap."""
ALWAYS: tuple[Phase, ...] = ("sample", "prepare", "update", "step")

MICRO_BATCH_STEP = 1024
"""Suggested values of `train.micro_batch_tokens` are multiples of MICRO_BATCH_STEP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of a forecast: a CPU with its main memory, or one GPU."""

    kind: Literal["cpu", "cuda"]
    memory: int
    """The memory of the device in bytes."""
    name: str

    @staticmethod
    def here(wanted: str = "auto") -> Device:
        """Return the device on this machine that the setting `model.device` selects."""
        if wanted == "auto":
            wanted = "cuda" if cuda_available() else "cpu"
        if wanted.startswith("cuda"):
            if not cuda_available():
                raise ModelError(
                    f"model: model.device = {wanted!r}, but torch finds no CUDA device; "
                    "use --gpu GIB to plan for a GPU of another machine"
                )
            import torch

            properties = torch.cuda.get_device_properties(wanted)
            return Device(kind="cuda", memory=properties.total_memory, name=properties.name)
        return Device(kind="cpu", memory=main_memory(), name="main memory")

    @staticmethod
    def gpu(gibibytes: float) -> Device:
        """Return a hypothetical GPU with the given memory in GiB."""
        return Device(kind="cuda", memory=int(gibibytes * 2**30), name=ANY_GPU)


def cuda_available() -> bool:
    """Whether torch finds a GPU.

    On Linux without a GPU driver, return False without importing torch.
    """
    if sys.platform == "linux" and not any(Path(file).exists() for file in DRIVERS):
        return False
    import torch

    return torch.cuda.is_available()


def main_memory() -> int:
    """Return the memory of this machine, or the container's limit if the limit is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # the file is missing, or it says "max", which means no limit
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The properties of a run that determine its memory."""

    config: Config
    device: Device
    shape: Shape
    facts: TaskFacts
    objective: Objective
    ranks: int = 1

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded over the ranks."""
        return self.config.parallel.strategy == "fsdp"

    @property
    def shards(self) -> int:
        """The number of ranks over which one model is sharded."""
        return min(self.config.parallel.shard_ranks or self.ranks, self.ranks)

    def share(self, count: int) -> int:
        """Divide `count` prompts or completions by the number of ranks, rounding up."""
        return -(-count // self.ranks)

    @property
    def size(self) -> int:
        """Bytes per number in the model's computations (2 for bfloat16, 4 for float32)."""
        dtype = self.config.model.dtype
        bfloat16 = dtype == "bfloat16" or (dtype == "auto" and self.on_gpu)
        return 2 if bfloat16 else FLOAT

    @property
    def prompt(self) -> int:
        """The number of tokens of the longest prompt."""
        return usable_prompt(self.config, self.facts) or ASSUMED_PROMPT

    @property
    def completion(self) -> int:
        """The number of tokens of the longest completion."""
        return self.config.rollout.max_tokens

    @property
    def row_tokens(self) -> int:
        """The number of tokens of the longest prompt plus the longest completion."""
        return self.prompt + self.completion

    @property
    def rows(self) -> int:
        """The number of completions in a mini-batch on one rank."""
        rollout = self.config.rollout
        rows = rollout.prompts_per_step * rollout.group_size
        return self.share(-(-rows // self.config.train.mini_batches))

    @property
    def on_gpu(self) -> bool:
        """Whether the run trains on a GPU."""
        return self.device.kind == "cuda"

    @property
    def gradient_sinks(self) -> bool:
        """Whether the gradients of bfloat16 weights are accumulated in float32 buffers."""
        return self.on_gpu and self.size < FLOAT and not self.sharded

    @property
    def captured(self) -> bool:
        """Whether training passes run as CUDA graphs, which keep activations between steps."""
        # On current GPUs, long rows are faster without a graph.
        recorded = self.config.records_passes and self.row_tokens - 1 < LONG
        return self.gradient_sinks and self.shape.fuses and recorded

    @property
    def position(self) -> int:
        """Bytes per token of a KV cache in the model's dtype."""
        return 2 * self.shape.layers * self.shape.key * self.size

    @property
    def float8_cache(self) -> bool:
        """Whether generation with CUDA graphs uses a KV cache in float8."""
        return self.config.engine.kv_dtype == "float8"

    @property
    def stored(self) -> int:
        """Bytes per token of the KV cache in generation with CUDA graphs."""
        return self.position // self.size if self.float8_cache else self.position


class Part(NamedTuple):
    """One part of a run's memory, such as the KV cache, and the phases that allocate it."""

    name: str
    bytes: int
    phases: tuple[Phase, ...]
    """The phases of a training step in which this part of the memory is allocated."""
    why: str
    """A description of the tensors in this part of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Forecast of the memory that a run needs on a device."""

    device: Device
    parts: tuple[Part, ...]
    micro_batch_tokens: int
    suggested_micro_batch_tokens: int | None
    """The largest value of `train.micro_batch_tokens` that fits into memory; None if no value
    fits."""
    notes: tuple[str, ...]
    """The assumptions of the forecast, one sentence each."""

    def during(self, phase: Phase) -> int:
        """Return the bytes allocated in a phase."""
        return sum(part.bytes for part in self.parts if phase in part.phases)

    @property
    def peak_phase(self) -> Phase:
        """The phase that needs the most memory."""
        return max(ALWAYS, key=self.during)

    @property
    def peak(self) -> int:
        """The peak memory in bytes, which is the memory of the phase that needs the most memory."""
        return self.during(self.peak_phase)

    @property
    def tensors(self) -> int:
        """The peak memory in bytes, without the memory of Python, torch and CUDA themselves."""
        return self.peak - sum(part.bytes for part in self.parts if part.name == "framework")

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the device's memory."""
        return self.peak <= self.device.memory

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        device = {"kind": self.device.kind, "memory_bytes": self.device.memory}
        return {
            "device": {**device, "name": self.device.name},
            "peak_bytes": self.peak,
            "peak_phase": self.peak_phase,
            "tensor_bytes": self.tensors,
            "fits": self.fits,
            "phases": {phase: self.during(phase) for phase in PHASES},
            "parts": [part._asdict() for part in self.parts],
            "micro_batch_tokens": self.micro_batch_tokens,
            "suggested_micro_batch_tokens": self.suggested_micro_batch_tokens,
            "notes": list(self.notes),
        }

    def line(self) -> str:
        """Return a line of text with the peak memory, and whether the peak fits into the device."""
        share = self.peak / self.device.memory
        fits = "fits" if self.fits else "DOES NOT FIT"
        device = f"{size_text(self.device.memory)} of {self.device.name}"
        return f"memory: peak {size_text(self.peak)}, {share:.0%} of the {device}: {fits}"

    def text(self) -> str:
        """Return a table of the memory in the peak phase, largest part first."""
        phase = self.peak_phase
        lines = [self.line(), f"fullest phase: {PHASES[phase]}"]
        parts = sorted(self.parts, key=lambda p: -p.bytes if phase in p.phases else math.inf)
        for part in (p for p in parts if p.bytes):
            amount = size_text(part.bytes)
            amount = amount if phase in part.phases else f"({amount})"
            lines.append(f"  {part.name:<15} {amount:>11}  {part.why}")
        if any(p.bytes and phase not in p.phases for p in parts):
            lines.append("  in brackets: allocated in another phase, which needs less in total")
        suggested = self.suggested_micro_batch_tokens
        if suggested is None:
            lines.append(
                f"no train.micro_batch_tokens of {MICRO_BATCH_STEP} or more leaves a tenth free"
            )
        elif suggested != self.micro_batch_tokens:
            lines.append(f"train.micro_batch_tokens could be {suggested:,} on this device")
        return "\n".join([*lines, *self.notes])


def size_text(count: float) -> str:
    """Format a number of bytes in MiB, or in GiB if the number is at least 10,000 MiB."""
    mebibytes = count / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 10_000 else f"{mebibytes / 1024:,.1f} GiB"
