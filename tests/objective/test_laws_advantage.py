"""Laws 1, 2 and 12: of advantages, of every algorithm that they apply to."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.objective import with_advantage
from covey.objective.advantage import group_sum
from covey.objective.algorithms.entropy import polarity
from covey.types import Batch
from tests.objective.laws import CASES, close, has_option, make_step, objective_of, of_answer, seeds

# Law 1 is about sum_i A_i of a group. Where it does not hold, why, and what holds instead.
NOT_ZERO_SUM = {
    "opo": "sum_i T_i A_i is 0, as its own test says",
    "gtpo": "tokens have rewards of their own, normalized over the batch",
    "gtpo, by polarity": "the same",
    "gtpo, over the batch": "the same",
    "gtpo_trajectory": "the entropy of each completion is taken off after centering",
    "reinforce_pp": "has no groups; sums to 0 over the batch, as its own test says",
    "reinforce_pp, discounted": "the same",
    "reinforce_pp_baseline, by token": "centered anew, over the tokens of the batch",
    "pkpo": "what a completion adds to others is never negative; `centred` sums to 0",
    "maxrl, all wrong": "every completion of a group without success has -1",
    "gfpo, by rate": "the kept rows of every group may be equal",
    "ppo": "no group: a token is compared with what the critic expected",
    "ppo, by length": "the same",
    "opd": "tokens answer for their own divergence from the teacher",
    "opd, with a task": "the same",
    "sdpo": "the same",
}
# What happens to A when rewards are multiplied by a positive number, with eps 0.
NEVER_SEES_REWARDS = "invariant: it asks only which completions are correct"
SCALE = {
    "dr_grpo": "proportional", "rloo": "proportional", "opo": "proportional",
    "gpg": "proportional", "gpg, by completion": "proportional",
    "gtpo_trajectory": "neither: an entropy that does not scale is taken off",
    "gtpo": NEVER_SEES_REWARDS, "gtpo, by polarity": NEVER_SEES_REWARDS,
    "gtpo, over the batch": NEVER_SEES_REWARDS,
    "grpo_s": NEVER_SEES_REWARDS, "grpo_s, arithmetic": NEVER_SEES_REWARDS,
    "grpo_s, over the batch": NEVER_SEES_REWARDS,
    "pkpo": "proportional", "pkpo, centred": "proportional",
    "opd": "invariant: it sees no reward", "sdpo": "invariant: it sees no reward",
    "ppo, by length": "proportional",
}  # fmt: skip
# Everybody ignores a constant added to all rewards; except that a reward at the last token only,
# when discounted, is a different constant at every token.
# What divides by a mean, by tokens, or compares with a threshold, is of the reward's own scale.
NOT_SHIFT_INVARIANT = {
    "reinforce_pp, discounted", "maxrl", "maxrl, all wrong", "gfpo, by rate", "gdpo, gated",
    "ppo", "ppo, by length",
}  # fmt: skip
# Whose deviation has ddof, and over how many numbers: those of the group unless it says otherwise.
DEVIATION_OVER = {"lite_ppo": "batch", "gtpo": "tokens", "gtpo, over the batch": "tokens"}
# By polarity, right and wrong tokens have a deviation each, so no single factor.
NO_SINGLE_DDOF = {"gtpo, by polarity"}
# Deviations of two kinds, of the kept or mixed rows only, or of a term among others.
OTHER_DDOF = ("gdpo", "gfpo", "scalerl", "opd", "sdpo")

ALL = pytest.mark.parametrize("case", CASES)


def advantage_of(case: str, batch: Batch, **options: Any) -> torch.Tensor:
    """Return the advantages [B, T] without a KL, which is no property of the rewards."""
    if has_option(case, "eps"):
        options = {"eps": 0.0, **options}
    result = with_advantage(objective_of(case, **{"beta": 0.0, **options}), batch).advantage
    assert result is not None
    return result


def counts(group: torch.Tensor) -> torch.Tensor:
    return group_sum(torch.ones(len(group), dtype=torch.float64), group)


@pytest.mark.parametrize("case", [c for c in CASES if c not in NOT_ZERO_SUM])
@settings(max_examples=8)
@given(seed=seeds, scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_law_1_advantages_of_a_group_sum_to_zero(case: str, seed: int, scale: float) -> None:
    batch = make_step(seed, empty=False).batch
    batch = replace(batch, rewards=batch.rewards * scale)
    advantage = of_answer(advantage_of(case, batch), batch.mask)
    size = advantage.abs().max()
    assert size > 0
    assert group_sum(advantage, batch.group).abs().max() < 1e-13 * size * len(batch)


@settings(max_examples=10)
@given(seed=seeds)
def test_law_1_opo_sums_to_zero_over_the_tokens_of_a_group(seed: int) -> None:
    batch = make_step(seed).batch
    advantage = advantage_of("opo", batch)
    assert (of_answer(advantage, batch.mask)[batch.mask.any(dim=1)] != 0).all()
    assert group_sum(advantage.sum(dim=1), batch.group).abs().max() < 1e-12


@pytest.mark.parametrize(
    "case", ["reinforce_pp", "reinforce_pp, discounted", "reinforce_pp_baseline, by token"]
)
@settings(max_examples=8)
@given(seed=seeds)
def test_law_1_what_is_whitened_has_mean_zero_and_deviation_one_over_tokens(
    case: str, seed: int
) -> None:
    batch = make_step(seed).batch
    advantage = advantage_of(case, batch)[batch.mask]
    assert advantage.mean().abs() < 1e-12
    assert float(advantage.std(correction=1)) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("case", [c for c in CASES if c not in NOT_SHIFT_INVARIANT])
@settings(max_examples=8)
@given(seed=seeds, shift=st.integers(-1000, 1000))
def test_law_1_a_shift_of_all_rewards_changes_nothing(case: str, seed: int, shift: int) -> None:
    batch = make_step(seed).batch
    moved = replace(batch, rewards=batch.rewards + shift)
    close(advantage_of(case, moved), advantage_of(case, batch), 1e-11)


@ALL
@settings(max_examples=8)
@given(seed=seeds, factor=st.floats(0.01, 100))
def test_law_1_a_scale_of_all_rewards_changes_nothing_if_it_is_divided_out(
    case: str, seed: int, factor: float
) -> None:
    batch = make_step(seed).batch
    kind = SCALE.get(case, "invariant")
    if kind.startswith("neither"):
        # What is taken off left aside, it is proportional too.
        options, kind = {"entropy_cost": 0.0}, "proportional"
    else:
        options = {}
    assert batch.values is not None
    larger = replace(batch, rewards=batch.rewards * factor, values=batch.values * factor)
    scaled = advantage_of(case, larger, **options)
    expected = advantage_of(case, batch, **options) * (factor if kind == "proportional" else 1.0)
    assert expected.abs().max() > 0
    close(scaled, expected, 1e-11)


@settings(max_examples=10)
@given(seed=seeds)
def test_law_2_rloo_is_dr_grpo_times_g_over_g_minus_one(seed: int) -> None:
    batch = make_step(seed).batch
    size = counts(batch.group)[:, None]
    close(advantage_of("rloo", batch), size / (size - 1) * advantage_of("dr_grpo", batch))


@pytest.mark.parametrize(
    "case", [c for c in CASES if has_option(c, "ddof") and not c.startswith(OTHER_DDOF)]
)
@settings(max_examples=8)
@given(seed=seeds)
def test_law_2_ddof_is_a_factor(case: str, seed: int) -> None:
    batch = make_step(seed).batch
    zero, one = advantage_of(case, batch, ddof=0), advantage_of(case, batch, ddof=1)
    if case in NO_SINGLE_DDOF:
        for mine in polarity(batch):
            numbers = (batch.mask & mine[:, None]).sum().double()
            close(zero[mine], one[mine] * (numbers / (numbers - 1)).sqrt())
        return
    over = DEVIATION_OVER.get(case, "group")
    if over == "group":
        numbers = counts(batch.group)[:, None]
        if case.startswith(
            "grpo_s"
        ):  # a completion without trained tokens has no entropy to shape by
            numbers = group_sum(batch.mask.any(dim=1).double(), batch.group)[:, None]
            numbers = numbers.clamp(min=2)
    else:
        numbers = (
            batch.mask.sum().double() if over == "tokens" else torch.tensor(len(batch)).double()
        )
    close(zero, one * (numbers / (numbers - 1)).sqrt())


@pytest.mark.parametrize("scope", ["group", "batch"])
@settings(max_examples=8)
@given(seed=seeds, alpha1=st.floats(0.0, 3.0), alpha2=st.floats(0.01, 2.0))
def test_law_12_entropy_bonuses_are_conserved(
    scope: str, seed: int, alpha1: float, alpha2: float
) -> None:
    # sum rp = (alpha1 + alpha2) T+, whatever the entropies, so that sum (rp - mean rp) over right
    # tokens is that times 1 - T+/T. An eps far above any deviation makes A that, over eps.
    batch, eps = make_step(seed).batch, 1e12
    advantage = advantage_of("gtpo", batch, alpha1=alpha1, alpha2=alpha2, scope=scope, eps=eps)
    for mine, sign in zip(polarity(batch), (1, -1), strict=True):
        tokens = int((batch.mask & mine[:, None]).sum())
        expected = sign * (alpha1 + alpha2) * tokens * (1 - tokens / int(batch.mask.sum()))
        assert float(advantage[mine].sum() * eps) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=10)
@given(seed=seeds)
def test_law_12_without_entropies_gtpo_is_the_share_of_right_tokens(seed: int) -> None:
    batch = make_step(seed).batch
    advantage = advantage_of("gtpo", batch, alpha2=0.0)
    right, wrong = (batch.mask & mine[:, None] for mine in polarity(batch))
    p = int(right.sum()) / int(batch.mask.sum())
    expected = math.sqrt((1 - p) / p) * right.double() - math.sqrt(p / (1 - p)) * wrong.double()
    close(advantage, expected)


@settings(max_examples=10)
@given(seed=seeds, alpha1=st.floats(0.1, 3.0), alpha2=st.floats(0.01, 2.0))
def test_law_12_a_single_right_answer_has_the_whole_bonus(
    seed: int, alpha1: float, alpha2: float
) -> None:
    batch = make_step(seed).batch
    success = torch.zeros_like(batch.success)
    for group in batch.group.unique():
        success[(batch.group == group).nonzero()[0]] = True
    batch = replace(batch, success=success)
    plain = advantage_of("gtpo", batch, alpha1=alpha1 + alpha2, alpha2=0.0)
    shaped = advantage_of("gtpo", batch, alpha1=alpha1, alpha2=alpha2)
    close(shaped[success], plain[success])
    # By polarity there is then nothing left to compare: exactly 0, not rounding over rounding.
    alone = advantage_of("gtpo", batch, alpha1=alpha1, alpha2=alpha2, norm="polarity")
    assert (alone[success] == 0).all()


@settings(max_examples=10)
@given(seed=seeds, alpha1=st.floats(0.1, 3.0), alpha2=st.floats(0.01, 2.0))
def test_law_12_by_polarity_alpha_does_not_matter(seed: int, alpha1: float, alpha2: float) -> None:
    batch = make_step(seed).batch
    ours = advantage_of("gtpo, by polarity", batch, alpha1=alpha1, alpha2=alpha2)
    close(ours, advantage_of("gtpo, by polarity", batch), 1e-9)


@settings(max_examples=10)
@given(seed=seeds)
def test_law_12_right_tokens_are_pushed_up_and_wrong_ones_down(seed: int) -> None:
    batch = make_step(seed).batch
    right, wrong = (batch.mask & mine[:, None] for mine in polarity(batch))
    for case in ("gtpo", "gtpo, over the batch", "grpo_s"):
        advantage = advantage_of(case, batch)
        assert (advantage[right] > 0).all()
        assert (advantage[wrong] < 0).all()
        assert (advantage[~(right | wrong)] == 0).all()
