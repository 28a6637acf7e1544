"""A training step, from groups to updated weights:

    groups -> collate -> old_logp, ref_logp -> advantage -> masks -> mini-batches -> weights
           -> row filter -> micro-batches -> loss -> backward -> optimizer step -> metrics

With the row filter (filter.skip_zero_gradient), advantages that do not need old_logp are computed
first, so that rows without advantage need no old_logp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from covey.accel.packing import to_device
from covey.models.logp import LogProbs
from covey.objective import (
    Objective,
    PolicyLoss,
    next_beta,
    policy_loss,
    with_advantage,
    with_marks,
    with_weight,
)
from covey.objective.diagnostics import (
    Meter,
    observe,
    observe_correction,
    observe_reference,
    observe_sampler,
)
from covey.reference import Reference
from covey.rng import dropout_seed, mini_batch_order
from covey.rollout.filter import without_truncated
from covey.training.collate import collate
from covey.training.finite_checks import check_finite
from covey.training.parallel.passes import rank_passes, without_weight
from covey.training.parallel.world import World
from covey.training.policy import Policy
from covey.types import Batch, Group, Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings that turn a batch into optimizer steps."""

    mini_batches: int
    epochs: int
    micro_batch_tokens: int
    old_logp_from_sampler: bool
    learning_rate: Callable[[int], float]
    """Learning rate as a function of the policy's version, its number of optimizer steps."""
    seed: int
    dropout: bool = False
    """Whether training passes draw random numbers."""
    skip_zero_gradient: bool = False
    """Leave rows without advantage out of forward passes if they have no gradient."""
    mask_truncated: bool = False
    stale: bool = False
    """Whether rollouts may come from older weights than those at the start of the step."""

    @property
    def off_policy(self) -> bool:
        """Whether some optimizer step starts from other weights than those that generated."""
        return self.stale or self.mini_batches * self.epochs > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """The policy, objective, references and settings of a training step."""

    policy: Policy
    objective: Objective
    """The objective, with the beta of this step."""
    settings: StepSettings
    reference: Reference | None = None
    teacher: Reference | None = None
    """The teacher of a distillation."""
    world: World = field(default_factory=World)

    @property
    def skips_rows(self) -> bool:
        """Whether the row filter is on. It cannot be if a KL or entropy term has a gradient."""
        return self.settings.skip_zero_gradient and self.objective.only_surrogate


class Learned(NamedTuple):
    """The result of a training step."""

    batch: Batch | None
    """The batch of the step. None if there were no groups."""
    metrics: dict[str, float]
    beta: float
    """The beta of the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One forward and backward pass, reported to a caller that watches the step."""

    number: int
    """Number of the optimizer step in the batch, from 0."""
    rows: torch.Tensor
    """Indices of the rows in the batch."""
    micro: Batch
    """These rows, with their weights."""
    now: LogProbs
    """Log-probs under the policy before the optimizer step, without gradients."""


Watch = Callable[[Seen], None]


def training_step(
    learner: Learner, groups: Sequence[Group], step: int, watch: Watch | None = None
) -> Learned:
    """Take the optimizer steps of training step number `step`."""
    objective = learner.objective
    if not groups:
        return Learned(None, {}, objective.beta)
    batch = filled_batch(learner, groups, step)
    metrics = optimize(learner, batch, step, watch)
    beta = objective.beta
    if "reference" in objective.needs:
        metrics["objective/beta"] = beta
        kl = _mean_kl(objective, batch, metrics)
        if math.isfinite(kl):
            beta = next_beta(objective, kl, rollouts=sum(len(g.rollouts) for g in groups))
    return Learned(batch, metrics, beta)


def filled_batch(learner: Learner, groups: Sequence[Group], step: int) -> Batch:
    """Collate groups, and fill in all fields that are computed over the whole batch."""
    batch = collate(groups, learner.policy.model.device, parts_read(learner.objective))
    reads_old_policy = learner.objective.needs & {"old_logp", "old_entropy"}
    advantage_first = learner.skips_rows and not reads_old_policy
    if advantage_first:
        batch = with_advantage(learner.objective, batch)
    batch = prepare(learner, batch)
    check_finite(batch, step)
    if not advantage_first:
        batch = with_advantage(learner.objective, batch)
    return without_truncated(batch) if learner.settings.mask_truncated else batch


def parts_read(objective: Objective) -> tuple[str, ...] | None:
    """Return the names of the reward parts to collate, or None if the objective uses none."""
    return objective.parts if "parts" in objective.needs else None


