"""What a forecast of memory says: parts, the phases they are there in, and a small table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from covey.analysis.plan.device import Device

Phase = Literal["sample", "prepare", "update", "step"]
PHASES: Mapping[Phase, str] = {
    "sample": "sampling answers",
    "prepare": "log-probabilities without gradient",
    "update": "forward and backward passes",
    "step": "the optimizer step",
}
"""What a run does one after the other."""
ALWAYS: tuple[Phase, ...] = ("sample", "prepare", "update", "step")

BUDGET_STEP = 1024
"""A suggested budget is a multiple of so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of the memory."""

    name: str
    bytes: int
    phases: tuple[Phase, ...]
    """When it is there."""
    why: str
    """What it is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The memory of a run on a device."""

    device: Device
    parts: tuple[Part, ...]
    micro_batch_tokens: int
    suggested_budget: int | None
    """The largest train.micro_batch_tokens that fits, or that still changes something; None: none."""
    notes: tuple[str, ...]
    """What was assumed."""

    def during(self, phase: Phase) -> int:
        """Return the bytes that are there in a phase."""
        return sum(part.bytes for part in self.parts if phase in part.phases)

    @property
    def peak_phase(self) -> Phase:
        """The fullest phase."""
        return max(ALWAYS, key=self.during)

    @property
    def peak(self) -> int:
        """The most bytes at any time."""
        return self.during(self.peak_phase)

    @property
    def tensors(self) -> int:
        """The peak without what the framework takes for itself: torch.cuda counts no more."""
        own = sum(part.bytes for part in self.parts if part.name == "framework")
        return self.peak - own

    @property
    def fits(self) -> bool:
        """Whether the device has that much."""
        return self.peak <= self.device.memory

    def row(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "device": self.device.row(),
            "peak_bytes": self.peak,
            "peak_phase": self.peak_phase,
            "tensor_bytes": self.tensors,
            "fits": self.fits,
            "phases": {phase: self.during(phase) for phase in PHASES},
            "parts": [
                {"name": p.name, "bytes": p.bytes, "phases": list(p.phases), "why": p.why}
                for p in self.parts
            ],
            "micro_batch_tokens": self.micro_batch_tokens,
            "suggested_token_budget": self.suggested_budget,
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """Return a small table of the fullest phase, largest part first, and what follows."""
        phase, share = self.peak_phase, self.peak / self.device.memory
        verdict = "fits" if self.fits else "DOES NOT FIT"
        lines = [
            f"memory: {_size(self.peak)} at the peak, {share:.0%} of the "
            f"{_size(self.device.memory)} of {self.device.name}: {verdict}",
            f"fullest: {PHASES[phase]}",
        ]
        parts = sorted(self.parts, key=lambda p: -p.bytes if phase in p.phases else math.inf)
        for part in (p for p in parts if p.bytes):
            amount = _size(part.bytes) if phase in part.phases else f"({_size(part.bytes)})"
            lines.append(f"  {part.name:<12} {amount:>11}  {part.why}")
        if any(p.bytes and phase not in p.phases for p in parts):
            lines.append("  in brackets: there at another time, when less is needed in all")
        if self.suggested_budget is None:
            lines.append(
                f"no train.micro_batch_tokens of {BUDGET_STEP} or more fits with a tenth to spare"
            )
        elif self.suggested_budget != self.micro_batch_tokens:
            lines.append(
                f"train.micro_batch_tokens could be {self.suggested_budget:,} on this device"
            )
        return "\n".join([*lines, *self.notes])


def _size(count: float) -> str:
    mebibytes = count / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 10_000 else f"{mebibytes / 1024:,.1f} GiB"
