"""Laws 2, 3, 4, 8, 10, 11 and 14: of the loss and its gradient, of every algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.objective import ALGORITHMS, policy_loss, with_advantage, with_weight
from covey.objective.correction import CORRECTIONS
from covey.objective.diagnostics import Meter, summary
from covey.objective.loss import Objective
from covey.objective.surrogate import clipped, clipped_without_marked
from covey.types import Batch
from tests.objective.laws import (
    CASES,
    NO_KL_IN_REWARD,
    OF_PAIRS,
    Step,
    close,
    descend,
    extras,
    gradient_of,
    has_option,
    make_step,
    objective_of,
    outcome,
    ready,
    seeds,
)

ALL = pytest.mark.parametrize("case", CASES)
NAMED = pytest.mark.parametrize("case", ALGORITHMS)  # what does not depend on other options
# A pair has neither a ratio nor a penalty; test_worked_critic_and_pairs.py has its laws.
WITH_RATIO = pytest.mark.parametrize("case", [c for c in ALGORITHMS if c not in OF_PAIRS])

# Law 2 is about groups whose completions are all equally good. Where they have a gradient, and why.
MOVED_WITHOUT_VARIANCE = {
    "reinforce_pp": "has no groups: a completion is compared with all of the batch",
    "reinforce_pp, discounted": "the same",
    "reinforce_pp_baseline, by token": "centered anew over tokens, which brings lengths in",
    "kl_cov": "marked tokens are held where they were, whatever their advantage; others obey",
    "ppo": "has no groups: a token is compared with what the critic expected",
    "ppo, by length": "the same",
    "opd": "each token answers for its own divergence from the teacher, whatever the reward",
    "opd, with a task": "the same",
    "sdpo": "the same",
}


# Law 3 says that on policy the gradient is -A weight. Where there is another factor, and why.
def once_per_token(batch: Batch) -> torch.Tensor:
    """T_i: each token moves the product, so the whole completion: 1/N instead of 1/(N T_i)."""
    return batch.mask.sum(dim=1, keepdim=True).double()


def unmarked(batch: Batch) -> torch.Tensor:
    """0 for the tokens that were picked to have no gain."""
    assert batch.marked is not None
    return (~batch.marked).double()


def corrected(batch: Batch) -> torch.Tensor:
    """The weight of the old policy to the sampler, which is part of the algorithm."""
    assert batch.correction is not None
    return batch.correction


FACTOR: dict[str, Callable[[Batch], torch.Tensor]] = {
    "rloo": once_per_token,
    "clip_cov": unmarked,
    "decoupled_ppo": corrected,
}

# Law 8 is about min(r A, clip(r) A). Those that have it; the others have no clip, or another.
CLIPPED = [
    case
    for case in CASES
    if getattr(objective_of(case).surrogate, "func", None) in (clipped, clipped_without_marked)
]


def by_hand(objective: Objective, batch: Batch, logp: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return r A and clip(r) A, each [B, T], and a mask of those that are counted."""
    assert batch.old_logp is not None
    assert batch.advantage is not None
    x = (logp - batch.old_logp).where(batch.mask, 0.0)
    ratio = objective.ratio(x, batch.mask).exp()
    clip_low, clip_high = (objective.surrogate.keywords[side] for side in ("clip_low", "clip_high"))  # type: ignore[attr-defined]
    return (
        ratio * batch.advantage,
        ratio.clamp(1 - clip_low, 1 + clip_high) * batch.advantage,
        batch.mask,
    )


def flat(step: Step) -> Step:
    """Make the completions of one group equally good, but for rounding, and all right."""
    rewards, success = step.batch.rewards.clone(), step.batch.success.clone()
    mine = step.batch.group == 0
    rewards[mine] = 0.3
    rewards[mine.nonzero()[0]] = 0.1 + 0.2
    assert len(rewards[mine].unique()) == 2
    success[mine] = bool(success[mine][0])
    assert step.batch.parts is not None
    parts = step.batch.parts.where(~mine[:, None], rewards[:, None])
    batch = replace(step.batch, rewards=rewards, success=success, parts=parts)
    return Step(batch, step.logp)