@torch.no_grad()
def prepare(learner: Learner, batch: Batch) -> Batch:
    """Fill in old_logp, entropy, ref_logp and teacher_logp, each only if it is needed."""
    needs, settings = learner.objective.needs, learner.settings
    to_sampler = "sampler_as_old" in needs
    wanted = settings.off_policy or "old_logp" in needs
    from_sampler = to_sampler or (wanted and settings.old_logp_from_sampler)
    if "old_entropy" in needs or (wanted and not from_sampler):
        batch = _with_old_policy(learner, batch)
    if to_sampler or (from_sampler and "old_entropy" not in needs):
        batch = replace(batch, old_logp=batch.sampler_logp)
    if "reference" in needs:
        batch = replace(batch, ref_logp=_logp_under(learner.reference, learner, batch))
    if "teacher" in needs:
        batch = replace(batch, teacher_logp=_logp_under(learner.teacher, learner, batch))
    return batch


def _logp_under(model: Reference | None, learner: Learner, batch: Batch) -> torch.Tensor:
    assert model is not None, "an objective that needs a reference or a teacher is given one"
    tokens = learner.settings.micro_batch_tokens
    with model.loaded():
        return whole_batch(batch, tokens, model.logp, learner.world).logp


def _with_old_policy(learner: Learner, batch: Batch) -> Batch:
    """Fill in old_logp and entropy, without the entropy of rows that the filter leaves out."""
    tokens, logp = learner.settings.micro_batch_tokens, learner.policy.logp
    if batch.advantage is None or not learner.skips_rows:
        old = whole_batch(batch, tokens, logp, learner.world)
        return replace(batch, old_logp=old.logp, entropy=old.entropy)
    useful = RowFacts.of(batch, skip=True).in_passes(torch.arange(len(batch)))
    old = whole_batch(batch.rows(useful), tokens, logp, learner.world)
    (rows,) = to_device([useful], old.logp.device)
    whole = batch.sampler_logp.float().clone()
    whole[rows, : old.logp.shape[1]] = old.logp
    return replace(batch, old_logp=whole)


