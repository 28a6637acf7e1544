"""Measures the log-prob differences between engine and trainer, separately for each cause.

    total        trainer's logp                     - sampler_logp
    precision    trainer                            - the same in float32
    micro_batch  trainer, in micro-batches          - each completion alone
    slots        engine, one slot                   - many slots
    float8       engine, in the model's precision   - with float8 numbers, if it has any
    truncation   log-prob of the whole distribution - of the truncated one
    kernel       trainer, alone                     - engine, one slot, not truncated, no float8
    staleness    trainer, after optimizer steps     - before

Except for the total, each line of the report compares two computations that differ in only one
aspect. The differences in the lines do not add up to the total, because rounding errors partly
cancel and because the total excludes staleness.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import torch

from covey.accel.sizes import chunk_rows
from covey.collate import collate
from covey.config import Config
from covey.engines.draw import Distribution, log_distribution
from covey.engines.make import native_engine
from covey.engines.protocol import Engine
from covey.models.device import skip_determinism_check
from covey.models.language_model import LanguageModel
from covey.models.logp import LogProbs, batch_logp, padded_hidden
from covey.objective.masked import bounded, row_mean
from covey.objective.options import function_of
from covey.objective.ratio import PER_SEQUENCE, Ratio, one, token
from covey.objective.surrogate import geometric_clipped, trust_mask
from covey.parallel.passes import whole_batch
from covey.policy.policy import Policy
from covey.records.trackers import Tracker
from covey.rollout.collect import collect_step
from covey.rollout.episode import encode_prompts, generate
from covey.run import Run
from covey.step import filled_batch, optimize
from covey.types import Batch, Group, Rollout

# Statistics of differences in log-prob and of the resulting importance ratios.


HARMLESS = (0.999, 0.0, 0.001)
"""Limits within which log-prob differences count as "harmless". The limits are the smallest
effective sample size, the largest fraction of ratios outside the clip range, and the largest
distance of the mean ratio from 1."""
SMALL = (0.95, 0.01, 0.05)
"""Limits within which log-prob differences count as "small", in the same order as in HARMLESS.
Differences outside of the limits SMALL have the severity "matters"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """The range of ratios that an objective does not clip."""

    low: float
    high: float
    ratio: Ratio = token
    """The objective's function that converts log-prob differences to log ratios."""

    @property
    def per_completion(self) -> bool:
        return self.ratio in PER_SEQUENCE

    def row(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "per_completion": self.per_completion}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Statistics of the log-prob differences of all tokens, and of the importance ratios."""

    tokens: int
    mean: float
    """Mean absolute difference, in nats."""
    p99: float
    """99th percentile of the absolute difference, in nats."""
    max: float
    ratio_mean: float
    """Mean of exp(difference)."""
    outside: float
    """The fraction of ratios outside the clip range."""
    effective: float
    """Relative effective sample size, `(sum of ratios)^2 / (count * sum of squared ratios)`."""

    @property
    def severity(self) -> str:
        """The severity of the log-prob differences, either `harmless`, `small` or `matters`."""
        for name, (effective, outside, away) in (("harmless", HARMLESS), ("small", SMALL)):
            inside = self.outside <= outside and abs(self.ratio_mean - 1.0) <= away
            if self.effective >= effective and inside:
                return name
        return "matters"


def gap_of(difference: torch.Tensor, mask: torch.Tensor, clip: ClipRange) -> Gap:
    """Return statistics of the log-prob differences [B, T] of the tokens in `mask`."""
    difference = difference.double().where(mask, 0.0)
    sizes = difference[mask].abs().sort().values
    if not len(sizes):
        return Gap(tokens=0, mean=0.0, p99=0.0, max=0.0, ratio_mean=1.0, outside=0.0, effective=1.0)
    log_ratio = clip.ratio(difference, mask)
    sequences = row_mean(log_ratio, mask)[mask.any(dim=1)]
    ratio = bounded(sequences if clip.per_completion else log_ratio[mask]).exp()
    outside = (ratio < clip.low) | (ratio > clip.high)
    return Gap(
        tokens=len(sizes),
        mean=float(sizes.mean()),
        p99=float(sizes[math.ceil(0.99 * len(sizes)) - 1]),
        max=float(sizes[-1]),
        ratio_mean=float(ratio.mean()),
        outside=float(outside.double().mean()),
        effective=float(ratio.sum().square() / (len(ratio) * ratio.square().sum())),
    )


ALONE = 16
CLIP = 0.2
"""The assumed `clip_low` and `clip_high` of an objective without a clip range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All measurements of `covey numerics`."""

    model: str
    device: str
    dtype: str
    completions: int
    alone: int
    """The number of completions that were also generated one at a time."""
    diverged: int
    """The number of completions whose tokens changed when they were generated one at a time."""
    clip: ClipRange
    causes: tuple[Cause, ...]
    notes: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        row = {name: getattr(self, name) for name in self.__slots__}
        lines = [cause.row() for cause in self.causes]
        return row | {"clip": self.clip.row(), "causes": lines, "notes": list(self.notes)}


def measure(run: Run, log: Tracker, *, updates: int, alone: int = ALONE) -> Report:
    """Measure the log-prob differences for each cause, on the rollouts of the next step.

    The measurements change the weights of the policy.
    """
    rollouts = collect_step(run, run.step + 1, log, run.budget.spent(run.used))
    groups = rollouts.selected.groups or rollouts.collected.groups
    clip = clip_range(run)
    most = max(1, alone // len(groups[0].rollouts))
    few = [replace(group, rollouts=group.rollouts[:alone]) for group in groups[:most]]
    policy, budget = run.policy, run.settings.micro_batch_tokens
    batch = collate(groups, policy.model.device)
    now = trainer_logp(policy, batch, budget)
    exact = policy.model.head.linear.weight.dtype in (torch.float32, torch.float64)
    wide = now if exact else wide_logp(policy, batch, budget)
    kept = log_kept(policy, batch, run.sampling.distribution, budget)
    rows = torch.cat([
        torch.arange(len(group.rollouts), device=now.device)
        + sum(len(g.rollouts) for g in groups[:number])
        for number, group in enumerate(few)
    ])  # fmt: skip
    some = batch.rows(rows)
    together = now[rows, : some.tokens.shape[1]]
    solo = _generated_alone(run, run.engine, few, run.step + 1)
    found = {
        TOTAL: gap_of(now - batch.sampler_logp, batch.mask, clip),
        "precision": gap_of(now - wide, batch.mask, clip),
        "micro_batch": gap_of(together - alone_logp(policy, some), some.mask, clip),
        "truncation": gap_of(kept, batch.mask, clip),
        "slots": _prefix_gap(run, solo, few, clip),
    }
    plain = solo
    if run.config.engine.rounds:
        plain = _generated_alone(run, native_engine(run.policy), few, run.step + 1)
        found["float8"] = _prefix_gap(run, plain, solo, clip)
    found["kernel"] = engine_gap(run, plain, alone=True)
    stale, notes = _stale(run, groups, updates, clip)
    if not _clips_ratios(run):
        name = run.config.objective.name
        notes = (*notes, f"outside: {name} has no clip range of ratios; grpo's is used")
    weight = run.policy.model.head.linear.weight
    return Report(
        model=run.config.model.path,
        device=str(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        completions=sum(len(group.rollouts) for group in groups),
        alone=sum(len(group.rollouts) for group in few),
        diverged=sum(a.tokens != b.tokens for a, b in paired(few, solo)),
        clip=clip,
        causes=(*(Cause(name=n, gap=found[n]) for n in CAUSES if n in found), *stale),
        notes=notes,
    )


def clip_range(run: Run) -> ClipRange:
    options = run.config.objective.options if _clips_ratios(run) else {}
    low, high = (float(options.get(name, CLIP)) for name in ("clip_low", "clip_high"))
    bounds, objective = (1.0 - low, 1.0 + high), run.objective
    if function_of(objective.surrogate) is geometric_clipped:  # it clips the logarithm of ratios
        bounds = math.exp(-low), math.exp(high)
    # An objective that assumes ratios of 1 is wrong if token ratios differ from 1.
    ratio = token if objective.ratio is one else objective.ratio
    return ClipRange(low=bounds[0], high=bounds[1], ratio=ratio)


def _clips_ratios(run: Run) -> bool:
    """Whether `clip_low` and `clip_high` limit ratios, and not probabilities as in `trust_mask`."""
    bounded = "clip_low" in run.config.objective.options
    return bounded and function_of(run.objective.surrogate) is not trust_mask


def default_updates(config: Config) -> int:
    """Return the default number of optimizer steps before the measurement of staleness."""
    return max(1, config.train.optimizer_steps - 1)


def _generated_alone(run: Run, engine: Engine, few: Sequence[Group], step: int) -> list[Group]:
    """Generate the completions in `few` again, one at a time, with unchanged random numbers."""
    model = run.policy.model
    return generate(
        encode_prompts(model, [group.prompt for group in few]),
        engine=engine,
        model=model,
        sampling=replace(run.sampling, max_concurrent=1, group_size=len(few[0].rollouts)),
        step=step,
    )


def _prefix_gap(run: Run, one: Sequence[Group], other: Sequence[Group], clip: ClipRange) -> Gap:
    """Compare the engine's log-probs of pairs of rollouts, up to the first different token."""
    first, second = (collate(groups, run.policy.model.device) for groups in (one, other))
    width = min(first.tokens.shape[1], second.tokens.shape[1])
    same = common_prefix(one, other, first)[:, :width]
    return gap_of(first.sampler_logp[:, :width] - second.sampler_logp[:, :width], same, clip)


