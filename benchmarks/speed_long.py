"""Section about long completions: decode steps at several lengths, a full cache, and memory."""

from __future__ import annotations

import statistics

import numpy as np
import torch
from speed_device import forget, peaks, seconds_of
from speed_report import Report
from speed_sampler import random_engine, tokens_in
from speed_shapes import encoded_prompts, rollouts_of, step_bytes
from speed_sizes import Sizes

from covey.config import load_config
from covey.config.resolve import objective_of, resolve
from covey.engines.native.backend import choose_backend
from covey.engines.native.engine import NativeEngine
from covey.engines.native.prefill import read_prompts
from covey.engines.native.slots import Slots
from covey.engines.protocol import Limits, Sampling
from covey.lab.plan.forecast import Device, RunFacts, engine_parts
from covey.lab.plan.model_shape import measure
from covey.lab.plan.task_facts import TaskFacts
from covey.rng import Address, completion_uniforms
from covey.rollout.episode import EncodedPrompt

STEPS = 8
"""Decode steps that are timed together."""


def sampler_long(sizes: Sizes, report: Report) -> None:
    """Measure decode steps of long completions, and a generation with half of its KV cache."""
    forget(sizes.device)
    engine = random_engine(sizes, sizes.long_shape)
    completions, group = sizes.long_completions, sizes.group
    sampling = Sampling(group_size=group, max_tokens=sizes.long_tokens, max_concurrent=completions)
    vocabulary = engine.model.model.config.vocab_size
    prompts = encoded_prompts(completions // group, words=sizes.prompt, vocabulary=vocabulary)
    about = {"shape": sizes.long_shape, "completions": completions}
    with torch.inference_mode():
        slots = filled(engine, prompts, sampling)
        for written in sizes.long_written:
            seconds = step_seconds(engine, slots, sampling, written, sizes)
            weights = sum(p.nbytes for p in engine.model.model.parameters())
            least = step_bytes(
                sizes.shapes[sizes.long_shape], weights, completions=completions, group=group,
                prompt=sizes.prompt, written=written, size=sizes.dtype.itemsize,
            )  # fmt: skip
            floor = least / report.environment["copy_bytes_per_s"]
            report.row(
                "sampler_long", **about, who="covey", length=written,
                tokens_per_s=completions / seconds, step_ms=1e3 * seconds, floor_ms=1e3 * floor,
                times_floor=seconds / floor, **peaks(sizes.device),
                forecast_gib=forecast_bytes(engine, sizes) / 2**30,
                ran=f"{STEPS} steps of {sizes.long_tokens:,} tokens",
            )  # fmt: skip
    del slots
    _full_cache(sizes, report, engine, prompts, about)


def _full_cache(
    sizes: Sizes, report: Report, engine: NativeEngine, prompts: list[EncodedPrompt],
    about: dict[str, object],
) -> None:  # fmt: skip
    """Generate with pages for half of the completions."""
    engine.backend = choose_backend(engine.model)
    forget(sizes.device)
    tokens, shape = sizes.long_paused, sizes.shapes[sizes.long_shape]
    half = shape.key_numbers * sizes.dtype.itemsize * tokens * sizes.long_completions / 2
    sampling = Sampling(
        group_size=sizes.group, max_tokens=tokens, max_concurrent=sizes.long_completions,
        cache_gigabytes=half / 2**30,
    )  # fmt: skip
    found: list[int] = []

    def once() -> None:
        found.append(tokens_in(rollouts_of(engine, prompts, step=0, sampling=sampling)))

    seconds = seconds_of(once, sizes.device)
    assert found == [sizes.long_completions * tokens], "a completion stopped early"
    report.row(
        "sampler_long", **about, who="covey, half of the cache", length=tokens,
        tokens_per_s=found[0] / seconds, preemptions=engine.preemptions,
        **peaks(sizes.device), ran=f"1 x {tokens:,} tokens with compilation",
    )  # fmt: skip


def filled(engine: NativeEngine, prompts: list[EncodedPrompt], sampling: Sampling) -> Slots:
    """Return slots with the first token of every completion."""
    width, backend = sampling.max_concurrent, engine.backend
    limits = Limits(
        sampling=sampling, requests=width, prompts=len(prompts),
        prompt_tokens=len(prompts[0].tokens),
    )  # fmt: skip
    slots = backend.begin(limits, backend.width_for(width))
    tokens = {number: prompt.tokens for number, prompt in enumerate(prompts)}
    logits = read_prompts(engine.model, slots.cache, tokens)
    mine = [slot // sampling.group_size for slot in range(width)]
    index = torch.arange(width, device=engine.model.device)
    addresses = [Address(0, 0, str(prompt), slot, 0) for slot, prompt in enumerate(mine)]
    uniforms = torch.from_numpy(completion_uniforms(addresses, sampling.max_tokens))
    slots.cache.enter(range(width), mine)
    slots.open(index, uniforms.to(index.device))
    slots.draw(index, torch.stack([logits[n] for n in mine]), sampling.distribution)
    return slots


def step_seconds(
    engine: NativeEngine, slots: Slots, sampling: Sampling, written: int, sizes: Sizes
) -> float:
    """Time one decode step with every completion at `written` tokens."""
    width, backend = sampling.max_concurrent, engine.backend
    slots.cache.reserve(np.arange(width), np.full(width, min(written + STEPS, slots.room)))
    times = []
    for number in range(sizes.repeat + 1):
        slots.count[:width] = written - STEPS
        slots.cache.place[:width] = written - STEPS
        slots.cache.active[:width] = True
        seconds = seconds_of(lambda: backend.advance(slots, width, STEPS), sizes.device)
        times += [seconds / backend.steps] if number else []  # the first captures a CUDA graph
    return statistics.median(times)


def forecast_bytes(engine: NativeEngine, sizes: Sizes) -> int:
    """Return the memory that `covey plan` expects for the weights and the engine."""
    config = resolve(
        load_config(
            None,
            (
                f"rollout.prompts_per_step={sizes.long_completions // sizes.group}",
                f"rollout.group_size={sizes.group}",
                f"rollout.max_tokens={sizes.long_tokens}",
                f"engine.max_concurrent={sizes.long_completions}",
                f"model.dtype={sizes.dtype_name}",
                "evaluate.every=0",
            ),
        )
    )
    cuda = sizes.device.startswith("cuda")
    run = RunFacts(
        config=config,
        device=Device(kind="cuda" if cuda else "cpu", memory=0, name=sizes.device),
        shape=measure(engine.model.model),
        facts=TaskFacts(longest_prompt=sizes.prompt),
        objective=objective_of(config),
    )
    weights = sum(int(p.nbytes) for p in engine.model.model.parameters())
    return weights + sum(part.bytes for part in engine_parts(run))
