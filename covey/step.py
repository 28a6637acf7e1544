"""A training step, from groups of rollouts to updated weights:

    groups -> collate -> old_logp, ref_logp -> advantage -> masks -> mini-batches -> weights
           -> row filter -> micro-batches -> loss -> backward -> optimizer step -> metrics

The row filter (`filter.skip_zero_gradient`) leaves out batch rows with advantage 0. If the row
filter is on and the objective allows it, Covey computes advantages before `old_logp`. The rows that
the filter leaves out need no `old_logp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from covey.collate import collate
from covey.errors import ModelError
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
    observe_pairs,
    observe_reference,
    observe_sampler,
)
from covey.objective.loss import counted_rows
from covey.parallel.passes import in_passes, put_rows, training_passes, whole_batch
from covey.policy.critic import critic_metrics, critic_step
from covey.policy.policy import Policy
from covey.policy.schedule import Used
from covey.rng import mini_batch_order
from covey.rollout.filter import without_truncated
from covey.types import Batch, Group, Totals

if TYPE_CHECKING:
    from covey.reference import Reference
    from covey.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Settings of a training step, which takes one or more optimizer steps on a batch."""

    mini_batches: int = 1
    epochs: int = 1
    micro_batch_tokens: int
    old_logp_from_sampler: bool = False
    old_logp_in_pass: bool = False
    """Whether old_logp comes from the training pass, without a separate forward pass. Taking
    old_logp from the training pass requires a single optimizer step per training step."""
    learning_rate: Callable[[int, Used], float]
    """A function that returns the learning rate, usually a `Schedule`. The function's arguments are
    the number of optimizer steps so far, and the run's progress at the start of the training step.
    """
    seed: int = 0
    skip_zero_gradient: bool = False
    """Whether forward passes skip rows with advantage 0 when the objective allows it."""
    mask_truncated: bool = False
    sampled: bool = True
    """Whether an engine sampled the rollouts, so that their sampler_logp is valid."""
    stale: bool = False
    """Whether some rollouts may be stale, that is, sampled by weights of an earlier step."""

    @property
    def off_policy(self) -> bool:
        """Whether the policy may differ from the sampling policy at some optimizer step."""
        return self.stale or self.mini_batches * self.epochs > 1


class Learned(NamedTuple):
    """The result of a training step."""

    batch: Batch | None
    """The batch of the step; None if the step had no groups."""
    metrics: dict[str, float]
    beta: float
    """The KL weight beta of the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The data of one forward and backward pass, for a callback that observes the training step."""

    number: int
    """Index of the optimizer step within the training step, from 0."""
    rows: torch.Tensor
    """The batch indices of the rows that this pass processes."""
    micro: Batch
    """The micro-batch: the batch rows with the indices `rows`, and their token weights."""
    now: LogProbs
    """Detached log-probs and entropies, computed before the optimizer step."""


class Observer:
    """Watches a training step; this base class does nothing."""

    def seen(self, one: Seen) -> None:
        """Take the data of a forward and backward pass."""

    def before_step(self, number: int) -> None:
        """Look at the gradient of optimizer step `number`, and leave it as it is."""


UNWATCHED = Observer()


def train_on(
    groups: Sequence[Group], run: Run, step: int, observer: Observer = UNWATCHED
) -> Learned:
    """Train on the groups of step number `step`, with one or more optimizer steps.

    The models of `run` change, and nothing else of it.
    """
    objective = run.objective
    if not groups:
        return Learned(None, {}, objective.beta)
    batch = filled_batch(run, groups, step)
    metrics = optimize(run, batch, step, observer)
    if "privileged" in objective.needs:
        metrics["objective/taught"] = float(_taught_rows(batch).double().mean())
    beta = objective.beta
    if "reference" in objective.needs:
        metrics["objective/beta"] = beta
        kl = _mean_kl(objective, batch, metrics)
        if math.isfinite(kl):
            beta = next_beta(objective, kl, rollouts=sum(len(g.rollouts) for g in groups))
    return Learned(batch, metrics, beta)


def skips_rows(run: Run) -> bool:
    """Return whether forward passes leave out rows with advantage 0.

    A KL or entropy term has a gradient in every row, so then none is left out. Pairwise objectives
    always skip: most of their rows belong to no pair.
    """
    return (run.settings.skip_zero_gradient or run.objective.pairs) and run.objective.only_surrogate


