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

from covey.engines.draw import Distribution
from covey.lab.checks.numerics import engine_gap, trainer_logp
from covey.lab.checks.result import Clock, Result
from covey.objective import with_weight
from covey.parallel.world import World
from covey.records.trackers import Tracker
from covey.rollout.collect import collect_step
from covey.rollout.episode import encode_prompts, generate
from covey.run import Run
from covey.step import backward_passes, filled_batch, marked
from covey.types import Batch, Group, Rollout

# Checks the engine against the trainer: log-probs, greedy completions and weight updates.


EXACT = 1e-3
"""The largest allowed difference between the engine's and the trainer's log-probs, in nats."""
RATE = 1e-3
GREEDY, ARRIVES = "engine: greedy text", "engine: new weights"
NEAR = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Maps a dtype to the largest allowed difference between the highest logit and a greedy token's
logit. The largest allowed logit difference for 16-bit dtypes, which are not in `NEAR`, is 0.5."""


def logp_check(run: Run, groups: Sequence[Group], name: str, remedy: str) -> Result:
    """Compare the log-probs of the engine with the log-probs of the trainer."""
    gap = engine_gap(run, groups)
    exact = run.engine.info.exact_logp and not run.sampling.distribution.truncates
    passed = gap.max <= EXACT if exact else gap.severity != "matters"
    figure = f"{gap.mean:.1e} nats in the mean, {gap.max:.1e} at most, {gap.tokens} tokens"
    return Result(name=name, passed=passed, figure=figure, remedy=remedy)


def engine_checks(run: Run, groups: Sequence[Group], clock: Clock) -> Iterator[Result]:
    clock.skips("engine: log-probs")
    yield logp_check(
        run,
        groups,
        "engine: log-probs",
        "the engine's log-probs differ from the policy's; `covey numerics` finds the cause; set "
        "train.old_logp = 'recompute' and objective.correction",
    )
    yield clock.skips(GREEDY, clock.pace.rollout) or _greedy(run, groups)


def weights_check(run: Run, groups: Sequence[Group], clock: Clock) -> Iterator[Result]:
    """Take an optimizer step, and check that the engine then generates with the new weights."""
    if skipped := clock.skips(ARRIVES, clock.pace.rollout + 2 * clock.pace.update):
        yield skipped
        return
    policy, step, tokens = run.policy, 2, run.settings.micro_batch_tokens
    before = trainer_logp(policy, batch := filled_batch(run, groups, 1), tokens)
    policy.optimizer.zero_grad()
    policy.model.model.train()
    # Any nonzero gradient suffices, and the gradient of the mean log-prob is never zero.
    torch.autograd.backward(policy.plain_logp(batch).logp[batch.mask].mean())
    policy.step(RATE)
    moved = float((trainer_logp(policy, batch, tokens) - before)[batch.mask].abs().max())
    rollouts = collect_step(run, step, Tracker(), 0.0)
    result = logp_check(
        run,
        rollouts.collected.groups,
        ARRIVES,
        "the engine still generates with old weights; check engine.kind and the vLLM servers",
    )
    yield replace(result, figure=f"{result.figure}, after a step that moved {moved:.1e}")


@torch.no_grad()
def _greedy(run: Run, groups: Sequence[Group]) -> Result:
    """Check that every greedy token has the highest probability in the model's forward pass."""
    if run.interaction is not None:
        return Result(name=GREEDY, passed=None, figure="not checked with an environment")
    model = run.policy.model
    made = generate(
        encode_prompts(model, [group.prompt for group in groups]),
        engine=run.engine,
        model=model,
        sampling=replace(run.sampling, group_size=1, distribution=Distribution(temperature=0.0)),
        step=1,
    )
    model.model.eval()
    near, wrong, total = NEAR.get(model.head.linear.weight.dtype, 0.5), 0, 0
    for rollout in (group.rollouts[0] for group in made):
        ids = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]], device=model.device)
        logits = model.model(input_ids=ids).logits[0, len(rollout.prompt_tokens) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(rollout.tokens, device=model.device)[:, None])[:, 0]
        wrong += int((chosen < logits.max(dim=1).values - near).sum())
        total += len(rollout.tokens)
    return Result(
        name=GREEDY,
        passed=wrong == 0,
        figure=f"{wrong} of {total} tokens are not the most likely ones",
        remedy="the engine does not compute the same model: try engine.kind = 'native', or report "
        "this result",
    )


TOLERANCE, ROUNDED = 1e-3, 0.1
"""The largest allowed relative difference of two gradients: in float32, and in 16-bit precision."""
REMEDY = (
    "the loss of a step depends on how the batch is split or padded: your own objective must leave "
    "denominators to its weights; set train.graphs = 'off' to rule out CUDA graphs, and otherwise "
    "report this result"
)
Gradient = Mapping[str, torch.Tensor]
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