def engine_gap(run: Run, groups: Sequence[Group], *, alone: bool = False) -> Gap:
    """Compare the trainer's log-probs with the engine's, both of the truncated distribution.

    With `alone`, the trainer computes each completion in a separate batch.
    """
    policy, budget = run.policy, run.settings.micro_batch_tokens
    batch = collate(groups, policy.model.device)
    kept = log_kept(policy, batch, run.sampling.distribution, budget)
    logp = alone_logp(policy, batch) if alone else trainer_logp(policy, batch, budget)
    return gap_of(logp - (batch.sampler_logp + kept), batch.mask, clip_range(run))


def _stale(
    run: Run,
    groups: Sequence[Group],
    updates: int,
    clip: ClipRange,
) -> tuple[list[Cause], tuple[str, ...]]:
    """Take optimizer steps on the rollouts, and measure the log-prob change after each step."""
    policy, peak = run.policy, run.config.optimizer.learning_rate
    settings, notes = replace(run.settings, mini_batches=1, epochs=1), tuple[str, ...]()
    if peak and run.settings.learning_rate(policy.version, run.used) <= 0:
        # With a rate that has decayed to 0, no weight would change.
        settings = replace(settings, learning_rate=lambda version, start: peak)
        what = f"the schedule has reached a rate of 0; these steps used its peak, {peak:g}"
        notes = (f"staleness: {what}",)
    once = replace(run, settings=settings)
    twice = replace(once, settings=replace(once.settings, epochs=2))
    batch = filled_batch(twice, groups, run.step)
    tokens = once.settings.micro_batch_tokens
    before = trainer_logp(policy, batch, tokens)
    found = []
    for number in range(updates + 1):
        if number:
            optimize(once, batch, run.step + 1)
        after = trainer_logp(policy, batch, tokens)
        gap = gap_of(after - before, batch.mask, clip)
        found.append(Cause(name="staleness", gap=gap, updates=number))
    # A penalty or an entropy bonus may still move the policy.
    still = once.objective.only_surrogate or found[-1].gap.max == 0
    assert batch.advantage is not None, "set with the batch"
    if still and not bool(((batch.advantage != 0) & batch.mask).any()):
        notes += (
            "staleness: no trained token has an advantage, so these steps changed nothing; "
            "other rollouts change more",
        )
    return (found[1:] or found), notes if updates else ()


