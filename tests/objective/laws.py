"""What the tests of laws share: every algorithm, and random optimizer steps to try them on."""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from covey import functional
from covey.objective import (
    ALGORITHMS,
    Objective,
    build,
    policy_loss,
    with_advantage,
    with_marks,
    with_weight,
)
from covey.objective.correction import CORRECTIONS
from covey.objective.diagnostics import (
    Meter,
    observe,
    observe_correction,
    observe_sampler,
    summary,
)
from covey.objective.penalty import PENALTIES
from covey.types import Batch

# What an algorithm cannot do without, or would not show anything without in steps this small: the
# published share of Clip-Cov and KL-Cov, 2e-4, is one token, and 1 < cov < 5 is often none.
NEEDED: dict[str, dict[str, Any]] = {
    "dr_grpo": {"length": 12},
    "clip_cov": {"share": 0.2, "cov_low": -0.5, "cov_high": 5.0},
    "kl_cov": {"share": 0.2},
    "maxrl": {"length": 12},
    "pkpo": {"length": 12, "k": 2},
    "gfpo": {"keep": 2},
    "bapo": {"target": 0.7},
    "m2po": {"tau": 0.02},
}
# Options that select another formula, so that every law is tried on it too.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo, dual clip": ("grpo", {"dual": 1.6}),
    "dapo, equation 8": ("dapo", {"aggregation": "group_mean_token_mean"}),
    "gpg, by completion": ("gpg", {"aggregation": "sequence_mean_token_mean"}),
    "gtpo, by polarity": ("gtpo", {"norm": "polarity"}),
    "gtpo, over the batch": ("gtpo", {"scope": "batch"}),
    "grpo_s, arithmetic": ("grpo_s", {"mean": "arithmetic"}),
    "grpo_s, over the batch": ("grpo_s", {"scope": "batch"}),
    "reinforce_pp, discounted": ("reinforce_pp", {"gamma": 0.9}),
    "gdpo, gated": ("gdpo", {"part_weights": (1.0, 0.5), "gate": 0}),
    "maxrl, all wrong": ("maxrl", {"all_wrong": "minus_one"}),
    "pkpo, centred": ("pkpo", {"baseline": "centred"}),
    "gfpo, by rate": ("gfpo", {"metric": "rate"}),
    "opd, with a task": ("opd", {"discount": 0.9, "task": 0.5}),
    "ppo, by length": ("ppo", {"alpha": 0.3, "whiten": False, "value_lam": 0.9}),
    "ipo, of sums": ("ipo", {"average": False}),
    "reinforce_pp_baseline, by token": ("reinforce_pp_baseline", {"weighting": "token"}),
}
CASES = {**{name: (name, {}) for name in ALGORITHMS}, **VARIANTS}

# Those whose gain is of whole completions: there `top_entropy` is refused, rather than not obeyed.
OF_ANSWERS = {"gspo", "luspo", "gmpo", "rloo", "grpo_s", "vespo", "dpo", "ipo"}

# Those that compare pairs with the reference: nothing else acts on tokens, ratios or a KL.
OF_PAIRS = {"dpo", "ipo"}
FOR_TOKENS = ("correction", "correction_low", "correction_high", "veto", "off_policy_limit", "kl")

# Those that refuse a KL in the reward (gdpo, opd), or rewards that a KL makes negative.
NO_KL_IN_REWARD = {"gdpo", "maxrl", "gfpo", "opd", "sdpo", *OF_PAIRS}

seeds = st.integers(0, 2**31)


def objective_of(case: str, **options: Any) -> Objective:
    """Build a case of the table above with further options."""
    return _built(case, tuple(sorted(options.items())))


@functools.cache
def _built(case: str, options: tuple[tuple[str, Any], ...]) -> Objective:
    name, own = CASES[case]
    given = dict(options)
    if name in OF_PAIRS and given.get("beta") == 0.0:
        del given["beta"]  # without it there is no loss
    return build(name, **{**NEEDED.get(name, {}), **own, **given})


def has_option(case: str, option: str) -> bool:
    return option in inspect.signature(ALGORITHMS[CASES[case][0]]).parameters


def extras(case: str, *leave_out: str) -> st.SearchStrategy[dict[str, Any]]:
    """Draw options that combine with every algorithm."""
    some = {
        "beta": st.just(0.1),
        "kl": st.sampled_from(sorted(PENALTIES)),
        "kl_in": st.sampled_from(["loss", "reward"]),
        "entropy_bonus": st.just(0.05),
        "top_entropy": st.just(0.6),
        "correction": st.sampled_from(sorted(CORRECTIONS)),
        "correction_low": st.just(0.7),
        "correction_high": st.sampled_from([1.1, 2.0]),
        "veto": st.just(0.6),
        "off_policy_limit": st.just(0.05),
    }
    if CASES[case][0] in OF_ANSWERS:
        del some["top_entropy"]
    if CASES[case][0] in NO_KL_IN_REWARD:
        del some["kl_in"]
    if CASES[case][0] in OF_PAIRS:
        leave_out = (*leave_out, *FOR_TOKENS)
    left = {k: v for k, v in some.items() if k not in leave_out}
    drawn = st.fixed_dictionaries({}, optional=left)
    return drawn.map(_legal)


def _legal(options: dict[str, Any]) -> dict[str, Any]:
    legal = dict(options)
    # The k3 of a whole completion is refused in the reward, where it would count once a token.
    if legal.get("kl") == "k3_sequence":
        legal["kl_in"] = "loss"
    # A divergence of 0, which is agreement, must lie within the bounds.
    if legal.get("correction") == "divergence_mask":
        legal.pop("correction_low", None)
    return legal


