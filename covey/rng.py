"""Addressed random numbers.

What is drawn depends only on what it is drawn for: (seed, step, prompt, sample, position). There is
no generator whose state moves on, so a resumed run, another batch size, another slot order or
another number of workers draws the same numbers. The counter-based generator is numpy's Philox.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

_PROMPT_ORDER, _TOKENS, _MINI_BATCHES, _REFILL, _SOLUTIONS = range(5)
"""Purposes, each a stream of its own."""


def _philox(
    seed: int, step: int, purpose: int, address: int = 0, index: int = 0
) -> np.random.Philox:
    # Counter word 0 is left to the generator, which counts it up four draws at a time.
    return np.random.Philox(
        key=np.array([seed, step], dtype=np.uint64),
        counter=np.array([0, index, address, purpose], dtype=np.uint64),
    )


@lru_cache(maxsize=65536)
def _address(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def completion_uniforms(
    *, seed: int, step: int, answers: Sequence[tuple[str, int]], count: int
) -> np.ndarray:
    """Return the uniforms in [0, 1), float32, for positions 0 to count - 1 of each of n rollouts.

    [n, count]; a rollout is given by its prompt and sample.
    """
    # One generator is pointed to address after address: making one takes far longer than drawing.
    generator = _philox(seed, step, _TOKENS)
    state = generator.state
    counter = state["state"]["counter"]
    bits = np.empty((len(answers), count), dtype=np.uint64)
    for row, (prompt, sample) in enumerate(answers):
        counter[1], counter[2] = sample, _address(prompt)
        generator.state = state
        bits[row] = generator.random_raw(count)
    # 24 bits: as many as float32 holds, so that no uniform is ever rounded up to 1.
    bits >>= np.uint64(40)
    uniforms: np.ndarray = bits.astype(np.float32)
    uniforms *= np.float32(2.0**-24)
    return uniforms


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, size: int, purpose: int = _PROMPT_ORDER) -> np.ndarray:
    return np.random.Generator(_philox(seed, epoch, purpose)).permutation(size)


def prompt_indices(*, seed: int, step: int, count: int, size: int) -> list[int]:
    """Return which prompts of a task of `size` step number `step` asks, none of them twice.

    A step lies within one epoch, a new order of all prompts; the few that no whole step is left
    for sit that epoch out.
    """
    epoch, place = divmod(step, size // count)
    order = _epoch_order(seed, epoch, size)
    return [int(index) for index in order[place * count : (place + 1) * count]]


def sft_indices(*, seed: int, start: int, stop: int, size: int) -> list[int]:
    """Return which solutions of `size` come number `start` to `stop` - 1 in a warm-up.

    Every epoch is a new order of all of them, and epochs follow each other without a gap.
    """
    places = (divmod(number, size) for number in range(start, stop))
    return [int(_epoch_order(seed, epoch, size, _SOLUTIONS)[place]) for epoch, place in places]


def refill_order(*, seed: int, step: int, round_number: int, size: int) -> list[int]:
    """Return an order of all prompts, from which a round that fills up a step takes the first."""
    generator = np.random.Generator(_philox(seed, step, _REFILL, index=round_number))
    return [int(index) for index in generator.permutation(size)]


def mini_batch_order(*, seed: int, step: int, epoch: int, groups: int) -> list[int]:
    """Return the order in which one epoch over a rollout batch visits its groups."""
    generator = np.random.Generator(_philox(seed, step, _MINI_BATCHES, index=epoch))
    return [int(i) for i in generator.permutation(groups)]