def whole_batch(
    batch: Batch,
    micro_batch_tokens: int,
    logp: Callable[[Batch], LogProbs],
    world: World = World(),  # noqa: B008 - without state
) -> LogProbs:
    """Run `logp` over micro-batches, and return the rows in their original order.

    Exactly one rank computes each row, so that the sum over ranks is exact.
    """
    whole = torch.zeros((2, *batch.tokens.shape), device=batch.tokens.device)
    for index, counts in rank_passes(batch, micro_batch_tokens, world):
        part = logp(batch.rows(index))
        if counts:
            (rows,) = to_device([index], whole.device)
            for target, values in zip(whole, part, strict=True):
                target[rows, : values.shape[1]] = values.float()
    world.sum_in_place(whole)
    return LogProbs(*whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Facts about the rows of a batch that optimizer steps need, each [B] on the CPU.

    Reading from a device waits for all the work that is queued there. So these facts are read once,
    before the first optimizer step, and the CPU then chooses the rows of each step.
    """

    group: torch.Tensor
    rollout: torch.Tensor
    tokens: torch.Tensor
    """Number of trained tokens."""
    useful: torch.Tensor
    """bool: whether the row takes part in forward passes. Without the row filter, all rows do; with
    it, only rows in which some trained token has an advantage."""
    one_row_each: bool
    """Whether every rollout is one row."""

    @staticmethod
    def of(batch: Batch, *, skip: bool) -> RowFacts:
        """Read them from a batch with advantages; `skip` turns the row filter on."""
        assert batch.advantage is not None, "with_advantage comes first"
        useful = ((batch.advantage != 0) & batch.mask).any(dim=1).long()
        whole = torch.stack([batch.group, batch.mask.sum(dim=1), useful]).cpu()
        rollout = batch.rollout if batch.host is None else batch.host.rollout
        number = torch.arange(len(batch)) if rollout is None else rollout
        # Passes include all rows of a rollout or none, because its ratio may depend on all.
        some = torch.isin(number, number[whole[2].bool()])
        return RowFacts(
            group=whole[0],
            rollout=number,
            tokens=whole[1],
            useful=some if skip else torch.ones(len(batch), dtype=torch.bool),
            one_row_each=batch.one_row_each,
        )

    def totals(self, index: torch.Tensor) -> Totals:
        """Count the given rows."""
        rollout = None if self.one_row_each else self.rollout[index]
        return Totals.counted(self.group[index], self.tokens[index], rollout)

    def in_passes(self, index: torch.Tensor) -> torch.Tensor:
        """Return the given rows that take part in forward passes.

        Weights are already fixed, so the gradient is the same without the other rows. At least one
        row stays, so that there is a gradient, even if it is zero.
        """
        useful = self.useful[index].clone()
        useful[0] |= ~useful.any()
        return useful.nonzero().squeeze(1)

    def mini_batches(self, settings: StepSettings, step: int) -> Iterator[torch.Tensor]:
        """Yield the rows of each optimizer step.

        The rows of a rollout stay together, and so do groups if the sizes allow it.
        """
        groups, place = self.group.unique(return_inverse=True)
        by_rollout = self.rollout.argsort(stable=True)
        for epoch in range(settings.epochs):
            order = mini_batch_order(seed=settings.seed, step=step, epoch=epoch, groups=len(groups))
            rank = torch.empty_like(groups)
            rank[torch.tensor(order)] = torch.arange(len(groups))
            rows = by_rollout[rank[place[by_rollout]].argsort(stable=True)]
            _, sizes = self.rollout[rows].unique_consecutive(return_counts=True)
            counts = [int(part.sum()) for part in sizes.tensor_split(settings.mini_batches)]
            yield from (part for part in rows.split(counts) if len(part))


def optimize(
    learner: Learner, batch: Batch, step: int, watch: Watch | None = None
) -> dict[str, float]:
    """Take every optimizer step on a filled batch, and return the metrics of the training step."""
    policy, objective, settings = learner.policy, learner.objective, learner.settings
    world = learner.world
    meter, facts = Meter(), RowFacts.of(batch, skip=learner.skips_rows)
    policy.model.model.train()
    losses: list[list[torch.Tensor]] = []
    skipped = 0
    for number, index in enumerate(facts.mini_batches(settings, step)):
        mini = filled_mini_batch(learner, batch.rows(index), facts.totals(index))
        if world.is_main:
            observe_correction(meter, mini)
        kept = facts.in_passes(index)
        mini, index = mini.rows(kept), index[kept]
        # A placeholder row of a step without rows may have no old_logp to compare with.
        counts = bool(facts.useful[index].any())
        losses.append([])
        for rows, micro, output, now in backward_passes(learner, mini):
            losses[-1].append(output.loss)
            if counts:
                observe(meter, objective, micro, output, now.entropy)
                observe_reference(meter, micro, now.logp)
            meter.add("other/packed_ratio", 1 if policy.model.packs else len(micro), len(micro))
            if number == 0:
                observe_sampler(meter, micro, now.logp)
            if watch is not None:
                watch(Seen(number=number, rows=index[rows], micro=micro, now=now))
        rate = settings.learning_rate(policy.version)
        stepped = policy.step(rate)
        if learner.reference is not None:
            learner.reference.after_step(policy)
        skipped += stepped.skipped
        if not stepped.skipped and world.is_main:
            meter.add("optim/grad_norm", stepped.grad_norm)
    for loss in _sums(losses):
        # Each rank has a part of the loss of an optimizer step.
        meter.add("loss/policy_avg", loss, count=float(world.is_main))
    return {**world.mean(meter), "lr": rate, "optim/skipped": skipped}


def backward_passes(
    learner: Learner, mini: Batch
) -> Iterator[tuple[torch.Tensor, Batch, PolicyLoss, LogProbs]]:
    """Add the gradient of this rank's rows; yield each micro-batch with its loss and `logp`."""
    passes = rank_passes(mini, learner.settings.micro_batch_tokens, learner.world)
    for place, (rows, counts) in enumerate(passes, start=1):
        micro = mini.rows(rows) if counts else without_weight(mini.rows(rows))
        if place == len(passes):
            learner.policy.expect_last_pass()
        if learner.settings.dropout:
            address = {"version": learner.policy.version, "rank": learner.world.rank}
            torch.manual_seed(dropout_seed(seed=learner.settings.seed, place=place, **address))
        output, now = _backward(learner.policy, learner.objective, micro)
        if counts:
            yield rows, micro, output, now


def filled_mini_batch(learner: Learner, mini: Batch, totals: Totals) -> Batch:
    """Fill in the fields that are computed over one optimizer step."""
    mini = with_weight(learner.objective, mini, totals)
    if learner.objective.marks is None:
        return mini
    with torch.no_grad():
        tokens, logp = learner.settings.micro_batch_tokens, learner.policy.logp
        now = whole_batch(mini, tokens, logp, learner.world)
    return with_marks(learner.objective, mini, now.logp)


def _backward(policy: Policy, objective: Objective, micro: Batch) -> tuple[PolicyLoss, LogProbs]:
    """Add the gradient of some rows; return loss and log-probabilities without autograd's graph.

    While that graph exists, parameters stay tied to its CUDA stream, and a pass cannot be captured
    on another stream.
    """
    now = policy.logp(micro)
    output = policy_loss(objective, micro, now.logp, now.entropy)
    output.loss.backward()
    values = LogProbs(*(v.detach() for v in now))
    return output._replace(loss=output.loss.detach()), values


def _sums(losses: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    """Add up the losses of each optimizer step, and read them from the device once."""
    flat = [part for parts in losses for part in parts]
    values = iter(torch.stack(flat).tolist() if flat else ())
    return [math.fsum(next(values) for _ in parts) for parts in losses]


def _mean_kl(objective: Objective, batch: Batch, metrics: Mapping[str, float]) -> float:
    """Return the mean KL of a step; NaN if every token is masked or a pass was not finite.

    If the KL is in the reward, the metrics may not include the rows that the filter left out.
    """
    if batch.token_penalty is None or not batch.mask.any():
        return metrics.get("objective/kl_avg", math.nan)
    return float(batch.token_penalty[batch.mask].mean()) / objective.beta