class Step(NamedTuple):
    """The rows of one optimizer step, raw, and the log-probabilities of the policy now."""

    batch: Batch
    logp: torch.Tensor


def make_step(
    seed: int, *, rows: int = 10, width: int = 6, groups: int = 3, empty: bool = True
) -> Step:
    """Return a random float64 step, off policy, in which every group has correct and wrong completions.

    Groups are of unequal size and interleaved; completions are ragged, one of them has an untrained
    token in the middle and, with `empty`, one has no trained token at all.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(clip_low: float, clip_high: float, *shape: int) -> torch.Tensor:
        return clip_low + (clip_high - clip_low) * torch.rand(
            *shape, generator=generator, dtype=torch.float64
        )

    def integers(clip_low: int, clip_high: int, *shape: int) -> torch.Tensor:
        return torch.randint(clip_low, clip_high, shape, generator=generator)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    lengths = integers(1, width + 1, rows)
    lengths[0] = width
    mask = torch.arange(width) < lengths[:, None]
    mask[0, width // 2] = False
    if empty:
        mask[rows - 1] = False
    group = torch.cat([torch.arange(groups).repeat(2), integers(0, groups, rows - 2 * groups)])
    rewards = torch.tensor([0.0, 0.3, 1.0, 0.7, 2.5], dtype=torch.float64)[integers(0, 5, rows)]
    rewards[:groups], rewards[groups : 2 * groups] = 1.0, 0.0
    old = uniform(-2.5, -0.5, rows, width)
    # From a generator of its own, so that the other numbers stay as they are.
    other = torch.Generator().manual_seed(seed + 1)
    values = torch.rand(rows, width, generator=other, dtype=torch.float64)
    batch = Batch(
        prompt_tokens=torch.zeros(rows, 1, dtype=torch.long),
        prompt_lengths=torch.ones(rows, dtype=torch.long),
        tokens=integers(0, 3, rows, width),
        lengths=lengths,
        mask=mask,
        sampler_logp=old + normal(0.2),
        rewards=rewards,
        success=rewards > 0.5,
        group=group,
        truncated=torch.zeros(rows, dtype=torch.bool),
        parts=torch.stack([rewards, uniform(0.0, 2.0, rows)], dim=1),
        old_logp=old,
        teacher_logp=old + normal(0.5),
        values=values,
        ref_logp=old + normal(0.4),
        entropy=uniform(0.05, 1.2, rows, width),
    )
    return shuffled(Step(batch, (old + normal(0.3)).clamp(max=-0.01)), seed)


def shuffled(step: Step, seed: int) -> Step:
    order = torch.randperm(len(step.batch), generator=torch.Generator().manual_seed(seed))
    return rows_of(step, order)


def rows_of(step: Step, index: torch.Tensor) -> Step:
    batch = step.batch.rows(index)
    return Step(batch, step.logp[index][:, : batch.mask.shape[1]])


def ready(objective: Objective, step: Step) -> Batch:
    """Fill in all that a loss needs, the rows being the whole step."""
    batch = with_weight(objective, with_advantage(objective, step.batch))
    return with_marks(objective, batch, step.logp)


def descend(
    objective: Objective, batch: Batch, logp: torch.Tensor, meter: Meter | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and its gradient [B, T]; note the metrics if there is a meter."""
    logp = logp.clone().requires_grad_()
    output = policy_loss(objective, batch, logp, batch.entropy)
    # A loss that does not depend on logp at all has no gradient; it is 0.
    (gradient,) = torch.autograd.grad(output.loss, logp, materialize_grads=True)
    if meter is not None:
        observe(meter, objective, batch, output, batch.entropy)
        observe_sampler(meter, batch, logp)
    return output.loss.detach(), gradient


def gradient_of(objective: Objective, step: Step) -> torch.Tensor:
    return descend(objective, ready(objective, step), step.logp)[1]


def preference_loss(
    logp: torch.Tensor,
    ref_logp: torch.Tensor,
    mask: torch.Tensor,
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    form: str = "dpo",
    beta: float = 0.1,
) -> torch.Tensor:
    """Return the loss of given pairs of rows, with sums over tokens; each pair is a group."""
    rows, pairs = torch.cat([chosen, rejected]), torch.arange(len(chosen))
    return functional.loss(
        form, logp=logp[rows], old_logp=logp[rows].detach(), ref_logp=ref_logp[rows],
        mask=mask[rows], rewards=torch.arange(2).flip(0).repeat_interleave(len(pairs)).double(),
        group=pairs.repeat(2), beta=beta, average=False,
    ).loss  # fmt: skip


class Outcome(NamedTuple):
    """Everything that an algorithm makes of a step."""

    loss: torch.Tensor
    gradient: torch.Tensor
    metrics: dict[str, float]


def outcome(objective: Objective, step: Step) -> Outcome:
    batch, meter = ready(objective, step), Meter()
    observe_correction(meter, batch)
    loss, gradient = descend(objective, batch, step.logp, meter)
    return Outcome(loss, gradient, summary(meter.measured()))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-12) -> None:
    """Check that tensors are equal, relative to the largest element, or to 0.01 if that is less."""
    assert a.shape == b.shape
    assert a.isfinite().all()
    scale = max(float(a.abs().max()), float(b.abs().max()), 1e-2) if a.numel() else 1.0
    torch.testing.assert_close(a, b, atol=tolerance * scale, rtol=0.0)


def of_answer(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the value [B] that all trained tokens of each completion share, and check that they do."""
    value = values.where(mask, -torch.inf).amax(dim=1)
    assert torch.equal(values, value[:, None].expand_as(mask).where(mask, 0.0))
    return value
