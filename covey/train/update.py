"""Learning from a batch: log-probabilities that the objective needs, then gradient steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from covey.objective import Objective, PolicyLoss, policy_loss, with_marks, with_weight
from covey.objective.diagnostics import (
    Meter,
    observe,
    observe_correction,
    observe_sampler,
    summary,
)
from covey.policy.layout import micro_batches
from covey.policy.policy import LogProbs, Policy
from covey.reference import Reference
from covey.sampler.random import mini_batch_order
from covey.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How a batch is turned into optimizer steps."""

    mini_batches: int
    epochs: int
    token_budget: int
    old_logp_from_sampler: bool
    learning_rate: Callable[[float], float]
    """From the policy's version: how many optimizer steps it has taken."""
    seed: int
    skip_zero_gradient: bool = False

    @property
    def off_policy(self) -> bool:
        """Whether some optimizer step comes after another on the same batch."""
        return self.mini_batches * self.epochs > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one forward and backward pass of an update was about, for somebody who watches."""

    number: int
    """Which optimizer step of the batch, from 0."""
    rows: torch.Tensor
    """Which rows of the batch."""
    micro: Batch
    """Those rows, with their weights."""
    now: LogProbs
    """Of the policy before the optimizer step; without their gradients."""


Watch = Callable[[Seen], None]


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
    wanted = settings.off_policy or objective.needs_old_logp
    if wanted and settings.old_logp_from_sampler and not objective.needs_old_entropy:
        batch = replace(batch, old_logp=batch.sampler_logp)
    elif wanted or objective.needs_old_entropy:
        old = whole_batch(batch, settings.token_budget, policy.logp)
        batch = replace(batch, old_logp=old.logp, entropy=old.entropy)
    if objective.needs_reference:
        assert reference is not None, "an objective with a penalty is given a reference"
        with reference.at_work():
            ref = whole_batch(batch, settings.token_budget, reference.logp)
        batch = replace(batch, ref_logp=ref.logp)
    return batch


def whole_batch(batch: Batch, token_budget: int, logp: Callable[[Batch], LogProbs]) -> LogProbs:
    """Run `logp` over micro-batches and put the rows back in their places."""
    blank = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    whole = LogProbs(logp=blank, entropy=blank.clone())
    for index in micro_batches(batch, token_budget):
        part = logp(batch.rows(index))
        for target, values in zip(whole, part, strict=True):
            target[index.to(target.device), : values.shape[1]] = values.float()
    return whole


def update(
    batch: Batch,
    *,
    policy: Policy,
    objective: Objective,
    settings: UpdateSettings,
    step: int,
    reference: Reference | None = None,
    watch: Watch | None = None,
) -> dict[str, float]:
    """Take every optimizer step that `settings` asks for, and return the metrics of the update.

    The reference is told of each step: some follow the policy.
    """
    meter = Meter()
    policy.model.model.train()
    first, skipped = True, 0
    for number, index in enumerate(_mini_batches(batch, settings, step)):
        mini = ready(batch.rows(index), policy, objective, settings)
        observe_correction(meter, mini)
        if settings.skip_zero_gradient and objective.only_surrogate:
            useful = _with_gradient(mini)
            mini, index = mini.rows(useful), index[useful]
        losses: list[torch.Tensor] = []
        for rows in micro_batches(mini, settings.token_budget):
            micro = mini.rows(rows)
            output, now = _backward(policy, objective, micro)
            losses.append(output.loss)
            observe(meter, objective, micro, output, now.entropy)
            if first:
                observe_sampler(meter, micro, now.logp)
            if watch is not None:
                watch(Seen(number=number, rows=index[rows], micro=micro, now=now))
        rate = settings.learning_rate(policy.version)
        stepped = policy.step(rate)
        if reference is not None:
            reference.after_step(policy)
        loss = 0.0
        for part in torch.stack(losses).tolist():  # when the device has done its work anyway
            loss += part
        meter.add("loss/policy_avg", loss)
        skipped += stepped.skipped
        if not stepped.skipped:
            meter.add("optim/grad_norm", stepped.grad_norm)
        first = False
    return {**summary(meter), "lr": rate, "optim/skipped": skipped}


def _backward(policy: Policy, objective: Objective, micro: Batch) -> tuple[PolicyLoss, LogProbs]:
    """Add the gradient of some rows; return what they gave, without any trace for autograd.

    While there is one, parameters remember the stream that it was made on, and a pass cannot be
    recorded on another.
    """
    now = policy.logp(micro)
    output = policy_loss(objective, micro, now.logp, now.entropy)
    output.loss.backward()
    values = LogProbs(*(v.detach() for v in now))
    return output._replace(loss=output.loss.detach()), values


def ready(mini: Batch, policy: Policy, objective: Objective, settings: UpdateSettings) -> Batch:
    """Fill in what is taken over one optimizer step."""
    mini = with_weight(objective, mini)
    if objective.marks is None:
        return mini
    with torch.no_grad():
        now = whole_batch(mini, settings.token_budget, policy.logp)
    return with_marks(objective, mini, now.logp)


def _with_gradient(mini: Batch) -> torch.Tensor:
    """Return the rows with some advantage. The weights are fixed, so nothing else changes."""
    assert mini.advantage is not None
    useful = ((mini.advantage != 0) & mini.mask).any(dim=1)
    # One row stays in any case, so that there is a gradient, if only of zeros.
    useful[0] |= ~useful.any()
    return useful.nonzero().squeeze(1)


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
        yield from (part for part in rows.tensor_split(settings.mini_batches) if len(part))
