"""Sums gradients over ranks, once per optimizer step, before clipping.

Large gradients are all-reduced in place. Small gradients are all-reduced together, in buckets. In
the last backward pass of an optimizer step, the all-reduce of a bucket starts as soon as all its
gradients are complete. The all-reduce overlaps with the rest of the backward pass. Gradients from
CUDA graphs or fused kernels are all-reduced only after the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from covey.parallel.shard import GatheredSteps, gathered_steps
from covey.parallel.world import Ranks

if TYPE_CHECKING:
    from covey.models.language_model import LanguageModel
    from covey.parallel.world import World
    from covey.policy.optimizer import Optimizer

BUCKET_BYTES = 25 * 2**20


@dataclass(slots=True)
class _Bucket:
    names: list[str]
    missing: int = 0
    """Number of the bucket's gradients that the backward pass has not computed yet."""
    work: Any = None
    flat: torch.Tensor | None = None
    """A flat copy of the bucket's gradients; None for a single gradient, which needs no copy."""


@dataclass(slots=True)
class GradientSums:
    """Sums the gradients of an optimizer over ranks."""

    world: Ranks
    optimizer: Optimizer
    buckets: list[_Bucket] = field(init=False)
    _started: int = field(default=0, init=False)
    _overlaps: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # The backward pass computes the gradients of the last parameters first.
        named = list(self.optimizer.parameters.items())[::-1]
        self.buckets = _buckets([(name, 4 * p.numel()) for name, p in named])
        place = {name: bucket for bucket in self.buckets for name in bucket.names}
        for name, parameter in named:
            parameter.register_post_accumulate_grad_hook(self._completed(place[name]))

    def _completed(self, bucket: _Bucket) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            if not self._overlaps:
                return
            bucket.missing -= 1
            # Complete buckets start in the same order on every rank.
            while self._started < len(self.buckets) and not self.buckets[self._started].missing:
                self._start(self.buckets[self._started])
                self._started += 1

        return hook

    def expect(self) -> None:
        """Let the next backward pass sum each bucket over ranks once all its gradients exist."""
        for bucket in self.buckets:
            bucket.missing = len(bucket.names)
        self._overlaps = True

    def finish(self) -> None:
        self._overlaps = False
        for bucket in self.buckets[self._started :]:
            self._start(bucket)
        self._started = 0
        for bucket in self.buckets:
            self._end(bucket)

    def _start(self, bucket: _Bucket) -> None:
        grads = self._gradients(bucket)
        if not grads:
            return
        if len(grads) == 1 and grads[0].is_contiguous():
            whole = grads[0]
        else:
            bucket.flat = whole = torch.cat([grad.flatten() for grad in grads])
        bucket.work = self.world.summing(whole)

    def _end(self, bucket: _Bucket) -> None:
        if bucket.work is None:
            return
        self.world.wait(bucket.work)
        if bucket.flat is not None:
            grads = self._gradients(bucket)
            parts = bucket.flat.split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))
        bucket.work = bucket.flat = None

    def _gradients(self, bucket: _Bucket) -> list[torch.Tensor]:
        """Return the gradients of a bucket's parameters; skip parameters without a gradient."""
        found = self.optimizer.gradients()
        return [grad for name in bucket.names if (grad := found[name]) is not None]


def sums_of(
    model: LanguageModel, optimizer: Optimizer, world: World
) -> GradientSums | GatheredSteps | None:
    """Return an object that sums gradients over ranks; None with one rank, or if FSDP2 sums them.

    FSDP2 sums the gradients of a sharded model in the backward pass, unless the weights stay
    gathered for a whole optimizer step.
    """
    if model.sharded:
        return gathered_steps(model, world)
    return GradientSums(world, optimizer) if isinstance(world, Ranks) else None


def _buckets(sizes: Sequence[tuple[str, int]]) -> list[_Bucket]:
    """Put small gradients into shared buckets, and each large gradient into its own bucket."""
    buckets: list[_Bucket] = []
    room = 0
    for name, size in sizes:
        if size > room:
            buckets.append(_Bucket([]))
            room = BUCKET_BYTES
        buckets[-1].names.append(name)
        room -= size
    return buckets