# From groups to a batch with log-probs and advantages.


def filled_batch(run: Run, groups: Sequence[Group], step: int) -> Batch:
    """Collate groups into a batch, and fill in the fields computed over the whole batch."""
    objective = run.objective
    parts = objective.parts if "parts" in objective.needs else None
    batch = collate(groups, run.policy.model.device, parts)
    advantage_first = skips_rows(run) and not objective.needs & {"old_logp", "old_entropy"}
    if advantage_first:
        batch = with_advantage(objective, batch)
    batch = prepare(run, batch)
    check_finite(batch, step)
    return trained_batch(objective, batch, mask_truncated=run.settings.mask_truncated)


def trained_batch(objective: Objective, batch: Batch, *, mask_truncated: bool) -> Batch:
    """Fill in the advantages if they are missing, and mask the tokens that are not trained."""
    batch = only_taught(objective, batch)
    if batch.advantage is None:
        batch = with_advantage(objective, batch)
    return without_truncated(batch) if mask_truncated else batch


@torch.no_grad()
def prepare(run: Run, batch: Batch) -> Batch:
    """Fill in the log-prob, entropy and value fields that the objective needs."""
    needs, settings = run.objective.needs, run.settings
    to_sampler = "sampler_as_old" in needs
    wanted = not settings.old_logp_in_pass and (settings.off_policy or "old_logp" in needs)
    from_sampler = to_sampler or (wanted and settings.old_logp_from_sampler)
    if "old_entropy" in needs or (wanted and not from_sampler):
        old = _log_probs(run, run.policy.logp, batch)
        batch = replace(batch, old_logp=old.logp, entropy=old.entropy)
    if to_sampler or (from_sampler and "old_entropy" not in needs):
        batch = replace(batch, old_logp=batch.sampler_logp)
    if "reference" in needs:
        batch = replace(batch, ref_logp=_logp_under(run.reference, run, batch))
    if "teacher" in needs:
        logp = _self_teacher_logp if "privileged" in needs else _logp_under
        batch = replace(batch, teacher_logp=logp(run.teacher, run, batch))
    if "values" in needs:
        assert run.critic is not None, "an objective with a critic is given one"
        compute, tokens = run.critic.values, settings.micro_batch_tokens
        (values,) = in_passes(batch, tokens, lambda rows: (compute(rows),), run.world)
        batch = replace(batch, values=values)
    return batch


def _logp_under(model: Reference | None, run: Run, batch: Batch) -> torch.Tensor:
    assert model is not None, "an objective that needs a reference or a teacher is given one"
    with model.loaded():
        return _log_probs(run, model.logp, batch).logp


def _log_probs(run: Run, compute: Callable[[Batch], LogProbs], batch: Batch) -> LogProbs:
    """Compute the log-probs and entropies of a batch.

    If the batch already has advantages, rows that the row filter leaves out skip the forward pass.
    The skipped rows get `sampler_logp` as log-probs, and 0 as entropy.
    """
    tokens, world = run.settings.micro_batch_tokens, run.world
    if batch.advantage is None or not skips_rows(run):
        return whole_batch(batch, tokens, compute, world)
    # The optimizer steps may have fewer rows, because masks are applied after the advantages.
    useful = RowFacts.of(batch, skip=True).in_passes(torch.arange(len(batch)))
    found = whole_batch(batch.rows(useful), tokens, compute, world)
    logp = batch.sampler_logp.float().clone()
    filled = LogProbs(logp, torch.zeros_like(logp))
    put_rows(filled, useful, found)
    return filled


# Self-distillation: the policy is its own teacher, with privileged text in the teacher's prompt.
#
# Each rollout may have a teacher prompt (rollout/privileged.py). The teacher sees the teacher
# prompt instead of the rollout's prompt, followed by the rollout's tokens.