@ALL
@settings(max_examples=8)
@given(data=st.data(), seed=seeds)
def test_law_2_a_group_without_variance_has_gradient_exactly_zero(
    case: str, data: st.DataObject, seed: int
) -> None:
    # A KL and an entropy bonus act on tokens without advantage too; they are no part of the law.
    options = {**data.draw(extras(case, "entropy_bonus")), "beta": 0.0}
    objective, step = objective_of(case, **options), flat(make_step(seed))
    mine = step.batch.group == 0
    batch = ready(objective, step)
    assert batch.advantage is not None
    _, gradient = descend(objective, batch, step.logp)
    held = torch.zeros_like(batch.mask)
    if case in MOVED_WITHOUT_VARIANCE:
        if batch.marked is None:
            assert (batch.advantage[mine][batch.mask[mine]] != 0).any() or options.get(
                "top_entropy"
            )
            return
        held = batch.marked
    assert (batch.advantage[mine] == 0).all()
    assert (gradient[mine[:, None] & ~held] == 0).all()


@ALL
def test_law_2_groups_with_variance_do_have_a_gradient(case: str) -> None:
    step = flat(make_step(3))
    gradient = gradient_of(objective_of(case, beta=0.0), step)
    assert (gradient[step.batch.group != 0] != 0).any()


@pytest.mark.parametrize("case", [c for c in CASES if CASES[c][0] not in OF_PAIRS])
@settings(max_examples=8)
@given(seed=seeds, given_old=st.booleans())
def test_law_3_on_policy_the_gradient_is_minus_advantage_times_weight(
    case: str, seed: int, given_old: bool
) -> None:
    objective, step = objective_of(case, beta=0.0), make_step(seed)
    given_old |= "old_logp" in objective.needs
    step = Step(replace(step.batch, old_logp=step.logp if given_old else None), step.logp)
    batch = ready(objective, step)
    assert batch.advantage is not None
    expected = -batch.advantage * batch.weight
    if case in FACTOR:
        expected = expected * FACTOR[case](batch)
    gradient = descend(objective, batch, step.logp)[1]
    close(gradient, expected)
    assert (gradient != 0).any()


@settings(max_examples=10)
@given(seed=seeds)
def test_law_4_gspo_token_is_gspo_while_an_answer_has_one_advantage(seed: int) -> None:
    step, bounds = make_step(seed), {"clip_low": 0.05, "clip_high": 0.07}
    ours, theirs = (outcome(objective_of(name, **bounds), step) for name in ("gspo_token", "gspo"))
    close(ours.gradient, theirs.gradient)
    close(ours.loss[None], theirs.loss[None])
    assert ours.metrics == pytest.approx(theirs.metrics)
    assert (ours.gradient != 0).any()


@settings(max_examples=10)
@given(seed=seeds)
def test_law_4_luspo_is_gspo_times_the_length_of_each_answer(seed: int) -> None:
    step, bounds = make_step(seed), {"clip_low": 0.05, "clip_high": 0.07}
    luspo, gspo = (gradient_of(objective_of(name, **bounds), step) for name in ("luspo", "gspo"))
    close(luspo, gspo * step.batch.mask.sum(dim=1, keepdim=True))
    assert (gspo != 0).any()


