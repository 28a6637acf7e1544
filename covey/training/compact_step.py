"""AdamW step on a compact state, in torch operations.

A float32 weight is stored in two halves of 16 bits. The upper half is the nearest bfloat16 number,
with which the model computes. The lower half is the difference between the weight's bits and the
upper half, so the two halves together are exact. Moments are stored in bfloat16 with stochastic
rounding, which is correct on average. Rounding to nearest would freeze the second moment. With
beta2 = 0.999, a step reduces the moment by at most a thousandth of its value, while neighbouring
bfloat16 numbers differ by 1/256 to 1/128 of their value. The Triton kernel in
covey/accel/kernels/adamw.py gives the same results as this module.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import torch

from covey.training.optimizer import AdamWSettings

CHUNK = 1 << 17
"""Number of elements that are processed at a time, so that temporary tensors stay small."""


class Numbers(NamedTuple):
    """Scalars of an optimizer step, equal for all elements, in the order of kernel arguments."""

    clip: float
    """Factor by which the step multiplies gradients, so that clipping needs no separate pass."""
    beta1: float
    rest1: float
    """1 - beta1."""
    beta2: float
    rest2: float
    keep: float
    """Factor by which weights are multiplied: 1 - rate * weight_decay."""
    size: float
    """The learning rate, divided by the first moment's bias correction."""
    inverse_root: float
    """1 / sqrt(1 - beta2 ** step): the bias correction for the square root of the second moment."""
    eps: float


def numbers_of(settings: AdamWSettings, *, step: int, rate: float, clip: float) -> Numbers:
    """Return the scalars of optimizer step number `step`, counted from 1."""
    beta1, beta2 = settings["betas"]
    return Numbers(
        clip=clip,
        beta1=beta1,
        rest1=1 - beta1,
        beta2=beta2,
        rest2=1 - beta2,
        keep=1 - rate * settings["weight_decay"],
        size=rate / (1 - beta1**step),
        inverse_root=1 / math.sqrt(1 - beta2**step),
        eps=settings["eps"],
    )


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 values as two int16 halves: the nearest bfloat16, and the remaining bits.

    Ties are rounded away from 0. A NaN stays a NaN, but its other bits are lost.
    """
    bits = values.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    lower = bits - (upper << 16)
    broken = values.isnan()
    upper = upper.where(~broken, (bits >> 16) | 0x40)
    return upper.short(), lower.masked_fill_(broken, 0).short()


def whole(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Return the float32 values that two int16 halves represent."""
    return (upper.int() << 16).add_(lower).view(torch.float32)


def keys_of(seed: int, number: int, step: int) -> tuple[int, int]:
    """Return two 31-bit keys, from which the random bits of an optimizer step are computed.

    `number` is the index of the storage whose parameters are updated.
    """
    digest = hashlib.blake2b(f"{seed}/{number}/{step}".encode(), digest_size=8).digest()
    first, second = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    return first >> 1, second >> 1


def random_bits(
    start: int, count: int, keys: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Return 32 random bits as int32 for `count` elements, beginning at element `start`."""
    signed = (start + 2**31) % 2**32 - 2**31
    bits = torch.arange(count, dtype=torch.int32, device=device).add_(signed)
    for key in keys:
        bits = _mixed(bits.bitwise_xor_(key))
    return bits


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32  # the same bits, signed
    x ^= (x >> 16) & 0xFFFF
    return x


def rounded(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round values to bfloat16 stochastically, and return the bits as int16.

    `random` has a number from 0 to 2 ** 16 - 1 for each value. Each number is added to the lower 16
    bits of its value, and then the lower bits are dropped. The sum carries into the upper bits with
    a probability proportional to the lower bits, which is the right probability of rounding up.
    """
    bits = values.view(torch.int32)
    finite = (bits & 0x7F800000) != 0x7F800000
    return ((bits + random * finite) >> 16).short()


def adamw(
    weight: torch.Tensor,
    low: torch.Tensor | None,
    grad: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    numbers: Numbers,
    keys: tuple[int, int],
    first_index: int = 0,
) -> None:
    """Take an AdamW step in place on flat tensors.

    Moments are bfloat16 numbers, stored as int16 bits. If `low` is given, `weight` and `low` are
    the two int16 halves of the weights. If `low` is None, `weight` is float32. The step uses the
    moments before rounding. The random bits of element i are those with index `first_index` + i.
    """
    n = numbers
    for start in range(0, weight.numel(), CHUNK):
        part = slice(start, min(start + CHUNK, weight.numel()))
        first, second = (moment[part] for moment in moments)
        value = weight[part] if low is None else whole(weight[part], low[part])
        pull = grad[part] * n.clip
        mean = first.view(torch.bfloat16).float().mul_(n.beta1).add_(pull * n.rest1)
        square = second.view(torch.bfloat16).float().mul_(n.beta2)
        square.add_(pull.mul_(pull).mul_(n.rest2))
        # Computed in float64, because torch's float32 square root is sometimes one bit off.
        root = square.double().sqrt_().float()
        move = mean / root.mul_(n.inverse_root).add_(n.eps)
        value.mul_(n.keep).sub_(move.mul_(n.size))
        random = random_bits(first_index + start, len(value), keys, value.device)
        first.copy_(rounded(mean, random & 0xFFFF))
        second.copy_(rounded(square, (random >> 16) & 0xFFFF))
        if low is not None:
            upper, lower = split(value)
            weight[part].copy_(upper)
            low[part].copy_(lower)
