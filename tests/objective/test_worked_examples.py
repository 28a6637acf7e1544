"""Numbers worked out from the formulas by other code, gradients checked by finite differences.

All is float64 and must agree to 1e-9. Six completions of two prompts run through most. What stands
in worked_examples.json in `not_ours`, or under a name that begins with `wrong`, is what a mistake
gives: there we must differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey import functional
from covey.accel.head import Head, token_logp
from covey.objective import (
    Objective,
    PolicyLoss,
    build,
    policy_loss,
    with_advantage,
    with_marks,
    with_weight,
)
from covey.objective.advantage import (
    centered,
    per_token,
    returns,
    rollout_rewards,
    standardized,
    sum_of_standardized,
    token_rewards,
    whitened,
    zero_variance,
)
from covey.objective.algorithms.entropy import polarity
from covey.objective.algorithms.marked import covariance
from covey.objective.algorithms.ppo import clipped_value_loss, gae
from covey.objective.correction import CORRECTIONS, no_veto
from covey.objective.diagnostics import (
    Meter,
    observe,
    observe_correction,
    observe_sampler,
    summary,
)
from covey.objective.masked import difference, row_mean
from covey.objective.penalty import PENALTIES
from covey.objective.ratio import RATIOS
from covey.rewards.length import Soft
from covey.rollout.filter import select, without_truncated
from covey.types import Batch, Group, Prompt, Rollout, Totals
from tests.objective.laws import preference_loss
from tests.objective.worked import Worked

WORKED = Worked("worked_examples.json")
NUMBERS = WORKED.numbers
at, tensor, close, far = WORKED.at, WORKED.tensor, WORKED.close, WORKED.far


MASK = tensor("inputs.mask").bool()
LOGP = tensor("inputs.logp")
BATCH = Batch(
    prompt_tokens=torch.zeros(6, 1, dtype=torch.long),
    prompt_lengths=torch.ones(6, dtype=torch.long),
    tokens=torch.zeros(6, 5, dtype=torch.long),
    lengths=MASK.sum(dim=1),
    mask=MASK,
    sampler_logp=tensor("inputs.sampler_logp"),
    rewards=tensor("inputs.rewards"),
    success=tensor("inputs.rewards") > 0,
    group=torch.tensor(at("inputs.group")),
    truncated=tensor("dapo.truncated").bool(),
    old_logp=tensor("inputs.old_logp"),
    ref_logp=tensor("inputs.ref_logp"),
    entropy=tensor("inputs.entropy"),
)
DAPO_REWARDS = tensor("dapo.groups.rewards")[:6]  # its third group is for the filter alone

# What differs from BATCH and LOGP, by the first word of a case or by all of it.
GIVEN: dict[str, dict[str, torch.Tensor]] = {
    "dapo": {"rewards": DAPO_REWARDS},
    "gspo": {"logp": tensor("gspo.logp")},
    "penalties": {"rewards": torch.zeros(6)},  # no variance, no advantage: the penalty is all
    "grpo.on_policy": {"old_logp": LOGP},
}
EPS = {"eps": 1e-4}
TOY_KL_COV = {"share": 0.1, **EPS}
TOY_CLIP_COV = {"clip_low": 0.2, "clip_high": 0.2, "cov_low": 0.2, "share": 1.0, **EPS}
PRODUCT_K3 = {"ratio": "product", "kl": "k3_sequence", "weights": "sequence_mean_token_mean"}


def given(case: str) -> dict[str, torch.Tensor]:
    return GIVEN.get(case, GIVEN.get(case.split(".")[0], {}))


def against_centered(weights: str) -> dict[str, Any]:
    length = {"length": at("aggregation.length")} if weights.endswith("norm") else {}
    return {"advantage": "centered", "weights": weights, **length}


# Case, algorithm, options: loss and gradient.
LOSSES: list[tuple[str, str, dict[str, Any]]] = [
    ("grpo.no_penalty", "grpo", {"beta": 0.0, **EPS}),
    ("grpo.k3", "grpo", {"beta": 0.04, **EPS}),
    ("grpo.on_policy", "grpo", {"beta": 0.0, **EPS}),
    ("grpo.whole_answers", "composed", {**PRODUCT_K3, "beta": 0.001, **EPS}),  # R1 as printed
    ("aggregation.sequence_mean_token_sum_norm", "dr_grpo", {"length": at("aggregation.length")}),
    *((f"aggregation.{w}", "composed", against_centered(w)) for w in at("aggregation.cases")),
    ("dapo.plain", "dapo", {}),
    ("dapo.dual", "dapo", {"dual": 3.0}),
    ("gspo.gspo", "gspo", EPS),
    ("gspo.gspo_token", "gspo_token", EPS),
    ("gspo.luspo", "luspo", {"clip_low": 3e-4, "clip_high": 4e-4, **EPS}),
    ("entropy_shaping.tokens_group_batch", "gtpo", {}),
    ("entropy_shaping.tokens_group_polarity", "gtpo", {"norm": "polarity"}),
    ("entropy_shaping.tokens_batch_batch", "gtpo", {"scope": "batch"}),
    ("entropy_shaping.tokens_batch_polarity", "gtpo", {"scope": "batch", "norm": "polarity"}),
    ("entropy_shaping.answers_arithmetic", "grpo_s", {"mean": "arithmetic"}),
    ("entropy_shaping.answers_geometric", "grpo_s", {}),
    ("surrogates.cispo_upper", "cispo", {"max_weight": 1.28, **EPS}),
    ("surrogates.cispo_both", "cispo", {"max_weight": 1.28, "min_weight": 0.8, **EPS}),
    ("surrogates.cispo_5", "cispo", EPS),
    ("surrogates.gmpo_04", "gmpo", EPS),
    ("surrogates.gmpo_02", "gmpo", {"clip_low": 0.2, "clip_high": 0.2, **EPS}),
    ("surrogates.sapo", "sapo", EPS),
    ("surrogates.rloo", "rloo", {}),
    ("surrogates.kl_cov", "kl_cov", TOY_KL_COV),
    ("surrogates.clip_cov", "clip_cov", TOY_CLIP_COV),
    ("surrogates.vespo", "vespo", EPS),
    ("surrogates.dppo", "dppo", {"clip_low": 0.1, "clip_high": 0.1, "anchor": "old_logp", **EPS}),
    ("surrogates.top_entropy", "dapo", {"top_entropy": 0.2, **EPS}),
    *((f"penalties.{kl}", "composed", {"kl": kl, "beta": 1.0}) for kl in at("penalties.cases")),
    ("sampler.none", "dapo", EPS),
    ("sampler.token_truncate", "dapo", {"correction": "token_truncate", **EPS}),
    ("sampler.token_mask", "dapo", {"correction": "token_mask", "correction_low": 0.5, **EPS}),
    ("sampler.sequence_truncate", "dapo", {"correction": "sequence_truncate", **EPS}),
    ("sampler.sequence_mask", "dapo", {"correction": "sequence_mask", "correction_low": 0.5, **EPS}),
    ("sampler.token_truncate_mean_one", "dapo", {"correction": "token_truncate", "correction_mean_one": True, **EPS}),
]  # fmt: skip
ELSEWHERE = {
    "dapo.overlong_filter",
    "gspo.token_advantages",
    "surrogates.gpg_alpha_2",
    "sampler.geometric_rejected",
}


def run(
    algorithm: str, options: dict[str, Any], case: str = ""
) -> tuple[functional.LossOutput, torch.Tensor]:
    """Return the loss of a case through the public function, and its gradient."""
    inputs = {
        "logp": LOGP, "old_logp": BATCH.old_logp, "mask": MASK, "rewards": BATCH.rewards,
        "group": BATCH.group, "ref_logp": BATCH.ref_logp, "sampler_logp": BATCH.sampler_logp,
        "entropy": BATCH.entropy, **given(case),
    }  # fmt: skip
    inputs["logp"] = inputs["logp"].clone().requires_grad_()
    output = functional.loss(algorithm, **inputs, **options)
    output.loss.backward()
    return output, inputs["logp"].grad


def stepped(algorithm: str, options: dict[str, Any], case: str = "") -> tuple[Batch, PolicyLoss]:
    """Return the filled-in batch of a case, and what its loss is made of."""
    changes = dict(given(case))
    logp = changes.pop("logp", LOGP)
    objective = build(algorithm, **options)
    batch = with_weight(objective, with_advantage(objective, replace(BATCH, **changes)))
    batch = with_marks(objective, batch, logp)
    return batch, policy_loss(objective, batch, logp)


def check_step(objective: Objective, batch: Batch, logp: torch.Tensor, expected: Any) -> None:
    """Compare loss and gradient of a batch whose advantages are there already."""
    logp = logp.clone().requires_grad_()
    loss = policy_loss(objective, with_weight(objective, batch), logp).loss
    loss.backward()
    close(loss, expected["loss"])
    close(logp.grad, expected["grad"])


@pytest.mark.parametrize(("case", "algorithm", "options"), LOSSES)
def test_loss_and_gradient(case: str, algorithm: str, options: dict[str, Any]) -> None:
    section, name = case.split(".")
    output, grad = run(algorithm, options, case)
    close(output.loss, f"{section}.cases.{name}.loss")
    close(grad, f"{section}.cases.{name}.grad")


def test_no_case_is_forgotten() -> None:
    worked = {f"{s}.{name}" for s, n in NUMBERS.items() for name in n.get("cases", {})}
    assert worked == {case for case, _, _ in LOSSES} | ELSEWHERE


# ---- advantages --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "algorithm", "options"),
    [
        ("advantages.completions.standardized_eps_1e_4", "grpo", EPS),
        ("advantages.completions.standardized_eps_1e_6", "grpo", {}),
        ("advantages.completions.standardized_ddof_0", "grpo", {"ddof": 0, "eps": 1e-8}),
        ("advantages.completions.centered", "dr_grpo", {"length": 8}),
        ("advantages.completions.batch_of_rewards", "lite_ppo", EPS),
        ("advantages.completions.batch_of_centered", "reinforce_pp_baseline", {}),
        ("advantages.completions.leave_one_out", "rloo", {"beta": 0.0}),
        ("advantages.completions.length_weighted", "opo", {}),
        ("advantages.completions.best_of_group", "composed", {"advantage": "best_of_group"}),
        ("advantages.tokens.whitened_by_token", "reinforce_pp_baseline", {"weighting": "token"}),
        ("advantages.tokens.whitened_returns", "reinforce_pp", {}),
        ("dapo.advantage", "dapo", {}),
        ("entropy_shaping.cases.tokens_group_batch.advantage", "gtpo", {}),
        ("entropy_shaping.cases.tokens_group_polarity.advantage", "gtpo", {"norm": "polarity"}),
        ("entropy_shaping.cases.tokens_batch_batch.advantage", "gtpo", {"scope": "batch"}),
        ("entropy_shaping.cases.tokens_batch_polarity.advantage", "gtpo", {"scope": "batch", "norm": "polarity"}),
        ("entropy_shaping.completions.advantage", "grpo_s", {}),
        ("surrogates.cases.rloo.advantage", "rloo", {}),
    ],
)  # fmt: skip
def test_advantages(path: str, algorithm: str, options: dict[str, Any]) -> None:
    expected = tensor(path)
    actual = functional.advantages(
        algorithm, mask=MASK, group=BATCH.group, old_logp=BATCH.old_logp, ref_logp=BATCH.ref_logp,
        entropy=BATCH.entropy, **{"rewards": BATCH.rewards, **given(path)}, **options,
    )  # fmt: skip
    close(actual, per_token(expected, MASK) if expected.ndim == 1 else expected)


def test_group_mean_and_deviations() -> None:
    difference_to_mean = centered(BATCH.rewards, BATCH.group)
    close(BATCH.rewards - difference_to_mean, "advantages.group_mean")
    for ddof in (0, 1):
        scaled = standardized(BATCH.rewards, BATCH.group, ddof=ddof, eps=0.0)
        close(difference_to_mean / scaled, f"advantages.group_std_ddof_{ddof}")


def test_rewards_and_returns_of_single_tokens() -> None:
    batch = with_advantage(build("reinforce_pp"), BATCH)
    close(token_rewards(batch), "advantages.token_rewards")
    close(returns(token_rewards(batch), MASK, gamma=1.0), "advantages.returns")


def test_gpg_makes_up_for_groups_without_variance_and_not_for_rewards_of_zero() -> None:
    worked = at("advantages.scaled_up")
    rewards, group = tensor(worked["rewards"]), torch.tensor(worked["group"])
    mask = torch.ones(9, 1)
    actual = functional.advantages("gpg", mask=mask, rewards=rewards, group=group).squeeze(1)
    close(actual, worked["advantage"])
    close(actual[:6] / centered(rewards, group)[:6], [worked["alpha"]] * 6)
    far(actual, worked["wrong_advantage"])

    # Here no group lacks variance, so alpha is 1; the worked loss has another, and is linear in it.
    output, grad = run("gpg", {})
    other = at("advantages.scaled_up_no_flat_group")
    close(output.advantage[:, 0], "advantages.completions.centered")
    far(output.advantage[:, 0], other["wrong_advantage"])
    close(output.advantage[:, 0] * other["wrong_alpha"], other["wrong_advantage"])
    close(output.loss * other["wrong_alpha"], "surrogates.cases.gpg_alpha_2.loss")
    close(grad * other["wrong_alpha"], "surrogates.cases.gpg_alpha_2.grad")


def test_two_rewards_are_standardized_each_by_itself() -> None:
    parts = torch.stack([BATCH.rewards, tensor("advantages.two_rewards.second")])
    actual = sum_of_standardized(parts, BATCH.group, weights=(1.0, 1.0), **EPS)
    close(actual, "advantages.two_rewards.advantage")


# ---- what a loss is made of --------------------------------------------------------------------

Read = Callable[[Batch, PolicyLoss], torch.Tensor]


def ratio_of(batch: Batch, output: PolicyLoss) -> torch.Tensor:
    return output.log_ratio.exp()


def clipped_of(batch: Batch, output: PolicyLoss) -> torch.Tensor:
    return output.gain.clipped_low | output.gain.clipped_high


def weight_of(batch: Batch, output: PolicyLoss) -> torch.Tensor:
    return output.gain.value / (batch.advantage * LOGP)


def marked_of(batch: Batch, output: PolicyLoss) -> torch.Tensor:
    return batch.marked


def correction_of(batch: Batch, output: PolicyLoss) -> torch.Tensor:
    return batch.correction


# Path, algorithm, options, what to read: [B, T], or [B] for what all tokens of a completion share.
TABLES: list[tuple[str, str, dict[str, Any], Read]] = [
    ("grpo.ratio", "grpo", {}, ratio_of),
    ("grpo.clipped", "grpo", {}, clipped_of),
    ("aggregation.token_loss", "dr_grpo", {"length": 8}, lambda b, o: -o.gain.value),
    ("gspo.ratio", "gspo", {}, ratio_of),
    ("gspo.ratio", "gspo_token", {}, ratio_of),
    ("gspo.product", "rloo", {}, ratio_of),
    ("gspo.clipped", "gspo", {}, clipped_of),
    ("surrogates.cases.cispo_upper.weight", "cispo", {"max_weight": 1.28}, weight_of),
    ("surrogates.cases.cispo_both.weight", "cispo", {"max_weight": 1.28, "min_weight": 0.8}, weight_of),
    ("surrogates.cases.cispo_5.weight", "cispo", {}, weight_of),
    ("surrogates.cases.vespo.weight", "vespo", {}, weight_of),
    ("surrogates.cases.dppo.kept", "dppo", {"clip_low": 0.1, "clip_high": 0.1}, lambda b, o: o.gain.value != 0),
    ("surrogates.cases.rloo.rewards", "rloo", {}, lambda b, o: rollout_rewards(b)[:, None]),
    ("surrogates.cases.kl_cov.covariance", "kl_cov", EPS, lambda b, o: covariance(b.advantage, LOGP, MASK)),
    ("surrogates.cases.kl_cov.marked", "kl_cov", TOY_KL_COV, marked_of),
    ("surrogates.cases.clip_cov.marked", "clip_cov", TOY_CLIP_COV, marked_of),
    ("surrogates.cases.top_entropy.kept", "dapo", {"top_entropy": 0.2}, lambda b, o: b.advantage != 0),
    ("entropy_shaping.completions.entropy", "grpo_s", {}, lambda b, o: row_mean(b.entropy, MASK)),
    ("penalties.d", "grpo", {"kl": "k1"}, lambda b, o: o.penalty),
    ("sampler.cases.token_truncate.correction", "dapo", {"correction": "token_truncate"}, correction_of),
    ("sampler.cases.token_mask.correction", "dapo", {"correction": "token_mask", "correction_low": 0.5}, correction_of),
    ("sampler.cases.sequence_truncate.correction", "dapo", {"correction": "sequence_truncate"}, correction_of),
    ("sampler.cases.sequence_mask.correction", "dapo", {"correction": "sequence_mask", "correction_low": 0.5}, correction_of),
    ("sampler.cases.token_truncate_mean_one.correction", "dapo", {"correction": "token_truncate", "correction_mean_one": True}, correction_of),
    ("sampler.masks.divergence_005", "dapo", {"correction": "divergence_mask", "correction_high": 0.05}, correction_of),
    ("sampler.masks.off_policy_02.kept", "dapo", {"off_policy_limit": 0.2}, lambda b, o: o.kept),
]  # fmt: skip


@pytest.mark.parametrize(("path", "algorithm", "options", "read"), TABLES)
def test_what_a_loss_is_made_of(
    path: str, algorithm: str, options: dict[str, Any], read: Read
) -> None:
    expected = tensor(path)
    if expected.ndim == 1:
        expected = expected[:, None].expand_as(MASK)
    actual = read(*stepped(algorithm, options, path)).double().expand_as(MASK)
    close(actual.where(MASK, 0.0), expected.where(MASK, 0.0))


def test_only_what_the_advantage_would_push_further_is_clipped() -> None:
    batch, output = stepped("grpo", EPS)
    clipped, good = tensor("grpo.clipped").bool(), batch.advantage > 0
    assert output.gain.clipped_high.tolist() == (clipped & good).tolist()
    assert output.gain.clipped_low.tolist() == (clipped & ~good).tolist()


def test_the_most_uncertain_tokens_are_those_above_the_quantile() -> None:
    batch, _ = stepped("dapo", {"top_entropy": 0.2})
    above = BATCH.entropy >= at("surrogates.cases.top_entropy.threshold")
    assert (batch.advantage != 0).tolist() == (above & MASK).tolist()


# ---- aggregation -------------------------------------------------------------------------------


def split_up(objective: Objective, totals: Totals) -> tuple[list[list[float]], torch.Tensor]:
    """Return the loss of every micro-batch of every rank, and the sum of their gradients."""
    batch = with_advantage(objective, BATCH)
    logp = LOGP.clone().requires_grad_()
    losses: list[list[float]] = []
    for rank in at("aggregation.split.rows"):
        mine = torch.tensor([row for micro in rank for row in micro])
        rows = with_weight(objective, batch.rows(mine), totals)
        losses.append([])
        for micro in rank:
            part = rows.rows(torch.tensor([mine.tolist().index(i) for i in micro]))
            loss = policy_loss(objective, part, logp[micro][:, : part.mask.shape[1]]).loss
            loss.backward()
            losses[-1].append(loss.item())
    return losses, logp.grad


@pytest.mark.parametrize("weights", at("aggregation.cases"))
def test_micro_batches_and_ranks_add_up_to_the_step(weights: str) -> None:
    objective = build("composed", **against_centered(weights))
    totals = Totals.of(BATCH)
    assert totals.sequences == at("aggregation.split.sequences")
    assert totals.tokens == at("aggregation.split.tokens")
    losses, grad = split_up(objective, totals)
    whole = sum(sum(rank) for rank in losses)
    close(whole, f"aggregation.cases.{weights}.loss")
    close(grad, f"aggregation.cases.{weights}.grad")

    worked = at("aggregation.split.modes").get(weights)
    if worked is None:
        return
    # Frameworks that average gradients over ranks need each part times the number of ranks. Our
    # parts are to be added up over ranks as over micro-batches, so nothing is multiplied.
    close(tensor(losses) * at("aggregation.split.ranks"), worked["parts_times_ranks"])
    for name in worked.keys() & {"wrong_mean_of_means", "wrong_by_rows"}:
        far(whole, worked[name])


# ---- DAPO --------------------------------------------------------------------------------------


def test_soft_overlong_punishment() -> None:
    worked = at("dapo.soft_overlong")
    soft = Soft(limit=worked["limit"], cache=worked["cache"])
    close([soft.of(length) for length, _ in worked["table"]], [p for _, p in worked["table"]])


def dapo_groups() -> list[Group]:
    worked = at("dapo.groups")
    soft = Soft(limit=worked["limit"], cache=worked["cache"])
    rollouts = [
        Rollout.single_turn(
            prompt_id=str(group), sample=row, prompt_tokens=(1,), tokens=(2,) * length,
            trained=(True,) * length, sampler_logp=(0.0,) * length, text="", finish="stop",
            policy_version=0, reward=base + soft.of(length), success=bool(right),
        )
        for row, (group, length, base, right) in enumerate(
            zip(worked["group"], worked["lengths"], worked["base"], worked["success"], strict=True)
        )
    ]  # fmt: skip
    close(soft(rollouts), worked["penalty"])
    prompts = [Prompt(id=str(g), task="", messages=(), target="") for g in range(3)]
    return [
        Group(prompt=p, rollouts=tuple(r for r in rollouts if r.prompt_id == p.id)) for p in prompts
    ]


def test_dynamic_sampling_asks_for_success_and_not_for_reward() -> None:
    groups = dapo_groups()
    rewards = [rollout.reward for group in groups for rollout in group.rollouts]
    close(rewards, "dapo.groups.rewards")
    kept = [int(g.prompt.id) for g in select(groups, dynamic=True).groups]
    assert kept == at("dapo.groups.kept_by_success")
    group = torch.tensor(at("dapo.groups.group"))
    by_reward = group[~zero_variance(tensor(rewards), group)].unique().tolist()
    assert by_reward == at("dapo.groups.kept_by_reward")
    assert kept != by_reward


def test_overlong_filter_masks_tokens_but_keeps_the_answer_in_its_group() -> None:
    objective = build("dapo")
    batch = with_advantage(objective, replace(BATCH, rewards=DAPO_REWARDS))
    check_step(objective, without_truncated(batch), LOGP, at("dapo.cases.overlong_filter"))


# ---- GSPO --------------------------------------------------------------------------------------


def test_gspo_token_takes_advantages_of_single_tokens() -> None:
    worked = at("gspo.cases.token_advantages")
    steps = 1 + 0.1 * torch.arange(5, dtype=torch.float64)
    advantage = with_advantage(build("gspo_token", **EPS), BATCH).advantage * steps
    close(advantage, worked["advantage"])
    batch = replace(BATCH, advantage=advantage)
    check_step(build("gspo_token", **EPS), batch, tensor("gspo.logp"), worked)


def test_gspo_is_a_mean_over_answers() -> None:
    wrong = at("gspo.wrong_token_mean")
    gspo, gspo_grad = run("gspo", EPS, "gspo")
    far(gspo.loss, wrong["loss"])
    far(gspo_grad, wrong["grad"])
    # What a mean over tokens gives is LUSPO, in other units: completions per token.
    luspo, grad = run("luspo", {"clip_low": 3e-4, "clip_high": 4e-4, **EPS}, "gspo")
    close(luspo.loss * 6 / 23, wrong["loss"])
    close(grad * 6 / 23, wrong["grad"])


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "gspo_token", "gmpo", "sapo"])
@pytest.mark.parametrize("old_logp", [LOGP, None])
def test_on_policy_these_have_one_gradient(algorithm: str, old_logp: torch.Tensor | None) -> None:
    objective = build(algorithm, beta=0.0, **EPS)
    batch = with_weight(objective, with_advantage(objective, replace(BATCH, old_logp=old_logp)))
    logp = LOGP.clone().requires_grad_()
    policy_loss(objective, batch, logp).loss.backward()
    close(logp.grad, "gspo.on_policy_grad")
    close(logp.grad, "grpo.cases.on_policy.grad")


# ---- rewards shaped by entropy -----------------------------------------------------------------


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_rewards_of_tokens_are_shaped_and_conserved(scope: str) -> None:
    right, wrong = polarity(BATCH)
    assert right.nonzero().squeeze(1).tolist() == at("entropy_shaping.right")
    assert wrong.nonzero().squeeze(1).tolist() == at("entropy_shaping.wrong")
    advantage = with_advantage(build("gtpo", scope=scope), BATCH).advantage
    for name, rows in (("right", right), ("wrong", wrong)):
        expected = tensor(f"entropy_shaping.shaped.{scope}.{name}")
        over_all, mine = expected[MASK], MASK & rows[:, None]
        shaped = advantage * (over_all.std(correction=0) + 1e-6) + over_all.mean()
        close(shaped.where(mine, 0.0), expected)
        if name == "right":
            close(shaped[mine].sum(), f"entropy_shaping.shaped.{scope}.conserved")
            close((1.0 + 0.1) * int(mine.sum()), f"entropy_shaping.shaped.{scope}.conserved")


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_rewards_of_answers_are_shaped(scope: str) -> None:
    shaped = tensor(f"entropy_shaping.completions.shaped_{scope}")
    advantage = with_advantage(build("grpo_s", scope=scope), BATCH).advantage
    close(advantage, per_token(standardized(shaped, BATCH.group), MASK))


@pytest.mark.parametrize(("norm", "same"), [("polarity", True), ("batch", False)])
def test_normalized_by_polarity_alphas_cancel(norm: str, same: bool) -> None:
    one, other = (
        with_advantage(build("gtpo", norm=norm, alpha1=a, alpha2=b, eps=0.0), BATCH).advantage
        for a, b in ((1.0, 0.1), (5.0, 0.7))
    )
    assert torch.allclose(one, other, atol=1e-9, rtol=0) == same


# ---- penalties ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "path"),
    [
        ("k1", "k1"),
        ("k2", "k2"),
        ("k3", "k3"),
        ("k2", "policy_to_reference"),
        ("k3_plus", "policy_to_reference"),
        ("ratio_k1", "policy_to_reference"),
        ("ratio_k3", "policy_to_reference"),
        ("k3", "reference_to_policy"),
    ],
)
def test_expected_gradient_over_all_tokens_of_a_vocabulary_of_three(kl: str, path: str) -> None:
    policy = tensor("penalties.categorical.policy")
    reference = tensor("penalties.categorical.reference")
    logits = policy.log().requires_grad_()
    logp = logits.log_softmax(0)
    each = torch.ones(3, 1, dtype=torch.bool)
    d, log_ratio = logp - reference.log(), logp - logp.detach()
    value = PENALTIES[kl](d[:, None], log_ratio[:, None], each).squeeze(1)
    (policy * value).sum().backward()
    close(logits.grad, f"penalties.categorical.{path}")


def test_the_two_directions_of_kl_have_the_gradients_they_are_said_to_have() -> None:
    reference = tensor("penalties.categorical.reference")
    logits = tensor("penalties.categorical.policy").log().requires_grad_()
    logp = logits.log_softmax(0)
    for path, value in (
        ("policy_to_reference", (logp.exp() * (logp - reference.log())).sum()),
        ("reference_to_policy", (reference * (reference.log() - logp)).sum()),
    ):
        (grad,) = torch.autograd.grad(value, logits, retain_graph=True)
        close(grad, f"penalties.categorical.{path}")


# ---- the sampler's numerics, and diagnostics ---------------------------------------------------

LOG_RHO = difference(BATCH.old_logp, BATCH.sampler_logp, MASK)


@pytest.mark.parametrize("kind", at("sampler.rho"))
def test_ratios_of_trainer_and_sampler(kind: str) -> None:
    rho = RATIOS[kind](LOG_RHO, MASK).exp().where(MASK, 0.0)
    close(rho if kind == "token" else rho[:, 0], f"sampler.rho.{kind}")


def test_rejected_answers_can_be_taken_out_of_the_denominator() -> None:
    # A correction of 0 leaves the denominator as it is; a smaller mask does not.
    worked = at("sampler.cases.geometric_rejected")
    kept = CORRECTIONS["geometric_mask"](LOG_RHO, MASK, low=0.8, high=1.25)
    objective = build("dapo", **EPS)
    batch = with_advantage(objective, BATCH)
    batch = replace(batch, mask=MASK & kept.bool())
    assert batch.mask.int().tolist() == worked["mask"]
    check_step(objective, batch, LOGP, worked)
    # Both ways are one but for the number of tokens.
    inside = {"correction": "geometric_mask", "correction_low": 0.8, "correction_high": 1.25}
    close(run("dapo", {**inside, **EPS})[0].loss * 23 / 14, worked["loss"])


def test_bounds_of_a_correction_are_of_the_ratio_and_not_of_its_inverse() -> None:
    kept = CORRECTIONS["token_mask"](LOG_RHO, MASK, low=0.5, high=3.0).bool() & MASK
    assert kept.int().tolist() == at("sampler.masks.token_05_3")
    far(kept.double(), "sampler.masks.wrong_token_inverse_05_3")


def test_veto_drops_an_answer_for_one_token() -> None:
    worked = at("sampler.masks.veto")
    kept = no_veto(tensor(worked["log_rho"]), veto=1e-4)
    assert kept.squeeze(1).int().tolist() == worked["kept"]


def test_a_bad_answer_that_has_become_unlikely_is_dropped() -> None:
    fallen = row_mean(BATCH.sampler_logp - LOGP, MASK).squeeze(1)
    close(fallen, "sampler.masks.off_policy_02.fallen")
    _, grad = run("dapo", {"off_policy_limit": 0.2, **EPS})
    kept = tensor("sampler.masks.off_policy_02.kept")
    close(grad, tensor("sampler.cases.none.grad") * kept[:, None])


@pytest.mark.parametrize("parts", [[range(6)], [[0], [1, 2], [3, 4], [5]]])
def test_diagnostics_however_the_step_is_split(parts: list[list[int]]) -> None:
    objective = build("dapo", dual=3.0, correction="token_truncate", **EPS)
    step = with_weight(objective, with_advantage(objective, BATCH))
    meter = Meter()
    for index in parts:
        part = step.rows(torch.tensor(index))
        width = part.mask.shape[1]
        logp = LOGP[torch.tensor(index), :width]
        observe(meter, objective, part, policy_loss(objective, part, logp), part.entropy)
        observe_sampler(meter, part, part.old_logp)
        observe_correction(meter, part)
    numbers, worked = summary(meter.measured()), at("sampler.diagnostics")
    rho = tensor("sampler.rho.token")[MASK]
    gap = (BATCH.old_logp - BATCH.sampler_logp)[MASK].abs()
    for name, expected in {
        "policy/approxkl_k1": worked["k1"],
        "policy/approxkl_k2": worked["k2"],
        "policy/approxkl_avg": worked["k3"],
        "policy/clipfrac_low": worked["clip_low"],
        "policy/clipfrac_high": worked["clip_high"],
        "policy/clipfrac_avg": worked["clip"],
        "policy/clipfrac_dual": worked["clip_dual"],
        "policy/entropy_avg": worked["entropy"],
        "val/ratio_overflow": 0.0,
        "val/ratio": worked["ratio"],
        "val/ratio_var": worked["ratio_var"],
        "val/ratio_min": tensor("grpo.ratio")[MASK].min().item(),
        "val/ratio_max": tensor("grpo.ratio")[MASK].max().item(),
        "reward/advantages_mean": step.advantage[MASK].mean().item(),
        "reward/advantages_min": min(at("advantages.completions.standardized_eps_1e_4")),
        "reward/advantages_max": max(at("advantages.completions.standardized_eps_1e_4")),
        "policy/correction_mean": tensor("sampler.cases.token_truncate.correction")[MASK]
        .mean()
        .item(),
        "policy/correction_ess": worked["ess"],
        "policy/correction_dropped": 0.0,
        "debug/sampler_kl": worked["sampler_kl"],
        "debug/sampler_k3": worked["sampler_k3"],
        "debug/sampler_ppl_ratio": tensor(worked["log_perplexity_gap"]).exp().mean().item(),
        "debug/sampler_chi2": rho.square().mean().item() - 1,
        "debug/rho_mean": rho.mean().item(),
        "debug/rho_min": rho.min().item(),
        "debug/rho_max": rho.max().item(),
        "debug/sampler_logp_diff_mean": gap.mean().item(),
        "debug/sampler_logp_diff_max": gap.max().item(),
    }.items():
        assert numbers.pop(name) == pytest.approx(expected, abs=1e-9, rel=0), name
    assert numbers == {}  # nothing is measured that is not worked out here


@pytest.mark.parametrize(
    ("row", "gap"), list(enumerate(at("sampler.diagnostics.log_perplexity_gap")))
)
def test_perplexity_of_an_answer_under_trainer_and_sampler(row: int, gap: float) -> None:
    meter = Meter()
    completion = BATCH.rows(torch.tensor([row]))
    observe_sampler(meter, completion, completion.old_logp)
    close(math.log(summary(meter.measured())["debug/sampler_ppl_ratio"]), gap)


@pytest.mark.parametrize(
    ("metric", "other"),
    [
        ("policy/approxkl_k2", "k2_with_padding"),
        ("policy/clipfrac_avg", "clip_either_sign"),
        ("val/ratio_var", "ratio_var_between_rows"),
        ("val/ratio_var", "ratio_var_of_row_means"),
        ("policy/entropy_avg", "entropy_by_answer"),
        ("policy/entropy_avg", "sampled_surprise"),
    ],
)
def test_diagnostics_are_of_tokens_that_are_there(metric: str, other: str) -> None:
    far(run("dapo", EPS)[0].metrics[metric], f"sampler.not_ours.{other}")


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_entropy_from_logits_and_its_gradient(temperature: float) -> None:
    worked = at("sampler.entropy")
    linear = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(4))
    hidden = (tensor(worked["logits"]) * temperature).repeat(4, 1).requires_grad_()
    logp, entropy = token_logp(
        Head(linear=linear), hidden, torch.arange(4), temperature=temperature, megabytes=1
    )
    entropy.sum().backward()
    close(logp.exp(), worked["p"])
    close(entropy, [worked["value"]] * 4)
    close(hidden.grad * temperature, [worked["grad"]] * 4)


# ---- methods next door -------------------------------------------------------------------------


def test_a_critic_gives_the_advantages_of_ppo() -> None:
    worked = at("neighbours.critic")
    objective = build("reinforce_pp", beta=worked["beta"])
    batch = with_advantage(objective, BATCH.rows(torch.tensor(worked["rows"])))
    rewards = token_rewards(batch)
    close(rewards, worked["token_rewards"])
    values = tensor(worked["old_values"])
    estimates = gae(rewards, values, batch.mask, gamma=worked["gamma"], lam=worked["lam"])
    close(estimates, worked["advantage"])
    close((estimates + values).where(batch.mask, 0.0), worked["targets"])
    advantage = whitened(estimates, batch.mask)
    close(advantage, worked["whitened"])
    surrogate = build("composed", clip_low=worked["clip"], clip_high=worked["clip"])
    logp = LOGP[torch.tensor(worked["rows"])]
    check_step(surrogate, replace(batch, advantage=advantage), logp, worked["policy"])


def test_the_loss_of_a_critic() -> None:
    worked = at("neighbours.critic")
    values = tensor(worked["values"]).requires_grad_()
    old_values, targets = tensor(worked["old_values"]), tensor(worked["targets"])
    tokens = clipped_value_loss(values, old_values, targets, value_clip=worked["clip_value"]).loss
    loss = tokens[MASK[:2]].mean()
    loss.backward()
    close(loss, worked["value"]["loss"])
    close(values.grad, worked["value"]["grad"])


def test_preferences_between_pairs_of_answers() -> None:
    worked = at("neighbours.preference")
    beta = worked["beta"]

    def of(logp: torch.Tensor, pairs: slice, form: Any) -> torch.Tensor:
        chosen, rejected = worked["chosen"][pairs], worked["rejected"][pairs]
        return preference_loss(
            logp, BATCH.ref_logp, MASK, torch.tensor(chosen), torch.tensor(rejected),
            beta=beta, form=form,
        )  # fmt: skip

    logp = LOGP.clone().requires_grad_()
    loss = of(logp, slice(None), "dpo")
    loss.backward()
    close(loss, worked["dpo"]["loss"])
    close(logp.grad, worked["dpo"]["grad"])
    for pair, margin in enumerate(worked["margin"]):
        close(of(LOGP, slice(pair, pair + 1), "ipo"), (margin - 1 / (2 * beta)) ** 2)
    close(of(LOGP, slice(None), "ipo"), worked["ipo"])
    far(of(LOGP, slice(None), "ipo"), worked["wrong_ipo_of_means"])
