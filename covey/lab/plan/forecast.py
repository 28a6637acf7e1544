"""Defines the memory forecast of a run: its device, the parts of the memory, and their peak."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from covey.accel.sizes import LONG, SHORT, VOCABULARY_BLOCK, padded_tokens
from covey.config import Config
from covey.config.resolve import sampling_of
from covey.engines.native.sizes import (
    CAPACITY_STEP,
    FUSED_BYTES,
    PREFILL_FLOPS,
    PREFILL_TOKENS,
    PROMPT_STEP,
    SPARE_BYTES,
    page_for,
    width_for,
)
from covey.errors import ModelError
from covey.lab.plan.model_shape import FLASH, FLOAT, Pass, Shape, kernels_of, passing_bytes
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

ANY_GPU = "one GPU"
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
        return self.config.parallel.strategy == "fsdp"

    @property
    def shards(self) -> int:
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
        return usable_prompt(self.config, self.facts) or ASSUMED_PROMPT

    @property
    def completion(self) -> int:
        return self.config.rollout.max_tokens

    @property
    def row_tokens(self) -> int:
        return self.prompt + self.completion

    @property
    def rows(self) -> int:
        """The number of completions in a mini-batch on one rank."""
        rollout = self.config.rollout
        rows = rollout.prompts_per_step * rollout.group_size
        return self.share(-(-rows // self.config.train.mini_batches))

    @property
    def on_gpu(self) -> bool:
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
    why: str


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

    def during(self, phase: Phase) -> int:
        return sum(part.bytes for part in self.parts if phase in part.phases)

    @property
    def peak_phase(self) -> Phase:
        return max(ALWAYS, key=self.during)

    @property
    def peak(self) -> int:
        return self.during(self.peak_phase)

    @property
    def tensors(self) -> int:
        """The peak memory in bytes, without the memory of Python, torch and CUDA themselves."""
        return self.peak - sum(part.bytes for part in self.parts if part.name == "framework")

    @property
    def fits(self) -> bool:
        return self.peak <= self.device.memory

    def row(self) -> dict[str, Any]:
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
        share = self.peak / self.device.memory
        fits = "fits" if self.fits else "DOES NOT FIT"
        device = f"{size_text(self.device.memory)} of {self.device.name}"
        return f"memory: peak {size_text(self.peak)}, {share:.0%} of the {device}: {fits}"

    def text(self) -> str:
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
    mebibytes = count / 2**20
    return f"{mebibytes:,.0f} MiB" if mebibytes < 10_000 else f"{mebibytes / 1024:,.1f} GiB"


# Forecasts the native engine's memory for the KV cache, prefill, sampling and CUDA graphs.


ASSUMED_HELD_OUT = 256
"""The assumed number of held-out prompts if they cannot be counted."""
SAMPLED_COPIES, TRUNCATED_COPIES, GREEDY_COPIES = 4, 9, 2
"""The numbers of logits-sized tensors that the engine needs for sampling from the full
distribution, for truncated sampling (which sorts the logits), and for greedy decoding."""
TOKEN_BYTES = FLOAT + FLOAT + 8
"""Bytes that the engine stores for each completion token in addition to the KV cache: a random
number, a log-prob and a token id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One generation call of the engine, for rollouts or for an evaluation."""

    prompts: int
    group_size: int
    copies: int
    """The number of logits-sized tensors that the engine needs to sample a token."""
    max_concurrent: int

    @property
    def together(self) -> int:
        return min(self.max_concurrent, self.prompts * self.group_size)

    @property
    def width(self) -> int:
        """The number of KV-cache slots on a GPU: the completions, rounded up for CUDA graphs."""
        return width_for(self.together)

    @property
    def started(self) -> int:
        return min(self.width, self.prompts * self.group_size)

    def prefilled(self, completions: int) -> int:
        return min(self.prompts, -(-completions // self.group_size))


def engine_parts(run: RunFacts) -> list[Part]:
    calls, shape = _calls(run), run.shape
    if run.on_gpu and (shape.fuses or shape.fused_attention):
        parts = _graph_parts(run, calls)
        if run.config.engine.dtype == "float8":
            outputs = shape.query + 2 * shape.key + 2 * shape.hidden + 2 * shape.inner
            copies = shape.layers * (_layer_weights(shape) + outputs)
            why = "the weights of the layers in 8 bits, one scale per output"
            parts.append(Part("float8 weights", copies, ALWAYS, why))
        return parts
    per_call = [_eager_parts(run, call) for call in calls]
    largest = max(per_call, key=lambda parts: sum(part.bytes for part in parts))
    fused = shape.fusable * run.size
    if not fused or fused > FUSED_BYTES or shape.rank:
        return largest
    why = "projections of a small model, concatenated"
    return [*largest, Part("fused weights", fused, ALWAYS, why)]


def _calls(run: RunFacts) -> list[Call]:
    config, held_out = run.config, run.share(run.facts.held_out or ASSUMED_HELD_OUT)
    rollout, evaluate, most = config.rollout, config.evaluate, config.engine.max_concurrent
    truncates = sampling_of(config).distribution.truncates
    copies = TRUNCATED_COPIES if truncates else SAMPLED_COPIES
    together = config.overlap.staleness + 1 if config.overlap.mode == "ahead" else 1
    sizes = [(run.share(rollout.prompts_per_step) * together, rollout.group_size, copies)]
    if evaluate.every:
        sizes.append((held_out, 1, GREEDY_COPIES))
        if evaluate.samples:
            sizes.append((held_out, evaluate.samples, copies))
    return [
        Call(prompts=prompts, group_size=size, copies=n, max_concurrent=most)
        for prompts, size, n in sizes
    ]


def _eager_parts(run: RunFacts, call: Call) -> list[Part]:
    shape, slots = run.shape, call.together
    prompts = call.prefilled(slots)
    capacity = -(-run.row_tokens // CAPACITY_STEP) * CAPACITY_STEP
    cache = slots * capacity * run.position + slots * run.completion * TOKEN_BYTES
    kept = run.device.kind == "cpu" and cache <= SPARE_BYTES
    together = max(1, min(prompts, PREFILL_TOKENS // run.prompt))
    batch = Pass(
        rows=together,
        columns=run.prompt,
        tokens=together * run.prompt,
        chosen=together,
        packed=False,
    )
    # Fused attention needs keys repeated for every query head, one layer at a time.
    repeated = run.on_gpu or capacity > SHORT
    one_layer = slots * capacity * 2 * shape.query * run.size if repeated else 0
    prefill = max(passing_bytes(shape, run.size, batch, run.device.kind), one_layer)
    return [
        Part(
            "KV cache",
            cache,
            ALWAYS if kept else ("sample",),
            f"{slots} completions, {capacity} positions each",
        ),
        Part(
            "prompt KV cache",
            prompts * run.prompt * run.position + prefill,
            ("sample",),
            f"{prompts} prompts, prefilled {together} at a time",
        ),
        Part(
            "sampling",
            (slots * call.copies + prompts) * shape.vocabulary * FLOAT,
            ("sample",),
            f"logits of {slots} completions over {shape.vocabulary:,} tokens, {call.copies} copies",
        ),
    ]


def _graph_parts(run: RunFacts, calls: Sequence[Call]) -> list[Part]:
    """Return the memory of generation with CUDA graphs.

    A CUDA graph contains the addresses of the KV cache and of temporary tensors, so these tensors
    stay allocated between calls and during training. The KV cache and the temporary tensors are as
    large as the largest generation call needs.
    """
    width = max(call.width for call in calls)
    prompts = max(min(call.width, call.prompts) + 1 for call in calls)
    positions = -(-run.prompt // PROMPT_STEP) * PROMPT_STEP
    page = page_for(run.completion)
    longest = -(-run.completion // page)
    pages = width * longest
    if gigabytes := run.config.engine.cache_gigabytes:
        pages = max(longest, min(pages, int(gigabytes * 2**30 // (page * run.stored))))
    prefills = [_prefill_parts(run, call) for call in calls]
    return [
        Part(
            "KV cache",
            pages * page * run.stored + width * run.completion * TOKEN_BYTES,
            ALWAYS,
            f"{pages} pages of {page} positions for {width} completions",
        ),
        Part(
            "prompt KV cache",
            prompts * positions * run.stored,
            ALWAYS,
            f"{prompts} prompts, {positions} positions each",
        ),
        Part(
            "decode graph",
            max(_graph_bytes(run, call) for call in calls),
            ALWAYS,
            f"temporaries of a CUDA graph for {width} completions, mostly logits",
        ),
        max((graph for graph, *_ in prefills), key=lambda part: part.bytes),
        # Generation calls follow one another, so only the largest part of any call counts.
        max((part for _, *parts in prefills for part in parts), key=lambda part: part.bytes),
    ]


def _graph_bytes(run: RunFacts, call: Call) -> int:
    """Return the bytes of temporary tensors in one decode step.

    Logits and layer tensors never exist at the same time, so only the larger of the two counts.
    """
    shape, size = run.shape, run.size
    blocks = -(-shape.vocabulary // VOCABULARY_BLOCK)
    # Sampling from the full distribution (without top-k, top-p and min-p) needs no copies.
    copies = call.copies if call.copies == TRUNCATED_COPIES else 1
    logits = copies * shape.vocabulary * FLOAT + 2 * blocks * FLOAT
    layer = (2 * shape.query + 2 * shape.key + 3 * shape.inner + 2 * shape.hidden) * size
    return call.width * (shape.hidden * (FLOAT + size) + max(logits, layer))


def _layer_weights(shape: Shape) -> int:
    return shape.hidden * (2 * shape.query + 2 * shape.key + 3 * shape.inner)


def _prefill_parts(run: RunFacts, call: Call) -> tuple[Part, Part, Part]:
    """Return the memory that prefill needs for its CUDA graph, forward pass and first tokens.

    The memory for the CUDA graph is 0 if the engine runs prefill without a CUDA graph.
    """
    shape, vocabulary, prompts = run.shape, run.shape.vocabulary, call.prefilled(call.started)
    together = max(1, min(prompts, PREFILL_TOKENS // run.prompt))
    tokens = together * run.prompt
    batch = Pass(
        rows=together, columns=run.prompt, tokens=tokens, chosen=together, packed=shape.fuses
    )
    padded = replace(batch, tokens=padded_tokens(tokens))
    flash = kernels_of(shape, run.size, "cuda") == FLASH and not run.float8_cache
    if flash and 2 * shape.layers * _layer_weights(shape) * tokens <= PREFILL_FLOPS:
        captured, passing = passing_bytes(shape, run.size, padded, "cuda"), 0
    else:
        # A prefill's KV cache is freed only after the next prefill's KV cache is allocated.
        held = (1 if together == prompts else 2) * tokens * run.position
        captured, passing = 0, held + passing_bytes(shape, run.size, batch, "cuda")
    return (
        Part(
            "prefill graph",
            captured,
            ALWAYS,
            f"temporaries of a CUDA graph for {padded.tokens:,} prompt tokens",
        ),
        Part(
            "prefill",
            passing + prompts * vocabulary * FLOAT,
            ("sample",),
            f"{prompts} prompts, {together} at a time",
        ),
        Part(
            "sampling",
            (call.started * call.copies + prompts) * vocabulary * FLOAT,
            ("sample",),
            f"logits of {call.started} first tokens over {vocabulary:,} tokens, "
            f"{call.copies} copies",
        ),
    )
