"""Numbers worked out by other code: parts, pass@k, kept sets, distillation, stale data, rows.

All is float64 and must agree to 1e-9. Six completions of two prompts run through most.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey import functional
from covey.objective import build, with_advantage, with_marks, with_weight
from covey.objective.advantage import best_of, kept_rows, standardized, subset_gains
from covey.objective.algorithms.marked import positive_share, positive_value_share
from covey.types import Batch
from tests.objective.worked import Worked

WORKED = Worked("worked_examples_2.json")
NUMBERS = WORKED.numbers
at, tensor, close, far = WORKED.at, WORKED.tensor, WORKED.close, WORKED.far


def inputs_of(section: dict[str, Any]) -> dict[str, torch.Tensor]:
    given = {name: tensor(values) for name, values in section.items()}
    whole = {name: given[name].long() for name in ("group", "rollout") if name in given}
    return {**given, **whole, "mask": given["mask"].bool()}


INPUTS = inputs_of(at("inputs"))
ROWS = inputs_of(at("rows.inputs"))
PLAIN = ("logp", "old_logp", "mask", "rewards", "group")
# What an algorithm takes beside these.
MORE = {
    "gdpo": ("parts",),
    "opd": ("teacher_logp",),
    "sdpo": ("teacher_logp",),
    "decoupled_ppo": ("sampler_logp",),
}
LENGTH = {"length": 8}
GRPO_ROWS = {"beta": 0.0}
TOKEN_ROWS = {"weights": "token_mean"}

# Case, algorithm, options: loss and gradient.
LOSSES: list[tuple[str, str, dict[str, Any]]] = [
    ("gdpo.plain", "gdpo", {}),
    ("gdpo.weighted", "gdpo", {"part_weights": (1.0, 0.25)}),
    ("maxrl.plain", "maxrl", LENGTH),
    ("pkpo.loo1", "pkpo", {"k": 2, **LENGTH}),
    ("pkpo.centred", "pkpo", {"k": 2, "baseline": "centred", **LENGTH}),
    ("gfpo.shortest", "gfpo", {"keep": 2}),
    ("gfpo.rate", "gfpo", {"keep": 2, "metric": "rate"}),
    ("distillation.plain", "opd", {}),
    ("distillation.with_task", "opd", {"discount": 1.0, "task": 1.0}),
    ("drift.bapo_062", "bapo", {"target": 0.62}),
    ("drift.bapo_09", "bapo", {"target": 0.9}),
    ("drift.m2po_004", "m2po", {"tau": 0.04}),
    ("drift.m2po_002", "m2po", {"tau": 0.02}),
    ("rows.rollout_mean", "grpo", GRPO_ROWS),
    ("rows.token_mean", "composed", TOKEN_ROWS),
    ("scalerl.plain", "scalerl", {}),
    ("decoupled.plain", "decoupled_ppo", {}),
]


def run(case: str, name: str, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradient through the public function."""
    source = ROWS if case.startswith("rows.") else INPUTS
    given = {k: source[k] for k in (*PLAIN, *MORE.get(name, ()))}
    if case.startswith("rows."):
        given["rollout"] = source["rollout"]
    if name in ("scalerl", "bapo", "m2po"):  # their ratios are to the sampler
        sampler = source["sampler_logp"] if name == "scalerl" else given["old_logp"]
        given["sampler_logp"] = sampler
        del given["old_logp"]
    given["logp"] = given["logp"].clone().requires_grad_()
    output = functional.loss(name, **given, **options)
    output.loss.backward()
    return output.loss.detach(), given["logp"].grad


@pytest.mark.parametrize(("case", "name", "options"), LOSSES)
def test_loss_and_gradient(case: str, name: str, options: dict[str, Any]) -> None:
    section, number = case.split(".")
    loss, gradient = run(case, name, options)
    close(loss, f"{section}.cases.{number}.loss")
    close(gradient, f"{section}.cases.{number}.grad")


def test_no_case_is_forgotten() -> None:
    worked = {f"{s}.{name}" for s, n in NUMBERS.items() for name in n.get("cases", {})}
    worked.remove("kept_set.grpo on the kept set")  # tests/training/test_mask_replay.py
    assert worked == {case for case, _, _ in LOSSES}