@pytest.mark.parametrize("case", CLIPPED)
@settings(max_examples=8)
@given(seed=seeds)
def test_law_8_clip_fractions_count_where_the_clipped_loss_is_the_larger(
    case: str, seed: int
) -> None:
    objective, step = objective_of(case, beta=0.0), make_step(seed)
    batch, meter = ready(objective, step), Meter()
    descend(objective, batch, step.logp, meter)
    plain, held, counted = by_hand(objective, batch, step.logp)
    assert batch.advantage is not None
    larger = plain > held
    if case == "clip_cov":  # the tokens that it picks lose their gradient too
        assert batch.marked is not None
        assert (batch.marked & ~larger).any()
        larger |= batch.marked
    if objective.per_sequence:  # one vote a completion; its tokens agree
        larger, counted = larger.any(dim=1, keepdim=True), counted.any(dim=1, keepdim=True)
    good = (batch.advantage > 0)[:, : larger.shape[1]]
    if objective.per_sequence:
        good = (batch.advantage > 0).any(dim=1, keepdim=True)
    numbers = summary(meter.measured())
    for name, flags in (
        ("avg", larger),
        ("high", larger & good),
        ("low", larger & ~good),
    ):
        expected = float(flags[counted].double().mean())
        assert numbers[f"policy/clipfrac_{name}"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("case", [c for c in CASES if has_option(c, "dual")])
@settings(max_examples=8)
@given(seed=seeds, dual=st.floats(1.3, 2.5))
def test_law_8_dual_clip_is_a_bound_on_the_ratio_of_bad_tokens(
    case: str, seed: int, dual: float
) -> None:
    objective, step = objective_of(case, beta=0.0, dual=dual), make_step(seed)
    step = Step(step.batch, step.logp + (step.logp - step.batch.old_logp))  # further off policy
    batch = ready(objective, step)
    assert batch.advantage is not None
    logp = step.logp.clone().requires_grad_()
    _, held, mask = by_hand(objective, batch, logp)
    ratio = (logp - batch.old_logp).exp()
    form = torch.minimum(torch.minimum(ratio, torch.full_like(ratio, dual)) * batch.advantage, held)
    if batch.correction is not None:
        form = form * batch.correction
    expected = -(form * batch.weight).where(mask, 0.0).sum()
    (gradient,) = torch.autograd.grad(expected, logp)
    loss, ours = descend(objective, batch, step.logp)
    close(loss[None], expected.detach()[None])
    close(ours, gradient)
    above = (batch.advantage < 0) & (ratio > dual)
    assert (ours[above] == 0).all()


@WITH_RATIO
@settings(max_examples=8)
@given(seed=seeds, correction=st.sampled_from(sorted(CORRECTIONS)), mean_one=st.booleans())
def test_law_10_a_sampler_that_agrees_needs_no_correction(
    case: str, seed: int, correction: str, mean_one: bool
) -> None:
    step = make_step(seed)
    assert step.batch.old_logp is not None
    step = Step(replace(step.batch, sampler_logp=step.batch.old_logp.clone()), step.logp)
    options = {"correction": correction, "correction_mean_one": mean_one, "veto": 1e-4}
    corrected, plain = (
        descend(objective, ready(objective, step), step.logp)
        for objective in (objective_of(case, **options), objective_of(case))
    )
    assert torch.equal(corrected[0], plain[0])
    assert torch.equal(corrected[1], plain[1])


def narrow(correction: str) -> dict[str, Any]:
    """Return the options of a correction that changes some tokens, and leaves others alone."""
    clip_low, clip_high = (0.0, 0.02) if correction == "divergence_mask" else (0.8, 1.15)
    return {"correction": correction, "correction_low": clip_low, "correction_high": clip_high}


@WITH_RATIO
@settings(max_examples=8)
@given(seed=seeds, correction=st.sampled_from(sorted(CORRECTIONS)))
def test_law_10_a_correction_is_a_constant_weight_and_denominators_stay(
    case: str, seed: int, correction: str
) -> None:
    objective, step = objective_of(case, beta=0.0, **narrow(correction)), make_step(seed)
    assert step.batch.old_logp is not None
    # Where log-probabilities carry a gradient, none of it may come through.
    old = step.batch.old_logp.clone().requires_grad_()
    sampler = step.batch.sampler_logp.clone().requires_grad_()
    watched = with_weight(objective, replace(step.batch, old_logp=old, sampler_logp=sampler))
    assert watched.correction is not None
    assert not watched.correction.requires_grad

    batch = ready(objective, step)
    assert torch.equal(watched.correction, batch.correction)
    dropped = (batch.correction == 0) & batch.mask
    if correction.endswith("_mask"):
        assert set(batch.correction[batch.mask].unique().tolist()) <= {0.0, 1.0} or (
            correction in ("token_mask", "sequence_mask")
        )
    else:
        assert not dropped.any()
    plain = with_weight(objective_of(case, beta=0.0), batch)
    assert torch.equal(plain.weight, batch.weight)  # the denominators
    by_weight = replace(plain, weight=plain.weight * batch.correction, correction=None)
    ours, theirs = descend(objective, batch, step.logp), descend(objective, by_weight, step.logp)
    close(ours[0][None], theirs[0][None])
    close(ours[1], theirs[1])


@WITH_RATIO
@settings(max_examples=8)
@given(seed=seeds, correction=st.sampled_from(sorted(CORRECTIONS)), veto=st.sampled_from([0, 0.7]))
def test_law_10_the_only_pass_on_a_batch_may_compute_old_logp(
    case: str, seed: int, correction: str, veto: float
) -> None:
    objective = objective_of(case, beta=0.0, veto=veto, **narrow(correction))
    if not objective.corrects_by_row:
        return
    step = make_step(seed)
    advantage = ready(objective, step).advantage
    first = replace(step.batch, advantage=advantage, old_logp=step.logp.detach())
    ours, theirs = (
        descend(objective, with_weight(objective, replace(first, old_logp=old)), step.logp)
        for old in (None, first.old_logp)
    )
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


@WITH_RATIO
@settings(max_examples=8)
@given(seed=seeds, correction=st.sampled_from(sorted(CORRECTIONS)))
def test_law_10_a_correction_leaves_the_penalty_and_the_bonus_alone(
    case: str, seed: int, correction: str
) -> None:
    step, both = make_step(seed), {"beta": 0.3, "kl_in": "loss", "entropy_bonus": 0.1}
    correct = narrow(correction)
    corrected, plain = (
        gradient_of(objective_of(case, **both, **more), step)
        - gradient_of(objective_of(case, beta=0.0, **more), step)
        for more in (correct, {})
    )
    assert (plain != 0).any()
    close(corrected, plain)


@NAMED
@settings(max_examples=8)
@given(seed=seeds, bonus=st.sampled_from([-0.3, 1e-3, 0.2]))
def test_law_11_an_entropy_bonus_is_weighted_like_the_rest(
    case: str, seed: int, bonus: float
) -> None:
    objective, step = objective_of(case, entropy_bonus=bonus), make_step(seed)
    batch = ready(objective, step)
    assert batch.entropy is not None
    entropy = batch.entropy.clone().requires_grad_()
    loss = policy_loss(objective, batch, step.logp, entropy).loss
    (gradient,) = torch.autograd.grad(loss, entropy, materialize_grads=True)
    close(gradient, -bonus * batch.weight)


@pytest.mark.parametrize("case", ["cispo", "gpg"])
@settings(max_examples=10)
@given(seed=seeds, away=st.sampled_from([1.0, 10.0, 100.0]))
def test_law_14_no_token_loses_its_gradient_however_far_it_has_moved(
    case: str, seed: int, away: float
) -> None:
    objective, step = objective_of(case), make_step(seed)
    assert step.batch.old_logp is not None
    step = Step(step.batch, step.batch.old_logp + away * (step.logp - step.batch.old_logp))
    batch = ready(objective, step)
    assert batch.advantage is not None
    _, gradient = descend(objective, batch, step.logp)
    assert ((gradient != 0) == (batch.advantage != 0)).all()
    assert (gradient != 0).any()


@WITH_RATIO
def test_the_penalty_is_only_asked_for_with_beta(case: str) -> None:
    objective, step = objective_of(case, beta=0.0), make_step(7)
    assert "reference" not in objective.needs
    batch = ready(objective, Step(replace(step.batch, ref_logp=None), step.logp))
    assert policy_loss(objective, batch, step.logp).penalty is None


@pytest.mark.parametrize("case", [c for c in ALGORITHMS if c not in NO_KL_IN_REWARD])
@settings(max_examples=8)
@given(seed=seeds)
def test_a_penalty_in_the_reward_is_no_gradient_of_its_own(case: str, seed: int) -> None:
    # In the reward it changes advantages only: the loss is that of the same advantages without it.
    objective, step = objective_of(case, beta=0.2, kl="k1", kl_in="reward"), make_step(seed)
    batch = ready(objective, step)
    assert policy_loss(objective, batch, step.logp).penalty is None
    free = replace(objective, beta=0.0)
    assert torch.equal(descend(objective, batch, step.logp)[1], descend(free, batch, step.logp)[1])
    if "success" not in objective.needs:  # those read which rollouts succeed, and no reward
        plain = with_advantage(free, step.batch).advantage
        assert not torch.equal(batch.advantage, plain)


@settings(max_examples=10)
@given(seed=seeds)
def test_a_penalty_in_the_reward_is_the_sum_over_the_answer(seed: int) -> None:
    step = make_step(seed)
    batch = step.batch
    assert batch.old_logp is not None
    assert batch.ref_logp is not None
    k1 = (batch.old_logp - batch.ref_logp).where(batch.mask, 0.0).sum(dim=1)
    by_hand_rewards = replace(batch, rewards=batch.rewards - 0.05 * k1)
    ours = with_advantage(objective_of("rloo"), batch).advantage
    assert ours is not None
    theirs = with_advantage(objective_of("rloo", beta=0.0), by_hand_rewards).advantage
    assert theirs is not None
    close(ours, theirs)