# Causes of differences between the log-probs of engine and trainer, and their remedies.


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Title, description and advice for one cause of log-prob differences in the report."""

    title: str
    what: str
    advice: str


TOTAL = "total"
CAUSES: Mapping[str, Words] = MappingProxyType(
    {
        TOTAL: Words(
            title="engine against trainer",
            what="the trainer's logp minus sampler_logp, before any optimizer step: a run logs "
            "it as debug/sampler_logp_diff_* and debug/rho_*",
            advice="see the causes below; objective.correction corrects for all causes at once",
        ),
        "precision": Words(
            title="precision",
            what="the trainer's forward pass, against the same weights in float32",
            advice='model.dtype = "float32" removes this difference, at twice the memory of '
            "weights and activations",
        ),
        "micro_batch": Words(
            title="batch shape, trainer",
            what="completions in their micro-batch, against each alone: matrix products of other "
            "shapes sum in another order",
            advice="this is rounding without bias; train.micro_batch_tokens changes it, and "
            'model.dtype = "float32" reduces it to about 1e-6',
        ),
        "slots": Words(
            title="batch shape, engine",
            what="completions generated one at a time, against engine.max_concurrent at a time; up "
            "to the token where rounding makes them diverge",
            advice="this is rounding without bias; many slots do no harm",
        ),
        "float8": Words(
            title="float8",
            what="the engine in the model's precision, against the engine with float8 numbers; up "
            "to the token where rounding makes them diverge",
            advice='objective.correction corrects for this difference; engine.dtype = "model" '
            "removes it",
        ),
        "truncation": Words(
            title="truncation",
            what="the distribution truncated by top-k, top-p and min-p, against the full "
            "distribution",
            advice="rollout.top_p = 1, top_k = 0 and min_p = 0 remove this difference; higher "
            "precision does not. It is a bias: the engine never generates the truncated tokens",
        ),
        "kernel": Words(
            title="kernel",
            what="the engine's decoder against the trainer's forward pass: one completion, the "
            "same precision, no truncation",
            advice="in bfloat16, this difference is about as large as that of precision, because "
            'engine and trainer round at different places; model.dtype = "float32" reduces it to '
            "about 1e-6. If it is above 1e-4 in float32, please report a bug",
        ),
        "staleness": Words(
            title="staleness",
            what="log-probs after optimizer steps on these completions, against before",
            advice="the effect of training, which the clip limits; fewer train.mini_batches and "
            "train.epochs or a lower optimizer.learning_rate reduce it",
        ),
    }
)
"""The causes of log-prob differences, in the order of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A line of the report: a cause of log-prob differences, and the size of the differences."""

    name: str
    gap: Gap
    updates: int = 0
    """For staleness, the number of optimizer steps before the measurement; otherwise 0."""

    @property
    def title(self) -> str:
        words = CAUSES[self.name].title
        if self.name != "staleness":
            return words
        return f"{words}, {self.updates} optimizer step{'' if self.updates == 1 else 's'}"

    def row(self) -> dict[str, Any]:
        numbers = {name: getattr(self.gap, name) for name in Gap.__slots__}
        words = CAUSES[self.name]
        return {
            "cause": self.name, "title": self.title, "updates": self.updates, **numbers,
            "severity": self.gap.severity, "what": words.what, "advice": words.advice,
        }  # fmt: skip


# Computes variants of log-probs: different batch shapes, float32, and truncated sampling.


SORTED_COPIES = 4
"""The number of tensors that truncated sampling needs: sorted values, indices, cumulative sums, and
a mask."""


@torch.no_grad()
def trainer_logp(policy: Policy, batch: Batch, micro_batch_tokens: int) -> torch.Tensor:
    """Return the trainer's log-probs of a batch, computed in the trainer's micro-batches.

    CUDA graphs are off, because the padding of a graph depends on earlier batches.
    """
    return whole_batch(batch, micro_batch_tokens, policy.plain_logp).logp


@torch.no_grad()
def alone_logp(policy: Policy, batch: Batch) -> torch.Tensor:
    """Return the trainer's log-probs, with each completion in a separate batch."""
    # A limit of one token puts each row into a separate micro-batch.
    return whole_batch(batch, 1, policy.plain_logp).logp


