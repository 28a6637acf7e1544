"""Checks that the gradient does not depend on how a batch is split, padded or ordered.

`covey doctor` computes the gradient of one optimizer step several times, each time with different
micro-batches, padding, packing, ranks or order. Each gradient is compared with a reference, which
is the sum of gradients from a separate forward pass for each completion. The rewards are replaced
by hashes of prompt id and sample index, because equal rewards would give a gradient of 0.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from covey.lab.doctor.result import Clock, Result
from covey.objective import with_weight
from covey.parallel.world import World
from covey.run import Run
from covey.step import backward_passes, filled_batch, marked
from covey.types import Batch, Group, Rollout

TOLERANCE, ROUNDED = 1e-3, 0.1
"""The largest allowed relative difference of two gradients: in float32, and in 16-bit precision."""
REMEDY = (
    "the loss of a step depends on how the batch is split or padded: your own objective must leave "
    "denominators to its weights; set train.graphs = 'off' to rule out CUDA graphs, and otherwise "
    "report this result"
)
Gradient = Mapping[str, torch.Tensor]
"""Maps the name of each parameter to its gradient."""
_ZERO = torch.zeros(())


class _OfTwo(World):
    """One of two simulated ranks, which selects its own micro-batches but does not communicate."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def gradient_checks(whole: Run, groups: Sequence[Group], clock: Clock) -> Iterator[Result]:
    """Compare the gradient of an optimizer step with the sum of its completions' gradients."""
    settings = replace(whole.settings, mini_batches=1, epochs=1)
    policy = replace(whole.policy, graphs=False, passes=None)
    run = replace(whole, settings=settings, policy=policy)
    if skipped := clock.skips("gradient", 2 * clock.pace.update):
        yield skipped
        return
    invented = [_invented(group) for group in groups]
    batch = _filled(run, invented)
    with clock.pace.measures("update"):
        alone = _gradient([_with_tokens(run, 1)], batch)
    # Copy the gradient, because the next gradient overwrites the same tensors.
    alone = {name: each.detach().clone() for name, each in alone.items()}
    # With half of the padded batch's tokens as the limit, there are at least two micro-batches.
    half = max(1, int((batch.prompt_lengths + batch.lengths).max()) * len(batch) // 2)
    halves = _with_tokens(run, half)
    model = replace(run.policy.model, packs=False, flash=False, fused=False)
    plain = replace(run, policy=replace(run.policy, model=model))
    ranks = [replace(halves, world=_OfTwo(rank)) for rank in (0, 1)]
    ways: dict[str, Callable[[], Gradient | None]] = {
        "micro-batches": lambda: _gradient([halves], batch),
        "padding": lambda: _gradient([plain], batch),
        "packing": lambda: _gradient([run], batch) if run.policy.model.packs else None,
        "ranks": lambda: _gradient(ranks, batch),
        "order": lambda: _gradient([run], _filled(run, invented[::-1])),
    }
    size = _distance(alone, {})
    exact = run.policy.model.head.linear.weight.dtype in (torch.float32, torch.float64)
    for name, compute in ways.items():
        if skipped := clock.skips(f"gradient: {name}", clock.pace.update):
            yield skipped
            continue
        found = compute()
        if found is None:
            yield Result(name=f"gradient: {name}", passed=None, figure="the model does not pack")
            continue
        away = _distance(found, alone) / (size or 1.0)
        passed = size > 0 and away <= (TOLERANCE if exact else ROUNDED)
        figure = f"relative difference {away:.1e}" if size else "the gradient is zero"
        yield Result(name=f"gradient: {name}", passed=passed, figure=figure, remedy=REMEDY)
    run.policy.optimizer.zero_grad()


def _invented(group: Group) -> Group:
    """Replace a group's rewards by hashes of prompt id and sample index."""

    def reward(rollout: Rollout) -> float:
        return zlib.crc32(f"{rollout.prompt_id} {rollout.sample}".encode()) % 1000 / 1000

    rollouts = (
        replace(
            rollout,
            reward=reward(rollout),
            success=reward(rollout) > 0.5,
            parts={name: reward(rollout) for name in rollout.parts},
        )
        for rollout in group.rollouts
    )
    return replace(group, rollouts=tuple(rollouts))


def _filled(run: Run, groups: Sequence[Group]) -> Batch:
    batch = filled_batch(run, groups, 1)
    return marked(run, with_weight(run.objective, batch))


def _gradient(runs: Sequence[Run], batch: Batch) -> Gradient:
    """Return the gradient of each parameter by name, summed over the runs of all ranks.

    The next call of `_gradient` overwrites the returned tensors, which belong to the optimizer.
    """
    optimizer = runs[0].policy.optimizer
    optimizer.zero_grad()
    for run in runs:
        run.policy.model.model.train()
        for _ in backward_passes(run, batch):
            pass
    return {name: found for name, found in optimizer.gradients().items() if found is not None}


def _distance(one: Gradient, other: Gradient) -> float:
    """Return the norm of the difference of two gradients. A missing gradient counts as zero."""
    names = {*one, *other}
    away = (one.get(name, _ZERO) - other.get(name, _ZERO) for name in names)
    return math.hypot(*(float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in away))


def _with_tokens(run: Run, tokens: int) -> Run:
    return replace(run, settings=replace(run.settings, micro_batch_tokens=tokens))