@pytest.mark.parametrize(
    ("path", "name", "options"),
    [
        ("gdpo.advantages", "gdpo", {}),
        ("gdpo.gated_advantages", "gdpo", {"gate": 0}),
        ("maxrl.advantages", "maxrl", LENGTH),
        ("pkpo.advantages.loo1", "pkpo", {"k": 2, **LENGTH}),
        ("pkpo.advantages.centred", "pkpo", {"k": 2, "baseline": "centred", **LENGTH}),
        ("gfpo.advantages", "gfpo", {"keep": 2}),
        ("scalerl.advantages", "scalerl", {}),
        ("distillation.advantages.discount 0", "opd", {}),
        ("distillation.advantages.discount 1", "opd", {"discount": 1.0}),
        ("distillation.advantages.discount 0", "sdpo", {}),
        ("distillation.advantages.discount 1 + task", "opd", {"discount": 1.0, "task": 1.0}),
    ],
)
def test_advantages(path: str, name: str, options: dict[str, Any]) -> None:
    given = {k: INPUTS[k] for k in ("mask", "rewards", "group", *MORE.get(name, ()))}
    actual = functional.advantages(name, **given, old_logp=INPUTS["old_logp"], **options)
    expected = tensor(path)
    if expected.ndim == 1:
        expected = expected[:, None].expand_as(actual).where(INPUTS["mask"], 0.0)
    close(actual, expected)


@pytest.mark.parametrize("case", [case for case in at("pkpo.s") if not case.endswith("none")])
def test_gains_of_subsets(case: str) -> None:
    k, baseline = case.removeprefix("k=").split()
    rewards = tensor("pkpo.rewards_of_one_group")
    close(subset_gains(rewards, k=int(k), baseline=baseline), at("pkpo.s")[case])


@pytest.mark.parametrize("k", at("pkpo.best_of"))
def test_best_of_k_is_the_mean_over_subsets(k: str) -> None:
    rewards = tensor("pkpo.rewards_of_one_group").sort().values
    close(best_of(rewards, int(k)), at("pkpo.best_of")[k])


def test_best_of_all_is_the_pass_at_k_of_verl_before_its_division() -> None:
    rewards = tensor("pkpo.rewards_of_one_group")
    gains = subset_gains(rewards, k=4, baseline="loo1")
    close(gains / (rewards.std() + 1e-6), "pkpo.verl_grpo_passk")


@pytest.mark.parametrize(("metric", "path"), [("length", "kept_shortest"), ("rate", "kept_reward_per_token")])  # fmt: skip
def test_kept_completions(metric: Any, path: str) -> None:
    lengths = INPUTS["mask"].sum(dim=1)
    kept = kept_rows(INPUTS["rewards"], lengths, INPUTS["group"], keep=2, metric=metric)
    close(kept, f"gfpo.{path}")


def test_rejected_tokens_stay_in_the_denominator() -> None:
    far(run("", "gfpo", {"keep": 2})[0], "gfpo.not_ours.loss")


def drifted(name: str, **options: Any) -> Batch:
    """Return the step of the worked numbers with the marks of bapo or m2po."""
    objective = build(name, **options)
    lengths = INPUTS["mask"].sum(dim=1)
    blank = torch.zeros(6, 5, dtype=torch.long)
    batch = Batch(
        prompt_tokens=blank[:, :1], prompt_lengths=torch.ones(6, dtype=torch.long), tokens=blank,
        lengths=lengths, mask=INPUTS["mask"], sampler_logp=INPUTS["old_logp"],
        rewards=INPUTS["rewards"], success=INPUTS["rewards"] > 0, group=INPUTS["group"],
        truncated=torch.zeros(6, dtype=torch.bool), old_logp=INPUTS["old_logp"],
    )  # fmt: skip
    batch = with_weight(objective, with_advantage(objective, batch))
    return with_marks(objective, batch, INPUTS["logp"])


@pytest.mark.parametrize("target", at("drift.bounds"))
def test_bounds_open_until_good_tokens_have_their_share(target: str) -> None:
    batch = drifted("bapo", target=float(target))
    assert batch.advantage is not None
    assert batch.marked is not None
    low, high = at("drift.bounds")[target]
    close(batch.marked, torch.full_like(batch.marked, low).masked_fill(batch.advantage > 0, high))


def test_shares_of_good_tokens() -> None:
    ratio = (INPUTS["logp"] - INPUTS["old_logp"]).exp()
    advantage = drifted("bapo").advantage
    assert advantage is not None
    close(positive_share(ratio, advantage, 0.6, 1.2), "drift.share_at_start")
    for measure, share in (("gradient", positive_share), ("value", positive_value_share)):
        found = [share(ratio, advantage, low, 1.2) for low in at("drift.shares.low")]
        close(found, f"drift.shares.{measure}")


@pytest.mark.parametrize("tau", at("drift.m2po_kept"))
def test_tokens_that_drifted_too_far_are_dropped(tau: str) -> None:
    marked = drifted("m2po", tau=float(tau)).marked
    assert marked is not None
    close(INPUTS["mask"] & ~marked, at("drift.m2po_kept")[tau])


def test_weights_of_the_behaviour_policy() -> None:
    objective = build("decoupled_ppo")
    batch = replace(drifted("bapo"), sampler_logp=INPUTS["sampler_logp"], marked=None)
    factor = with_weight(objective, batch).correction
    assert factor is not None
    close(factor.where(INPUTS["mask"], 0.0), "decoupled.behaviour_weight")