@torch.no_grad()
def wide_logp(policy: Policy, batch: Batch, micro_batch_tokens: int) -> torch.Tensor:
    """Return the log-probs of a batch, computed in float32 from the model's weights."""
    wide = upcast(policy.model)

    def logp(rows: Batch) -> LogProbs:
        return batch_logp(
            wide, rows, temperature=policy.temperature, logits_megabytes=policy.logits_megabytes
        )

    return whole_batch(batch, micro_batch_tokens, logp).logp


def upcast(model: LanguageModel) -> LanguageModel:
    """Return a float32 copy of a model, with the same values of the weights."""
    names = {id(module): name for name, module in model.model.named_modules()}
    copied = copy.deepcopy(model.model).float()
    head = replace(model.head, linear=copied.get_submodule(names[id(model.head.linear)]))
    # Flash kernels need half precision, so the copy uses the model's own forward pass.
    return replace(model, model=copied, head=head, flash=False, fused=False)


@torch.no_grad()
@skip_determinism_check()
def log_kept(
    policy: Policy, batch: Batch, distribution: Distribution, micro_batch_tokens: int
) -> torch.Tensor:
    """Return the log of the probability mass that truncation keeps at each position, as [B, T].

    The engine's `sampler_logp` is the log-prob of the token without truncation minus the log of the
    kept mass. The kept mass does not depend on which token was sampled, so its log is finite even
    if rounding errors make truncation remove the sampled token.
    """
    if not distribution.truncates:
        return torch.zeros_like(batch.sampler_logp)
    whole = replace(distribution, top_k=0, top_p=1.0, min_p=0.0)
    chunk = chunk_rows(
        len(policy.model.head.linear.weight), policy.logits_megabytes / SORTED_COPIES
    )

    def kept(rows: Batch) -> LogProbs:
        hidden, predictor = padded_hidden(policy.model, rows)
        chosen, mass = predictor[rows.mask], []
        for at in range(0, len(chosen), chunk):
            logits = policy.model.head.logits(hidden.index_select(0, chosen[at : at + chunk]))
            stays = log_distribution(logits, distribution) > -torch.inf
            mass.append(log_distribution(logits, whole).exp().where(stays, 0.0).sum(dim=-1))
        blank = torch.zeros_like(rows.sampler_logp)
        found = blank.masked_scatter(rows.mask, torch.cat(mass).log().clamp(max=0.0))
        return LogProbs(logp=found, entropy=blank)

    return whole_batch(batch, micro_batch_tokens, kept).logp


def paired(one: Sequence[Group], other: Sequence[Group]) -> list[tuple[Rollout, Rollout]]:
    groups = zip(one, other, strict=True)
    return [pair for a, b in groups for pair in zip(a.rollouts, b.rollouts, strict=True)]


def common_prefix(one: Sequence[Group], other: Sequence[Group], like: Batch) -> torch.Tensor:
    """Return a mask [B, T] of the tokens before the point where the rollouts of a pair differ."""
    mask = torch.zeros_like(like.mask)
    for row, (a, b) in enumerate(paired(one, other)):
        tokens = zip(a.tokens, b.tokens, strict=False)
        mask[row, : sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], tokens))] = True
    return mask
