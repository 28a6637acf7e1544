"""Checks the engine against the trainer: log-probs, greedy completions and weight updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from covey.collate import collate
from covey.engines.draw import Distribution
from covey.lab.doctor.result import Clock, Result
from covey.lab.numerics.gap import gap_of
from covey.lab.numerics.logp_variants import log_kept, trainer_logp
from covey.lab.numerics.measure_gaps import clip_range
from covey.records.trackers import Tracker
from covey.rollout.collect import collect_step
from covey.rollout.episode import encode_prompts, generate
from covey.run import Run
from covey.step import filled_batch
from covey.types import Group

EXACT = 1e-3
"""The largest allowed difference between the engine's and the trainer's log-probs, in nats."""
RATE = 1e-3
"""The learning rate of the test step, large enough to detect an engine with stale weights."""
GREEDY, ARRIVES = "engine: greedy text", "engine: new weights"
NEAR = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Maps a dtype to the largest allowed difference between the highest logit and a greedy token's
logit. The largest allowed logit difference for 16-bit dtypes, which are not in `NEAR`, is 0.5."""


def logp_check(run: Run, groups: Sequence[Group], name: str, remedy: str) -> Result:
    """Compare the log-probs of the engine with the log-probs of the trainer."""
    policy, tokens = run.policy, run.settings.micro_batch_tokens
    batch = collate(groups, policy.model.device)
    kept = log_kept(policy, batch, run.sampling.distribution, tokens)
    difference = trainer_logp(policy, batch, tokens) - batch.sampler_logp - kept
    gap = gap_of(difference, batch.mask, clip_range(run))
    exact = run.engine.info.exact_logp and not run.sampling.distribution.truncates
    passed = gap.max <= EXACT if exact else gap.severity != "matters"
    figure = f"{gap.mean:.1e} nats in the mean, {gap.max:.1e} at most, {gap.tokens} tokens"
    return Result(name=name, passed=passed, figure=figure, remedy=remedy)


def engine_checks(run: Run, groups: Sequence[Group], clock: Clock) -> Iterator[Result]:
    """Check the engine's log-probs and greedy completions with the current weights."""
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
