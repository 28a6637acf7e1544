"""Evidence for the claims of findings: gradients, or real runs of the embedded model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from covey.evaluation.intervals import paired_difference
from covey.lab.plan.findings import FEWEST_PROMPTS, NOTICEABLE_BETA, POINTS
from covey.objective import build, with_advantage
from covey.objective.penalty import PENALTIES, adapted_beta
from covey.policy.schedule import Schedule, Used
from covey.rewards.length import Soft
from covey.step import RowFacts, StepSettings
from covey.types import Batch
from tests.conftest import make_batch
from tests.lab.plan.runs import ran, starting_weights
from tests.objective.laws import make_step, of_answer

ONCE = "train.mini_batches=1"
FAR = (
    "rollout.prompts_per_step=8", "rollout.group_size=8", "train.mini_batches=8",
    "optimizer.learning_rate=1e-3", "optimizer.schedule=constant",
)  # fmt: skip


def moved(one: tuple[str, ...], other: tuple[str, ...], steps: int = 2) -> bool:
    """Whether two runs end in different weights."""
    return not torch.equal(ran(*one, steps=steps).weights, ran(*other, steps=steps).weights)


@pytest.mark.parametrize(
    ("settings", "counterpart"),
    [
        ((ONCE, "objective.dual=3.0"), (ONCE,)),
        ((ONCE, "objective.off_policy_limit=0.001"), (ONCE,)),
        ((ONCE, "objective.name=kl_cov"), (ONCE, "objective.name=dapo")),
        ((ONCE, "train.old_logp=recompute"), (ONCE,)),
        (
            ("objective.name=grpo_s", "train.old_logp=sampler"),
            ("objective.name=grpo_s", "train.old_logp=recompute"),
        ),
        (("objective.kl=k2", "reference.kind=renewed"), ()),
        (("filter.max_rounds=9",), ()),
        (("overlap.max_staleness=1",), ()),
        (
            ("filter.skip_zero_gradient=true", "objective.beta=0.1", "rollout.temperature=0.3"),
            ("objective.beta=0.1", "rollout.temperature=0.3"),
        ),
        (("objective.name=gtpo", "length_penalty.name=soft"), ("objective.name=gtpo",)),
        (("length_penalty.name=soft", "length_penalty.limit=60", "length_penalty.cache=12"), ()),
        (("objective.correction_high=5.0",), ()),
        (("adapter.alpha=16",), ()),
        (("scoring.workers=3",), ()),
        (("objective.kl_horizon=500",), ()),
    ],
    ids=lambda value: ",".join(value),
)
def test_settings_without_effect_change_no_weight(
    settings: tuple[str, ...], counterpart: tuple[str, ...]
) -> None:
    assert not moved(settings, counterpart)


def test_an_off_policy_limit_acts_in_one_update_if_engine_and_trainer_differ() -> None:
    limit = "objective.off_policy_limit=0.001"
    assert ran(ONCE, limit)["policy/off_policy_dropped"] == 0
    assert ran(ONCE, limit, "model.dtype=bfloat16")["policy/off_policy_dropped"] > 0


def test_other_settings_do_change_weights() -> None:
    assert moved((ONCE, "objective.name=dapo"), (ONCE,))
    assert moved((), ("objective.clip_high=0.01",))
    assert moved((ONCE, "objective.beta=0.04"), (ONCE,))


def test_clip_ranges_of_tokens_and_of_sequences_do_not_suit_each_other() -> None:
    wide = ("objective.clip_low=0.1", "objective.clip_high=0.1")
    tight = ("objective.clip_low=3e-4", "objective.clip_high=4e-4")
    for name in ("gspo", "grpo_s"):
        sequences = ran(f"objective.name={name}", *wide, steps=2)
        assert [step["policy/clipfrac_avg"] for step in sequences.steps] == [0.0, 0.0]
        assert sequences["val/ratio_var"] > 0  # ratios do move
        far = ran(f"objective.name={name}", *wide, *FAR)
        assert far["policy/clipfrac_avg"] > 0.1  # once the policy has moved far
        cut = ran(f"objective.name={name}", *tight, steps=2)
        assert cut.steps[0]["policy/clipfrac_avg"] > 0.1
    tokens = [ran("objective.name=grpo", *bounds, steps=2) for bounds in (wide, tight)]
    few, many = (run.steps[0]["policy/clipfrac_avg"] for run in tokens)
    assert 0 < 5 * few < many


def test_a_reference_renewed_with_the_policy_gives_no_penalty() -> None:
    settings = (ONCE, "objective.beta=0.1", "reference.kind=renewed")
    renewed = ran(*settings, "reference.every=1", steps=3)
    assert [step["objective/kl_avg"] for step in renewed.steps] == [0.0, 0.0, 0.0]
    assert torch.equal(renewed.weights, ran(ONCE, steps=3).weights)
    assert ran(*settings, "reference.every=2", steps=2)["objective/kl_avg"] > 0


def test_an_exact_engine_needs_no_correction_unless_it_truncates() -> None:
    correction = "objective.correction=token_truncate"
    exact = ran(correction, "objective.veto=0.001")
    assert exact["policy/correction_mean"] == pytest.approx(1.0, abs=1e-5)
    assert exact["policy/correction_dropped"] == 0.0
    truncated = ran("rollout.top_p=0.8", correction)
    assert truncated["policy/correction_mean"] < 0.99
    assert ran("rollout.top_p=0.8")["debug/rho_mean"] < 0.99 < ran()["debug/rho_mean"]


def test_cold_completions_are_equal() -> None:
    flat = {t: ran(f"rollout.temperature={t}", "rollout.prompts_per_step=16", "rollout.group_size=8")
            ["rollout/zero_variance_groups"] for t in (1.0, 0.3)}  # fmt: skip
    assert flat[1.0] < 0.2
    assert flat[0.3] > 0.5
    assert ran("rollout.top_k=1")["rollout/zero_variance_groups"] == 1.0


def test_learning_rates_of_zero_and_of_a_long_warm_up() -> None:
    assert torch.equal(ran("optimizer.learning_rate=0").weights, starting_weights())
    rates = [
        Schedule(peak=1.0, shape="linear", warmup_steps=warmup, total_steps=400)(step, Used())
        for warmup in (800, 399)
        for step in range(400)
    ]
    assert (max(rates[:400]), max(rates[400:])) == (0.5, 1.0)


def with_rewards(*rewards: float, groups: int = 1) -> Batch:
    batch = make_batch(rows=len(rewards), groups=groups)
    return replace(batch, rewards=torch.tensor(rewards, dtype=torch.float64))


@pytest.mark.parametrize(("ddof", "size"), [(1, 0.5**0.5), (0, 1.0)])
@pytest.mark.parametrize("better", [1.0, 0.51, 700.0])
def test_advantages_of_two_completions_only_show_their_order(
    ddof: int, size: float, better: float
) -> None:
    batch = with_rewards(better, 0.5)
    advantage = with_advantage(build("grpo", beta=0.0, ddof=ddof), batch).advantage
    assert of_answer(advantage, batch.mask).tolist() == pytest.approx([size, -size], rel=1e-3)


def test_beta_cancels_in_a_group_of_correct_completions() -> None:
    step = make_step(2, rows=8, groups=2, empty=False)
    batch = replace(step.batch, rewards=torch.ones(8, dtype=torch.float64))
    found = [
        with_advantage(build("grpo", beta=b, kl="k1", kl_in="reward", eps=0.0), batch).advantage
        for b in (1e-4, 1.0)
    ]
    torch.testing.assert_close(*found)
    assert found[0].abs().max() > 0.5
    small, large = (
        with_advantage(build("dr_grpo", length=9, beta=b, kl="k1", kl_in="reward"), batch).advantage
        for b in (1e-4, 1.0)
    )
    torch.testing.assert_close(small * 1e4, large)


def test_a_penalty_in_an_ignored_reward_is_lost() -> None:
    batch = make_step(4).batch
    for name in ("gtpo", "grpo_s"):
        options = {"beta": 0.5, "kl": "k1", "kl_in": "reward"}
        found = [with_advantage(build(name, **o), batch).advantage for o in ({}, options)]
        assert torch.equal(*found)


@pytest.mark.parametrize(("kl", "noise"), [("k1", True), ("k2", False), ("k3", False)])
def test_k1_in_the_loss_is_noise(kl: str, noise: bool) -> None:
    """The expected gradient over all tokens of a distribution, for two different references."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)[None]
    for reference in ([0.0, 0.0, 0.0, 0.0], [3.0, -2.0, 0.0, 1.0]):
        d = logp - torch.tensor([reference], dtype=torch.float64).log_softmax(1)
        value = PENALTIES[kl](d, torch.zeros_like(d), torch.ones_like(d, dtype=torch.bool))
        expected = (logp.detach().exp() * value).sum()
        (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
        assert (float(gradient.abs().max()) < 1e-15) == noise


def test_more_mini_batches_than_prompts_split_every_group() -> None:
    batch = with_rewards(*[0.0] * 16, groups=2)
    settings = StepSettings(
        mini_batches=4, epochs=1, micro_batch_tokens=999, old_logp_from_sampler=True,
        learning_rate=lambda *_: 0.0, seed=0,
    )  # fmt: skip
    facts = RowFacts.of(with_advantage(build("grpo", beta=0.0), batch), skip=False)
    steps = [batch.group[index] for index in facts.mini_batches(settings, step=1)]
    assert [len(rows) for rows in steps] == [4, 4, 4, 4]
    assert all(len(rows.unique()) == 1 for rows in steps)  # half a group each


def test_a_length_penalty_beyond_the_longest_completion() -> None:
    assert [Soft(limit=60, cache=12).of(n) for n in range(49)] == [0.0] * 49
    assert Soft(limit=60, cache=13).of(48) < 0


def test_an_adaptive_beta_with_too_few_steps() -> None:
    """The largest change by 20 steps of 128 completions, and by 100."""

    def after(steps: int) -> float:
        beta = 1.0
        for _ in range(steps):
            beta = adapted_beta(beta, 1e9, target=0.1, horizon=10_000.0, rollouts=128)
        return beta

    assert after(20) < NOTICEABLE_BETA < after(100)


def test_too_few_prompts_cannot_show_five_points() -> None:
    for prompts in (FEWEST_PROMPTS - 1, FEWEST_PROMPTS):
        gained = int(POINTS * prompts)
        best = paired_difference([1.0] * gained + [0.0] * (prompts - gained), [0.0] * prompts)
        assert (best.p_value < 0.05) == (prompts == FEWEST_PROMPTS)
