"""Learning from a batch: log-probabilities that the objective needs, then gradient steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from covey.objective import LossOutput, Objective, policy_loss, with_weight
from covey.policy.layout import micro_batches
from covey.policy.policy import LogProbs, Policy
from covey.reference import Reference
from covey.sampler.random import mini_batch_order
from covey.train.meter import Meter
from covey.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How a batch is turned into optimizer steps."""

    mini_batches: int
    epochs: int
    token_budget: int
    old_logp_from_sampler: bool
    learning_rate: Callable[[int], float]
    """From the policy's version: how many optimizer steps it has taken."""
    seed: int

    @property
    def off_policy(self) -> bool:
        """Whether some optimizer step comes after another on the same batch."""
        return self.mini_batches * self.epochs > 1


@torch.no_grad()
def prepare(
    batch: Batch,
    *,
    policy: Policy,
    objective: Objective,
    reference: Reference | None,
    settings: UpdateSettings,
) -> Batch:
    """Fill in old_logp, entropy and ref_logp, each only if something will read it."""
    if settings.off_policy and settings.old_logp_from_sampler and not objective.needs_entropy:
        batch = replace(batch, old_logp=batch.sampler_logp)
    elif settings.off_policy or objective.needs_entropy:
        old = _whole_batch(batch, settings.token_budget, policy.logp)
        batch = replace(batch, old_logp=old.logp, entropy=old.entropy)
    if objective.needs_reference:
        assert reference is not None, "an objective with a penalty is given a reference"
        ref = _whole_batch(batch, settings.token_budget, reference.logp)
        batch = replace(batch, ref_logp=ref.logp)
    return batch


def _whole_batch(batch: Batch, token_budget: int, logp: Callable[[Batch], LogProbs]) -> LogProbs:
    """Run `logp` over micro-batches and put the rows back in their places."""
    blank = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    whole = LogProbs(logp=blank, entropy=blank.clone())
    for index in micro_batches(batch, token_budget):
        part = logp(batch.rows(index))
        for target, values in zip(whole, part, strict=True):
            target[index, : values.shape[1]] = values.float()
    return whole


def update(
    batch: Batch, *, policy: Policy, objective: Objective, settings: UpdateSettings, step: int
) -> dict[str, float]:
    """Take every optimizer step that `settings` asks for, and return the metrics of the update."""
    meter = Meter()
    policy.model.model.train()
    first, skipped = True, 0
    for index in _mini_batches(batch, settings, step):
        mini = with_weight(objective, batch.rows(index))
        loss = 0.0
        for rows in micro_batches(mini, settings.token_budget):
            micro = mini.rows(rows)
            now = policy.logp(micro)
            output = policy_loss(objective, micro, now.logp)
            output.loss.backward()
            loss += float(output.loss.detach())
            _observe(meter, micro, now, output, first)
        rate = settings.learning_rate(policy.version)
        stepped = policy.step(rate)
        meter.add("loss/policy_avg", loss)
        skipped += stepped.skipped
        if not stepped.skipped:
            meter.add("optim/grad_norm", stepped.grad_norm)
        first = False
    metrics = meter.means()
    metrics |= {"lr": rate, "optim/skipped": skipped}
    # Var r = E r^2 - (E r)^2, from sums that add up over micro-batches.
    metrics["val/ratio_var"] = max(0.0, metrics.pop("ratio_square") - metrics["val/ratio"] ** 2)
    return metrics


def _mini_batches(batch: Batch, settings: UpdateSettings, step: int) -> Iterator[torch.Tensor]:
    """Yield the rows of each optimizer step. Groups stay together as far as the sizes allow."""
    groups = batch.group.unique()
    for epoch in range(settings.epochs):
        order = mini_batch_order(seed=settings.seed, step=step, epoch=epoch, groups=len(groups))
        rank = torch.empty_like(groups)
        rank[torch.tensor(order, device=groups.device)] = torch.arange(
            len(groups), device=groups.device
        )
        rows = rank[torch.searchsorted(groups, batch.group)].argsort(stable=True)
        yield from rows.tensor_split(settings.mini_batches)


def _observe(meter: Meter, batch: Batch, now: LogProbs, output: LossOutput, first: bool) -> None:
    mask = batch.mask
    assert batch.advantage is not None
    logp, ratio = now.logp.detach(), output.log_ratio.exp()
    meter.tokens("policy/entropy_avg", now.entropy.detach(), mask)
    meter.tokens("policy/approxkl_avg", ratio - 1 - output.log_ratio, mask)
    meter.tokens("policy/clipfrac_low", output.clipped_low.float(), mask)
    meter.tokens("policy/clipfrac_high", output.clipped_high.float(), mask)
    meter.tokens("policy/clipfrac_avg", (output.clipped_low | output.clipped_high).float(), mask)
    meter.tokens("val/ratio", ratio, mask)
    meter.tokens("ratio_square", ratio.double().square(), mask)
    meter.smallest("val/ratio_min", ratio, mask)
    meter.largest("val/ratio_max", ratio, mask)
    meter.tokens("val/advantages_mean", batch.advantage, mask)
    meter.smallest("val/advantages_min", batch.advantage, mask)
    meter.largest("val/advantages_max", batch.advantage, mask)
    if output.penalty is not None:
        meter.tokens("objective/kl_avg", output.penalty, mask)
    if first:
        gap = (logp - batch.sampler_logp).abs()
        meter.tokens("debug/sampler_logp_diff_mean", gap, mask)
        meter.largest("debug/sampler_logp_diff_max", gap, mask)
