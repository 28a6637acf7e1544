"""Forecasts the native engine's memory for the KV cache, prefill, sampling and CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from covey.accel.sizes import SHORT, VOCABULARY_BLOCK, padded_tokens
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
from covey.lab.plan.activations import FLASH, FLOAT, Pass, kernels_of, passing_bytes
from covey.lab.plan.forecast import ALWAYS, Part, RunFacts
from covey.lab.plan.model_shape import Shape

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
        """The number of completions that are generated at the same time."""
        return min(self.max_concurrent, self.prompts * self.group_size)

    @property
    def width(self) -> int:
        """The number of KV-cache slots on a GPU: the completions, rounded up for CUDA graphs."""
        return width_for(self.together)

    @property
    def started(self) -> int:
        """The number of completions with which a generation call on a GPU starts."""
        return min(self.width, self.prompts * self.group_size)

    def prefilled(self, completions: int) -> int:
        """Return the number of prompts to prefill for the given number of completions."""
        return min(self.prompts, -(-completions // self.group_size))


def engine_parts(run: RunFacts) -> list[Part]:
    """Return the memory that the engine needs to generate rollouts and evaluations."""
    calls, shape = _calls(run), run.shape
    if run.on_gpu and (shape.fuses or shape.fused_attention):
        return [*_graph_parts(run, calls), *_float8_parts(run)]
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
    """Return the memory of one generation call without CUDA graphs."""
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


def _float8_parts(run: RunFacts) -> list[Part]:
    """Return the memory of the engine's float8 copy of the weights."""
    if run.config.engine.dtype != "float8":
        return []
    shape = run.shape
    outputs = shape.query + 2 * shape.key + 2 * shape.hidden + 2 * shape.inner
    copies = shape.layers * (_layer_weights(shape) + outputs)
    why = "the weights of the layers in 8 bits, one scale per output"
    return [Part("float8 weights", copies, ALWAYS, why)]


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
    """Return the number of weights in the matrices of one decoder layer."""
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