# Identities.


def test_the_live_form_of_distillation_is_ratio_k3_to_the_teacher() -> None:
    given = {k: INPUTS[k] for k in PLAIN} | {"rewards": torch.zeros(6)}
    logp = INPUTS["logp"].clone().requires_grad_()
    options = {"beta": 1.0, "kl": "ratio_k3", "weights": "token_mean"}
    given |= {"logp": logp, "ref_logp": INPUTS["teacher_logp"]}
    output = functional.loss("composed", **given, **options)
    output.loss.backward()
    close(output.loss, "distillation.live.loss")
    close(logp.grad, "distillation.live.grad")


def gradient_of(name: str, given: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    logp = given["logp"].clone().requires_grad_()
    functional.loss(name, **{**given, "logp": logp}, **options).loss.backward()
    assert logp.grad is not None
    return logp.grad


def test_on_policy_distillation_is_k2_to_the_teacher() -> None:
    given = {k: INPUTS[k] for k in PLAIN} | {"rewards": torch.zeros(6), "old_logp": INPUTS["logp"]}
    teacher = INPUTS["teacher_logp"]
    ours = gradient_of("opd", {**given, "teacher_logp": teacher})
    theirs = gradient_of("composed", {**given, "ref_logp": teacher}, beta=1.0, kl="k2")
    close(ours, theirs)


def test_keeping_every_completion_is_grpo_with_a_token_mean() -> None:
    given = {k: INPUTS[k] for k in PLAIN}
    close(gradient_of("gfpo", given, keep=3), gradient_of("dapo", given, clip_high=0.2))


def test_maxrl_with_two_binary_rewards_is_rloo() -> None:
    given = {"mask": torch.ones(4, 1), "rewards": tensor([1, 0, 1, 1]), "group": torch.tensor([0, 0, 1, 1])}  # fmt: skip
    maxrl = functional.advantages("maxrl", **given, length=1)
    assert torch.equal(maxrl, functional.advantages("rloo", **given, beta=0.0))
    assert maxrl.squeeze(1).tolist() == [1.0, -1.0, 0.0, 0.0]


def test_gdpo_with_one_part_is_grpo_times_a_number() -> None:
    given = {k: INPUTS[k] for k in ("mask", "rewards", "group")}
    one = functional.advantages("gdpo", **given, parts=INPUTS["rewards"][:, None])
    grpo = functional.advantages("grpo", **given)
    factors = (one / grpo)[INPUTS["mask"]]
    close(factors, factors[:1].expand_as(factors))
    # sqrt(G / ((G - 1) f)) with G = 3 and all groups mixed, but for the last degree of freedom.
    assert float(factors[0]) == pytest.approx((6 / 5) ** -0.5 * (3 / 2) ** 0.5, rel=1e-5)


def test_a_part_that_cannot_be_scored_takes_its_completion_out_of_every_statistic() -> None:
    parts = INPUTS["parts"].clone()
    parts[1, 1] = torch.nan
    given = {k: INPUTS[k] for k in ("mask", "rewards", "group")}
    ours = functional.advantages("gdpo", **given, parts=parts)
    rest = torch.tensor([0, 2, 3, 4, 5])
    without = functional.advantages(
        "gdpo", **{k: v[rest] for k, v in given.items()}, parts=parts[rest]
    )
    close(ours[rest], without)
    assert not ours[1].any()


def test_a_large_part_does_not_drown_a_small_one() -> None:
    parts, group = INPUTS["parts"], INPUTS["group"]
    given = {"mask": INPUTS["mask"], "rewards": INPUTS["rewards"], "group": group}
    one, other = (
        functional.advantages("gdpo", **given, parts=parts * tensor([1.0, s]), eps=0.0)
        for s in (1.0, 10.0)
    )
    close(one, other)
    sums = [standardized((parts * tensor([1.0, s])).sum(dim=1), group) for s in (1.0, 10.0)]
    far(*sums)


def test_sdpo_bounds_the_ratio_and_not_the_advantage() -> None:
    """Two tokens with A = 0.5 and -0.25; the first has become e times, the second half as likely."""
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-2.0, -2.0 + math.log(2)]], dtype=torch.float64)
    out = functional.loss(
        "sdpo", logp=logp, old_logp=old, mask=torch.ones(1, 2, dtype=torch.bool),
        rewards=torch.zeros(1), group=torch.zeros(1, dtype=torch.long),
        teacher_logp=old + torch.tensor([[0.5, -0.25]]).double(),
    )  # fmt: skip
    # -1/2 (2 * 0.5 * -1 + 0.5 * -0.25 * -2)
    assert out.loss.item() == pytest.approx(0.375, abs=1e-12)
    (gradient,) = torch.autograd.grad(out.loss, logp)
    assert gradient.tolist() == [pytest.approx([-0.5, 0.0625], abs=1e-12)]
