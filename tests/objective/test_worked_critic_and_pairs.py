"""Numbers worked out by other code for PPO with a critic, DPO and IPO, in float64 to 1e-9."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from covey import functional
from covey.objective import build, with_advantage, with_marks, with_weight
from covey.objective.advantage import whitened
from covey.objective.algorithms.ppo import explained_variance, gae, length_lambda
from covey.types import Batch
from tests.objective.worked import Worked

WORKED = Worked("worked_critic_and_pairs.json")
at, tensor, close, far = WORKED.at, WORKED.tensor, WORKED.close, WORKED.far
INPUTS = {name: tensor(values) for name, values in at("inputs").items()}
INPUTS |= {"mask": INPUTS["mask"].bool(), "group": INPUTS["group"].long()}
MASK = INPUTS["mask"]
ROWS = ("logp", "old_logp", "ref_logp", "mask", "rewards", "group")


def run(name: str, **options: Any) -> tuple[functional.LossOutput, torch.Tensor]:
    """Return what the public function gives, and the gradient."""
    logp = INPUTS["logp"].clone().requires_grad_()
    more = ("values",) if name == "ppo" else ()
    given = {key: INPUTS[key] for key in (*ROWS, *more)}
    output = functional.loss(name, **{**given, "logp": logp}, **options)
    output.loss.backward()
    assert logp.grad is not None
    return output, logp.grad


def test_advantages_over_values() -> None:
    rewards, values = tensor("critic.token_rewards"), INPUTS["values"]
    estimates = gae(rewards, values, MASK, gamma=1.0, lam=0.95)
    close(estimates, "critic.advantages_lam_095")
    close(whitened(estimates, MASK), "critic.whitened")
    targets = gae(rewards, values, MASK, gamma=1.0, lam=1.0) + values
    close(targets.where(MASK, 0.0), "critic.targets_lam_1")
    given = {key: INPUTS[key] for key in ("mask", "rewards", "group", "values")}
    given |= {"old_logp": INPUTS["old_logp"], "ref_logp": INPUTS["ref_logp"]}
    close(functional.advantages("ppo", **given), "critic.whitened")
    close(functional.advantages("ppo", **given, whiten=False), "critic.advantages_lam_095")


def test_lambda_by_length() -> None:
    close(length_lambda(MASK, 0.5), "critic.lambda_by_length_alpha_05")


@pytest.mark.parametrize(
    ("case", "name", "options"),
    [
        ("critic.policy", "ppo", {}),
        ("critic.policy_by_length", "ppo", {"alpha": 0.5, "whiten": False}),
        ("pairs.dpo", "dpo", {}),
        ("pairs.ipo", "ipo", {}),
    ],
)
def test_loss_and_gradient(case: str, name: str, options: dict[str, Any]) -> None:
    output, gradient = run(name, **options)
    close(output.loss, f"{case}.loss")
    close(gradient, f"{case}.grad")


def test_the_loss_of_the_critic() -> None:
    values = tensor("critic.new_values").requires_grad_()
    output, _ = run("ppo", new_values=values)
    assert output.value_loss is not None
    output.value_loss.backward()
    close(output.value_loss, "critic.value.loss")
    close(values.grad, "critic.value.grad")
    # Of 23 tokens: where the value has moved away by more than 0.2 and the clipped error is larger.
    clipped = (tensor("critic.value.grad") == 0) & MASK
    assert output.metrics["critic/clipfrac"] == pytest.approx(int(clipped.sum()) / 23)


def test_how_much_a_critic_explains() -> None:
    targets = tensor("critic.targets_lam_1")
    assert explained_variance(targets, targets, MASK) == 1.0
    assert explained_variance(targets * 0 + 3.0, targets, MASK) == pytest.approx(0.0)
    assert explained_variance(-targets, targets, MASK) == pytest.approx(-3.0)
    assert explained_variance(targets, targets * 0, MASK) != explained_variance(
        targets, targets, MASK
    )
    given, _ = run("ppo")
    chosen, wanted = INPUTS["values"][MASK], targets[MASK]
    expected = 1 - float((wanted - chosen).var() / wanted.var())
    assert given.metrics["critic/explained_variance"] == pytest.approx(expected)


def paired(name: str) -> Batch:
    """Return the step with its pairs marked."""
    objective, blank = build(name), torch.zeros(6, 5, dtype=torch.long)
    batch = Batch(
        prompt_tokens=blank[:, :1], prompt_lengths=torch.ones(6, dtype=torch.long), tokens=blank,
        lengths=MASK.sum(dim=1), mask=MASK, sampler_logp=INPUTS["old_logp"],
        rewards=INPUTS["rewards"], success=INPUTS["rewards"] > 0, group=INPUTS["group"],
        truncated=torch.zeros(6, dtype=torch.bool), ref_logp=INPUTS["ref_logp"],
    )  # fmt: skip
    batch = with_weight(objective, with_advantage(objective, batch))
    return with_marks(objective, batch, INPUTS["logp"])


@pytest.mark.parametrize(("name", "path"), [("dpo", "margin"), ("ipo", "margin_per_token")])
def test_pairs_and_their_margins(name: str, path: str) -> None:
    batch = paired(name)
    assert batch.advantage is not None
    assert batch.marked is not None
    signs = batch.advantage[:, 0].sign()
    for number, (chosen, rejected) in enumerate(at("pairs.pairs")):
        assert (signs[chosen], signs[rejected]) == (1.0, -1.0)
        for row in (chosen, rejected):
            close(batch.marked[row], [at(f"pairs.{path}")[number]] * 5)
    assert signs[[2, 4]].tolist() == [0.0, 0.0]
    assert batch.marked[[2, 4]].isnan().all()


# Identities.


def gradient(name: str, given: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    logp = given["logp"].clone().requires_grad_()
    functional.loss(name, **{**given, "logp": logp}, **options).loss.backward()
    assert logp.grad is not None
    return logp.grad


PLAIN = {key: INPUTS[key] for key in ("logp", "old_logp", "mask", "rewards", "group")}


def test_without_values_and_discount_ppo_is_reinforce() -> None:
    options = {"lam": 1.0, "whiten": False, "beta": 0.0, "clip_low": 0.2, "clip_high": 0.2}
    ppo = gradient("ppo", {**PLAIN, "values": torch.zeros(6, 5).double()}, **options)
    close(ppo, gradient("composed", PLAIN, advantage="none"))


def test_values_that_are_the_mean_of_the_group_give_dr_grpo() -> None:
    mean = tensor([1 / 3, 2 / 3])[INPUTS["group"]][:, None].expand(6, 5)
    options = {"lam": 1.0, "whiten": False, "beta": 0.0}
    ppo = gradient("ppo", {**PLAIN, "values": mean}, **options)
    close(ppo, gradient("composed", PLAIN, advantage="centered"))


def test_a_completion_without_a_score_is_in_neither_loss() -> None:
    rewards = INPUTS["rewards"].clone()
    rewards[2] = torch.nan
    rest = torch.tensor([0, 1, 3, 4, 5])
    found = []
    for rows in (torch.arange(6), rest):
        given = {k: (rewards if k == "rewards" else INPUTS[k])[rows] for k in (*ROWS, "values")}
        values = tensor("critic.new_values")[rows].requires_grad_()
        logp = given["logp"].clone().requires_grad_()
        out = functional.loss("ppo", **{**given, "logp": logp}, new_values=values)
        (out.loss + out.value_loss).backward()
        found.append((logp.grad, values.grad))
    for whole, without in zip(*found, strict=True):
        close(whole[rest], without)
        assert not whole[2].any()


def test_where_policy_and_reference_agree_dpo_is_reinforce_of_the_extremes() -> None:
    given = {**PLAIN, "logp": INPUTS["ref_logp"], "ref_logp": INPUTS["ref_logp"]}
    sign = tensor([1, -1, 0, 1, 0, -1])[:, None].expand(6, 5).where(MASK, 0.0)
    close(gradient("dpo", given), -sign * 0.1 / 2 / 2)
    tokens = MASK.sum(dim=1, keepdim=True).double()
    close(gradient("ipo", given), -sign / (0.1 * tokens) / 2)


def test_a_group_of_equal_rewards_has_no_pair() -> None:
    rewards = INPUTS["rewards"].clone()
    rewards[3:] = 0.7
    given = {**PLAIN, "ref_logp": INPUTS["ref_logp"], "rewards": rewards}
    found = gradient("dpo", given)
    assert not found[2:].any()
    # The mean is over the one pair that is left.
    close(found[:2], 2 * tensor("pairs.dpo.grad")[:2])
    flat = {**given, "rewards": torch.ones(6)}
    assert not gradient("dpo", flat).any()
    assert float(functional.loss("dpo", **flat).loss) == 0.0


def test_ties_go_to_the_shorter_completion_then_to_the_earlier() -> None:
    rewards = tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    given = {key: INPUTS[key] for key in ("mask", "group", "old_logp", "ref_logp")}
    found = functional.advantages("dpo", **given, rewards=rewards)[:, 0].sign()
    assert found.tolist() == [0, 1, -1, 1, 0, -1]
    even = torch.ones(6, 5, dtype=torch.bool)
    found = functional.advantages("dpo", **{**given, "mask": even}, rewards=rewards)[:, 0].sign()
    assert found.tolist() == [1, 0, -1, 1, -1, 0]