def _self_teacher_logp(teacher: Reference | None, run: Run, batch: Batch) -> torch.Tensor:
    """Return the log-probs under the teacher, given the teacher prompts.

    Rows without a teacher prompt get the policy's old_logp, so the teacher has no effect on them.
    """
    assert batch.old_logp is not None, "a self-teacher is compared with old_logp"
    logp = batch.old_logp.float().clone()
    index = _taught_rows(batch).nonzero().squeeze(1)
    if len(index):
        found = _logp_under(teacher, run, batch.rows(index).as_teacher_reads())
        put_rows([logp], index, [found])
    return logp


def only_taught(objective: Objective, batch: Batch) -> Batch:
    """Mask rows that have no teacher prompt, if the objective learns only from the teacher."""
    if "privileged" not in objective.needs or "groups" in objective.needs:
        return batch
    return replace(batch, mask=batch.mask & _taught_rows(batch).to(batch.mask.device)[:, None])


def _taught_rows(batch: Batch) -> torch.Tensor:
    """Return a bool mask [B] on the CPU that marks the rows with a teacher prompt."""
    if batch.teacher_prompts is None:
        return torch.zeros(len(batch), dtype=torch.bool)
    return batch.teacher_prompts.lengths > 0


# Checks for log-probabilities that are not finite, before a step trains on them.
#
# Probability ratios and penalties are clamped, and the gradient of a clamp is 0 for NaN. A NaN in
# ref_logp would silently remove the KL penalty of its token. A NaN in the log-probs of the
# sampling policy would remove its token from the loss. So every batch is checked before a step
# trains on it.

CAUSES = {
    "ref_logp": (
        "the reference",
        "check the weights and the dtype of the reference (reference.kind), or set objective.beta "
        "= 0 to train without a reference",
    ),
    "teacher_logp": (
        "the teacher",
        "check the weights of the teacher (teacher.path) and model.dtype",
    ),
    "old_logp": (
        "the policy",
        "check the weights and model.dtype; if earlier steps were finite, lower "
        "optimizer.learning_rate and resume from an earlier checkpoint",
    ),
}
"""Maps each batch field with log-probs to a pair: the component that computes the field, and advice
for the user if a value is not finite."""


def check_finite(batch: Batch, step: int) -> None:
    """Raise ModelError if a log-prob of a trained token is NaN or infinite."""
    known = {name: getattr(batch, name) for name in CAUSES}
    known = {name: values for name, values in known.items() if values is not None}
    if not known:
        return
    wrong = [(~values.isfinite() & batch.mask).sum() for values in known.values()]
    *counts, tokens = torch.stack([*wrong, batch.mask.sum()]).tolist()  # one read from the device
    for name, count in zip(known, counts, strict=True):
        if count:
            source, remedy = CAUSES[name]
            raise ModelError(
                f"training stopped at step {step}, because the log-probs of {source} are not "
                f"finite for {count} of {tokens} tokens; {remedy}"
            )


# From a batch to optimizer steps.


def optimize(run: Run, batch: Batch, step: int, observer: Observer = UNWATCHED) -> dict[str, float]:
    """Take all optimizer steps of a training step on a prepared batch, and return the metrics."""
    objective, critic, meter = run.objective, run.critic, Meter()
    facts = RowFacts.of(
        batch,
        skip=skips_rows(run),
        whole_groups=objective.pairs,
        counted=counted_rows(objective, batch),
    )
    more: dict[str, float] = {}
    if objective.pairs:  # rows of groups without a pair have advantage 0, and are left out
        groups, paired = len(facts.group.unique()), len(facts.group[facts.useful].unique())
        more = {"pairs/count": paired, "pairs/ties": groups - paired}
    if critic is not None:  # trained on the same mini-batches as the policy
        for index in facts.mini_batches(run.settings, step):
            critic_step(run, critic, batch.rows(index), facts.totals(index), meter)
        more |= critic_metrics(batch)
    if critic is None or not critic.warms_up(step):
        more |= _train_policy(run, batch, facts, step, meter, observer)
    return {**run.world.mean(meter), **more}


