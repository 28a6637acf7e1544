"""Learning from a batch: log-probabilities that the objective needs, then gradient steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from covey.accel.packing import to_device
from covey.models.logp import LogProbs
from covey.models.micro_batches import micro_batches
from covey.objective import Objective, PolicyLoss, policy_loss, with_marks, with_weight
from covey.objective.diagnostics import (
    Meter,
    observe,
    observe_correction,
    observe_sampler,
    summary,
)
from covey.reference import Reference
from covey.training.policy import Policy
from covey.training.row_facts import RowFacts, mini_batches
from covey.types import Batch, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How a batch is turned into optimizer steps."""

    mini_batches: int
    epochs: int
    micro_batch_tokens: int
    old_logp_from_sampler: bool
    learning_rate: Callable[[float], float]
    """From the policy's version: how many optimizer steps it has taken."""
    seed: int
    skip_zero_gradient: bool = False

    @property
    def off_policy(self) -> bool:
        """Whether some optimizer step comes after another on the same batch."""
        return self.mini_batches * self.epochs > 1

    def skips_rows(self, objective: Objective) -> bool:
        """Whether answers without advantage are left out of forward passes."""
        return self.skip_zero_gradient and objective.only_surrogate

    def optimizer_steps(self, group: torch.Tensor, step: int) -> Iterator[torch.Tensor]:
        """Yield the rows of each optimizer step on a batch whose rows are of these groups [B]."""
        return mini_batches(
            group, count=self.mini_batches, epochs=self.epochs, seed=self.seed, step=step
        )


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
    """Fill in old_logp, entropy and ref_logp, each only if something will read it.

    Where advantages are known by now, rows without any need not be asked about.
    """
    wanted = settings.off_policy or objective.needs_old_logp
    if wanted and settings.old_logp_from_sampler and not objective.needs_old_entropy:
        batch = replace(batch, old_logp=batch.sampler_logp)
    elif wanted and settings.skips_rows(objective) and batch.advantage is not None:
        batch = _with_useful_old_logp(batch, policy, settings)
    elif wanted or objective.needs_old_entropy:
        old = whole_batch(batch, settings.micro_batch_tokens, policy.logp)
        batch = replace(batch, old_logp=old.logp, entropy=old.entropy)
    if objective.needs_reference:
        assert reference is not None, "an objective with a penalty is given a reference"
        with reference.loaded():
            ref = whole_batch(batch, settings.micro_batch_tokens, reference.logp)
        batch = replace(batch, ref_logp=ref.logp)
    return batch


def _with_useful_old_logp(batch: Batch, policy: Policy, settings: UpdateSettings) -> Batch:
    """Fill in old_logp of the rows that have a gradient; no loss and no metric is of the others."""
    useful = RowFacts.of(batch).with_gradient(torch.arange(len(batch)))
    old = whole_batch(batch.rows(useful), settings.micro_batch_tokens, policy.logp).logp
    (rows,) = to_device([useful], old.device)
    whole = batch.sampler_logp.float().clone()
    whole[rows, : old.shape[1]] = old
    return replace(batch, old_logp=whole)


def whole_batch(
    batch: Batch, micro_batch_tokens: int, logp: Callable[[Batch], LogProbs]
) -> LogProbs:
    """Run `logp` over micro-batches and put the rows back in their places."""
    blank = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
    whole = LogProbs(logp=blank, entropy=blank.clone())
    for index in micro_batches(batch, micro_batch_tokens):
        part = logp(batch.rows(index))
        (rows,) = to_device([index], blank.device)
        for target, values in zip(whole, part, strict=True):
            target[rows, : values.shape[1]] = values.float()
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
    meter, facts = Meter(), RowFacts.of(batch)
    policy.model.model.train()
    losses: list[list[torch.Tensor]] = []
    skipped = 0
    for number, index in enumerate(settings.optimizer_steps(facts.group, step)):
        totals = facts.totals(index)
        mini = ready(batch.rows(index), policy, objective, settings, totals)
        observe_correction(meter, mini)
        counts = True
        if settings.skips_rows(objective):
            # A row that only stands for a step without any may have no old_logp to be held against.
            counts = facts.any_useful(index)
            useful = facts.with_gradient(index)
            mini, index = mini.rows(useful), index[useful]
        losses.append([])
        for rows in micro_batches(mini, settings.micro_batch_tokens):
            micro = mini.rows(rows)
            output, now = _backward(policy, objective, micro)
            losses[-1].append(output.loss)
            if counts:
                observe(meter, objective, micro, output, now.entropy)
            if number == 0:
                observe_sampler(meter, micro, now.logp)
            if watch is not None:
                watch(Seen(number=number, rows=index[rows], micro=micro, now=now))
        rate = settings.learning_rate(policy.version)
        stepped = policy.step(rate)
        if reference is not None:
            reference.after_step(policy)
        skipped += stepped.skipped
        if not stepped.skipped:
            meter.add("optim/grad_norm", stepped.grad_norm)
    for loss in _sums(losses):
        meter.add("loss/policy_avg", loss)
    return {**summary(meter), "lr": rate, "optim/skipped": skipped}


def _sums(losses: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    """Add up the losses of each optimizer step, when the device has done its work anyway."""
    values = iter(torch.stack([part for parts in losses for part in parts]).tolist())
    return [math.fsum(next(values) for _ in parts) for parts in losses]


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


def ready(
    mini: Batch,
    policy: Policy,
    objective: Objective,
    settings: UpdateSettings,
    totals: Totals | None = None,
) -> Batch:
    """Fill in what is taken over one optimizer step; `totals` are counted if nobody did."""
    mini = with_weight(objective, mini, totals)
    if objective.marks is None:
        return mini
    with torch.no_grad():
        now = whole_batch(mini, settings.micro_batch_tokens, policy.logp)
    return with_marks(objective, mini, now.logp)
