"""Random numbers that depend on where they are used, not on the order of the draws.

Each number depends only on (seed, step, prompt, sample, turn, position). The generator is numpy's
counter-based Philox, which needs no state between draws. The numbers therefore do not depend on the
batch size, the order of requests or the number of workers. A resumed run draws the same numbers as
an uninterrupted run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_PROMPT_ORDER, _TOKENS, _MINI_BATCHES, _REFILL, _SOLUTIONS, _CURRICULUM, _REPLAY = range(7)
"""The purposes for which Covey draws random numbers; each purpose has its own stream."""


def _philox(seed: int, step: int, purpose: int, index: int = 0) -> np.random.Philox:
    # Counter word 0 is left to the generator, which counts it up four draws at a time.
    return np.random.Philox(
        key=np.array([seed, step], dtype=np.uint64),
        counter=np.array([0, index, 0, purpose], dtype=np.uint64),
    )


@lru_cache(maxsize=65536)
def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class Address(NamedTuple):
    """The values that determine the random numbers for sampling the tokens of a completion."""

    seed: int
    step: int
    prompt: str
    sample: int
    turn: int = 0


def world_seed(*, seed: int, step: int, prompt: str) -> int:
    """Return an environment's 63-bit seed, which is the same for all rollouts of a group."""
    words = f"{seed}/{step}/{prompt}"
    return _hash(words) >> 1


def dropout_seed(*, seed: int, version: int, place: int, rank: int) -> int:
    """Return the 63-bit dropout seed of one micro-batch on one rank."""
    return _hash(f"dropout/{seed}/{version}/{place}/{rank}") >> 1


def completion_uniforms(addresses: Sequence[Address], count: int) -> np.ndarray:
    """Return `count` uniform random numbers in [0, 1) for each address, as float32 [n, count]."""
    # One generator is reused, because creating a generator takes far longer than drawing numbers.
    generator = _philox(0, 0, _TOKENS)
    state = generator.state
    key, counter = state["state"]["key"], state["state"]["counter"]
    bits = np.empty((len(addresses), count), dtype=np.uint64)
    for row, (seed, step, prompt, sample, turn) in enumerate(addresses):
        key[0], key[1] = seed, step
        # The turn is in the upper half of the purpose's word, so turn 0 leaves the word unchanged.
        counter[1], counter[2], counter[3] = sample, _hash(prompt), _TOKENS | turn << 32
        generator.state = state
        bits[row] = generator.random_raw(count)
    # 24 bits are float32's precision, so no uniform is ever rounded up to 1.
    bits >>= np.uint64(40)
    uniforms: np.ndarray = bits.astype(np.float32)
    uniforms *= np.float32(2.0**-24)
    return uniforms


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, size: int, purpose: int = _PROMPT_ORDER) -> np.ndarray:
    return np.random.Generator(_philox(seed, epoch, purpose)).permutation(size)


def prompt_indices(*, seed: int, step: int, count: int, size: int) -> list[int]:
    """Return the indices of a step's `count` different prompts in a task of `size` prompts.

    Each epoch has a new order of all prompts. A step never spans two epochs, so the last prompts of
    an epoch are left out if they do not fill a whole step.
    """
    epoch, place = divmod(step, size // count)
    order = _epoch_order(seed, epoch, size)
    return [int(index) for index in order[place * count : (place + 1) * count]]


def sft_indices(*, seed: int, start: int, stop: int, size: int) -> list[int]:
    """Return the data indices of the SFT solutions `start` to `stop - 1`, in training order.

    Each epoch has a new order of all solutions.
    """
    places = (divmod(number, size) for number in range(start, stop))
    return [int(_epoch_order(seed, epoch, size, _SOLUTIONS)[place]) for epoch, place in places]


def refill_order(*, seed: int, step: int, round_number: int, size: int) -> list[int]:
    """Return the order in which a refill round of dynamic sampling takes the prompts."""
    return _permutation(_philox(seed, step, _REFILL, index=round_number), size)


def weighted_order(weights: np.ndarray, *, seed: int, step: int) -> list[int]:
    """Return item indices, drawn without replacement, with probabilities proportional to `weights`.

    Items of weight 0 are left out. For each item `i` with a positive weight, the function draws an
    exponential variable of rate `weights[i]`. The items are sorted by their exponential variables
    (Efraimidis and Spirakis). Changing one weight therefore leaves the order of all other items
    unchanged.
    """
    generator = np.random.Generator(_philox(seed, step, _CURRICULUM))
    times = generator.standard_exponential(len(weights))
    racing = np.flatnonzero(weights > 0)
    order = np.argsort(times[racing] / weights[racing], kind="stable")
    found: list[int] = racing[order].tolist()
    return found


def replay_order(*, seed: int, step: int, size: int) -> list[int]:
    """Return a random order of the groups of a replay buffer."""
    return _permutation(_philox(seed, step, _REPLAY), size)


def mini_batch_order(*, seed: int, step: int, epoch: int, groups: int) -> list[int]:
    """Return the order of groups in one epoch over a rollout batch."""
    return _permutation(_philox(seed, step, _MINI_BATCHES, index=epoch), groups)


def _permutation(bits: np.random.Philox, size: int) -> list[int]:
    order: list[int] = np.random.Generator(bits).permutation(size).tolist()
    return order