def _train_policy(
    run: Run,
    batch: Batch,
    facts: RowFacts,
    step: int,
    meter: Meter,
    observer: Observer,
) -> dict[str, float]:
    """Take the policy's optimizer steps; return learning rate and number of skipped steps."""
    policy, objective, settings = run.policy, run.objective, run.settings
    losses, skipped, start = list[list[torch.Tensor]](), 0, run.used
    # Observations that are equal on all ranks are counted only on rank 0.
    once = meter if run.world.is_main else Meter()
    if not policy.model.model.training:  # `train` takes 2 ms for 30 layers
        policy.model.model.train()
    for number, index in enumerate(facts.mini_batches(settings, step)):
        mini = with_weight(objective, batch.rows(index), facts.totals(index))
        observe_correction(once, mini)
        kept = facts.in_passes(index)
        mini, index = marked(run, mini.rows(kept)), index[kept]
        observe_pairs(once, objective, mini)
        # If the row filter left only a placeholder row, that row may have no old_logp.
        counts = bool(facts.useful[index].any())
        losses.append([])
        for rows, micro, output, now in backward_passes(run, mini):
            losses[-1].append(output.loss)
            if counts:
                observe(meter, objective, micro, output, now.entropy)
                _observe_kl(meter, settings, micro, now.logp)
            meter.add("other/packed_ratio", 1 if policy.model.packs else len(micro), len(micro))
            if number == 0 and settings.sampled:
                observe_sampler(meter, micro, now.logp)
            observer.seen(Seen(number=number, rows=index[rows], micro=micro, now=now))
        observer.before_step(number)
        rate = settings.learning_rate(policy.version, start)
        stepped = policy.step(rate)
        for other in run.references:
            other.after_step(policy.version, policy.optimizer.masters)
        skipped += stepped.skipped
        if not stepped.skipped:
            once.add("optim/grad_norm", stepped.grad_norm)
    for loss in _sums(losses):
        # Each rank has computed only a part of an optimizer step's loss.
        meter.add("loss/policy_avg", loss, count=float(run.world.is_main))
    return {"lr": rate, "optim/skipped": skipped}


def _observe_kl(meter: Meter, settings: StepSettings, micro: Batch, now: torch.Tensor) -> None:
    """Record the KL to the reference of the policy that sampled; `now` is the current logp."""
    if not settings.sampled:
        return
    old_logp = now if micro.old_logp is None else micro.old_logp
    observe_reference(meter, micro, micro.sampler_logp if settings.stale else old_logp)


def marked(run: Run, mini: Batch) -> Batch:
    """Fill in the batch field `marked`, which `objective.marks` computes from the log-probs."""
    if run.objective.marks is None:
        return mini
    with torch.no_grad():
        tokens, logp = run.settings.micro_batch_tokens, run.policy.logp
        now = whole_batch(mini, tokens, logp, run.world)
    return with_marks(run.objective, mini, now.logp)


def backward_passes(
    run: Run, mini: Batch
) -> Iterator[tuple[torch.Tensor, Batch, PolicyLoss, LogProbs]]:
    """Accumulate this rank's gradient; yield each micro-batch with its loss and log-probs."""
    policy, tokens = run.policy, run.settings.micro_batch_tokens
    for (rows, counts), micro in training_passes(policy, mini, tokens, run.world):
        output, now = _backward(policy, run.objective, micro)
        if counts:
            yield rows, micro, output, now


def _backward(policy: Policy, objective: Objective, micro: Batch) -> tuple[PolicyLoss, LogProbs]:
    """Accumulate the gradient of a micro-batch; return its detached loss and log-probabilities.

    Detaching frees the autograd graph. While an autograd graph exists, PyTorch cannot capture a
    CUDA graph on a stream other than the stream of the autograd graph.
    """
    now = policy.logp(micro)
    output = policy_loss(objective, micro, now.logp, now.entropy)
    output.loss.backward()
    values = LogProbs(*(v.detach() for v in now))
    return output._replace(loss=output.loss.detach()), values


def _sums(losses: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    """Return the loss of each optimizer step; all losses are copied from the device at once."""
    flat = [part for parts in losses for part in parts]
    values = iter(torch.stack(flat).tolist() if flat else ())
    return [math.fsum(next(values) for _ in parts) for parts in losses]


def _mean_kl(objective: Objective, batch: Batch, metrics: Mapping[str, float]) -> float:
    """Return the mean KL of a step; NaN if all tokens are masked or a value was not finite.

    If the KL penalty is part of the reward, the mean KL covers the whole batch. The logged KL
    metric covers only the rows that went through the forward pass.
    """
    if batch.token_penalty is None or not batch.mask.any():
        return metrics.get("objective/kl_avg", math.nan)
    return float(batch.token_penalty[batch.mask].mean()) / objective.beta


# Per-row values of a batch on the CPU, for totals, mini-batches and the row filter.


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Per-row values of a batch on the CPU, such as the number of trained tokens.

    Reading a value from a GPU waits for all work that is queued on the GPU. Covey copies the
    per-row values to the CPU once, before the first optimizer step, and then chooses the rows of
    every optimizer step without another wait.
    """

    group: torch.Tensor
    rollout: torch.Tensor
    tokens: torch.Tensor
    """Number of trained tokens in the row."""
    counted: torch.Tensor
    """Whether the row counts in the denominators of the loss (`counted_rows`)."""
    useful: torch.Tensor
    """Whether the row goes through the forward pass. If `filter.skip_zero_gradient` is off, every
    row goes through the forward pass. If `filter.skip_zero_gradient` is on, only rollouts with a
    nonzero advantage at some trained token go through the forward pass."""
    one_row_each: bool
    """Whether every rollout is one row of the batch."""
    whole_groups: bool = False
    """Whether all rollouts of a group must be in the same optimizer step, as pairwise losses
    require."""

    @staticmethod
    def of(
        batch: Batch,
        *,
        skip: bool,
        whole_groups: bool = False,
        counted: torch.Tensor | None = None,
    ) -> RowFacts:
        """Read per-row values; with `skip`, forward passes omit rows with advantage 0."""
        assert batch.advantage is not None, "with_advantage comes first"
        useful = ((batch.advantage != 0) & batch.mask).any(dim=1).long()
        counts = torch.ones_like(useful) if counted is None else counted.long()
        whole = torch.stack([batch.group, batch.mask.sum(dim=1), useful, counts]).cpu()
        rollout = batch.layout.rollout
        number = torch.arange(len(batch)) if rollout is None else rollout
        # Passes include all rows of a rollout or none, because a sequence ratio spans all its rows.
        some = torch.isin(number, number[whole[2].bool()])
        return RowFacts(
            group=whole[0],
            rollout=number,
            tokens=whole[1],
            counted=whole[3].bool(),
            useful=some if skip else torch.ones(len(batch), dtype=torch.bool),
            one_row_each=batch.one_row_each,
            whole_groups=whole_groups,
        )

    def totals(self, index: torch.Tensor) -> Totals:
        """Count the groups, rollouts and trained tokens of those of the given rows that count."""
        index = index[self.counted[index]]
        rollout = None if self.one_row_each else self.rollout[index]
        return Totals.counted(self.group[index], self.tokens[index], rollout)

    def in_passes(self, index: torch.Tensor) -> torch.Tensor:
        """Return the positions in `index` of the rows that go through the forward pass.

        Leaving out rows with advantage 0 does not change the gradient, because these rows have
        gradient 0. Token weights are computed before rows are left out. At least one row always
        goes through the forward pass, so that a gradient exists, even if the gradient is zero.
        """
        useful = self.useful[index].clone()
        useful[0] |= ~useful.any()
        return useful.nonzero().squeeze(1)

    def mini_batches(self, settings: StepSettings, step: int) -> Iterator[torch.Tensor]:
        """Yield the row indices of each mini-batch, one mini-batch per optimizer step.

        A rollout is never split over mini-batches. A group is split only if mini-batches would
        otherwise have unequal sizes.
        """
        groups, place = self.group.unique(return_inverse=True)
        by_rollout = self.rollout.argsort(stable=True)
        for epoch in range(settings.epochs):
            order = mini_batch_order(seed=settings.seed, step=step, epoch=epoch, groups=len(groups))
            rank = torch.empty_like(groups)
            rank[torch.tensor(order)] = torch.arange(len(groups))
            rows = by_rollout[rank[place[by_rollout]].argsort(stable=True)]
            unit = self.group if self.whole_groups else self.rollout
            _, sizes = unit[rows].unique_consecutive(return_counts=True)
            counts = [int(part.sum()) for part in sizes.tensor_split(settings.mini_batches)]
            yield from (part for part in rows.split(counts) if len(part))
