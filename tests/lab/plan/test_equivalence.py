"""Algorithms that a plan calls equivalent have equal gradients, and others do not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.config import Config, load_config
from covey.config.resolve import resolve
from covey.lab.plan.equivalence import (
    Setup,
    coincidences,
    equivalent_algorithms,
    normal_form,
    setup_of,
    up_to_a_factor,
)
from covey.objective import ALGORITHMS, Objective, with_weight
from tests.objective.laws import CASES, Step, descend, gradient_of, make_step, objective_of

SEEDS = range(3)
# It differs from maxrl in groups without success alone, which these steps do not have.
LEFT_OUT = {"maxrl, all wrong"}
PAIRED = {"dpo", "ipo"}
"""Their beta is the scale of a pair, and they have no `kl`."""


def config_of(*settings: str) -> Config:
    return resolve(load_config("arithmetic", settings))


def step_of(seed: int, *, on_policy: bool, rows: int = 10, width: int = 6, groups: int = 3) -> Step:
    step = make_step(seed, rows=rows, width=width, groups=groups, empty=False)
    # The engine is exact; on policy, the policy is the one that generated.
    assert step.batch.old_logp is not None
    old = step.logp if on_policy else step.batch.old_logp
    return Step(replace(step.batch, old_logp=old, sampler_logp=old), step.logp)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=1e-12)


def objectives(**options: Any) -> dict[str, Objective]:
    return {
        case: objective_of(case, **options)
        for case, (name, _) in CASES.items()
        if case not in LEFT_OUT and name not in PAIRED
    }


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.0},
        {"beta": 0.1, "kl": "k3", "kl_in": "loss"},
        {"beta": 0.0, "off_policy_limit": 0.05, "entropy_bonus": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("updates", [1, 4])
def test_equal_normal_forms_mean_equal_gradients_for_every_pair(
    updates: int, options: dict[str, Any]
) -> None:
    config = config_of(f"train.mini_batches={updates}")
    setups = {n: Setup(config=config, objective=o) for n, o in objectives(**options).items()}
    forms = {name: normal_form(setup) for name, setup in setups.items()}
    steps = [step_of(seed, on_policy=updates == 1) for seed in SEEDS]
    gradients = {n: [gradient_of(s.objective, step) for step in steps] for n, s in setups.items()}
    pairs = 0
    for a, b in itertools.combinations(setups, 2):
        equal = all(same(x, y) for x, y in zip(gradients[a], gradients[b], strict=True))
        assert (forms[a] == forms[b]) == equal, (a, b)
        pairs += equal
    # grpo's family with its dual clip, dapo's with bapo, m2po and decoupled_ppo, and grpo_s with
    # either mean; else gspo_token.
    # Without turns gigpo is grpo. With the same teacher sdpo would be opd.
    assert pairs == (21 + 28 + 1 + 1 if updates == 1 else 1 + 1)


@pytest.mark.parametrize(
    ("settings", "shape", "pair"),
    [
        (["rollout.prompts_per_step=1"], {"groups": 1}, ("lite_ppo", "dapo")),
        (["rollout.prompts_per_step=1"], {"groups": 1}, ("dapo, equation 8", "dapo")),
        (["rollout.max_tokens=1"], {"width": 1}, ("dapo", "grpo")),
        (["rollout.max_tokens=1"], {"width": 1}, ("luspo", "grpo")),
        (["rollout.max_tokens=1"], {"width": 1}, ("opo", "composed")),
    ],
)
def test_small_steps_make_algorithms_equivalent(
    settings: list[str], shape: dict[str, int], pair: tuple[str, str]
) -> None:
    def form(case: str, *more: str) -> tuple[dict[str, Any], Objective]:
        config = config_of("train.mini_batches=1", *more)
        if case == "composed":
            own = ["objective.name=composed", "objective.advantage=centered"]
            config = config_of("train.mini_batches=1", *own, *more)
            return normal_form(setup_of(config)), setup_of(config).objective
        setup = Setup(config=config, objective=objective_of(case, beta=0.0))
        return normal_form(setup), setup.objective

    (one, a), (two, b) = (form(case, *settings) for case in pair)
    assert one == two
    steps = [_one_token(step_of(seed, on_policy=True, **shape)) for seed in SEEDS]
    assert all(same(gradient_of(a, step), gradient_of(b, step)) for step in steps)
    assert form(pair[0])[0] != form(pair[1])[0]  # with steps of the usual size
    steps = [step_of(seed, on_policy=True) for seed in SEEDS]
    assert not all(same(gradient_of(a, step), gradient_of(b, step)) for step in steps)


def _one_token(step: Step) -> Step:
    if step.logp.shape[1] > 1:
        return step
    return Step(replace(step.batch, mask=torch.ones_like(step.batch.mask)), step.logp)


def test_token_weights_do_not_matter_in_a_mini_batch_of_one() -> None:
    settings = ["rollout.prompts_per_step=2", "rollout.group_size=4", "train.mini_batches=8"]
    alone = {n: config_of(f"objective.name={n}", "objective.beta=0", "objective.clip_high=0.2", *settings)
             for n in ("grpo", "dapo")}  # fmt: skip
    (finding,) = coincidences(alone)
    assert finding.title == "grpo and dapo are the same algorithm here"
    batch, logp = step_of(1, on_policy=False)
    grpo, dapo = (setup_of(config).objective for config in alone.values())
    whole = [o.advantage(batch) for o in (grpo, dapo)]
    assert torch.equal(*whole)
    for row in range(len(batch)):
        index = torch.tensor([row])
        rows = replace(batch, advantage=whole[0]).rows(index)
        part = logp[index][:, : rows.mask.shape[1]]
        found = [descend(o, with_weight(o, rows), part)[1] for o in (grpo, dapo)]
        assert same(*found)


def test_k2_and_k3_plus_have_equal_gradients() -> None:
    config = config_of("train.mini_batches=4")
    k2, k3_plus, k3 = (objective_of("grpo", beta=0.1, kl=kl) for kl in ("k2", "k3_plus", "k3"))
    forms = [normal_form(Setup(config=config, objective=o)) for o in (k2, k3_plus, k3)]
    assert forms[0] == forms[1] != forms[2]
    step = step_of(0, on_policy=False)
    assert same(gradient_of(k2, step), gradient_of(k3_plus, step))
    assert not same(gradient_of(k2, step), gradient_of(k3, step))


def test_dr_grpo_and_rloo_differ_by_a_constant_factor() -> None:
    settings = ["train.mini_batches=1", "objective.beta=0"]
    arms = {n: config_of(f"objective.name={n}", *settings) for n in ("dr_grpo", "rloo", "grpo")}
    (finding,) = coincidences(arms)
    assert finding.title == "dr_grpo and rloo differ only by a constant factor of the loss"
    dr_grpo, rloo = (setup_of(arms[n]).objective for n in ("dr_grpo", "rloo"))
    for seed in SEEDS:
        step = step_of(seed, on_policy=True, rows=12, groups=6)  # six groups of two
        assert same(gradient_of(rloo, step), gradient_of(dr_grpo, step) * 48 * 2)
    form = normal_form(setup_of(arms["dr_grpo"]))
    assert up_to_a_factor(form) == up_to_a_factor(normal_form(setup_of(arms["rloo"]))) != form


def test_the_arms_of_a_published_comparison() -> None:
    """One optimizer step per training step: two of the three arms are equal, and the third is not."""

    def arms(*settings: str) -> dict[str, Config]:
        return {
            name: config_of(f"objective.name={name}", "objective.clip_low=0.1", "objective.clip_high=0.1",
                            "objective.beta=0.04", "rollout.prompts_per_step=2", *settings)
            for name in ("gspo", "grpo", "dr_grpo")
        }  # fmt: skip

    (finding,) = coincidences(arms("train.mini_batches=1"))
    assert (finding.kind, finding.title) == ("same", "gspo and grpo are the same algorithm here")
    assert (
        "The arms differ in objective.name, objective.dual, which changes no gradient"
        in finding.why
    )
    assert coincidences(arms("train.mini_batches=2")) == []


def test_arms_that_differ_in_other_settings_are_equal_only_if_these_have_no_effect() -> None:
    one = config_of("train.mini_batches=1")
    assert coincidences({"a": one, "b": config_of("train.mini_batches=1", "seed=1")}) == []
    for setting in ("rollout.temperature=0.9", "train.steps=99", "filter.dynamic_sampling=true"):
        assert coincidences({"a": one, "b": config_of("train.mini_batches=1", setting)}) == []
    for setting in ("save.every=7", "reference.kind=offloaded", "train.micro_batch_tokens=512"):
        other = config_of("train.mini_batches=1", setting)
        (finding,) = coincidences({"a": one, "b": other, "c": config_of()})
        assert finding.title == "a and b are the same algorithm here"
        assert setting.partition("=")[0] in finding.why


def test_equivalent_algorithms_of_every_algorithm() -> None:
    def of(name: str, *settings: str) -> list[str]:
        return sorted(
            equivalent_algorithms(setup_of(config_of(f"objective.name={name}", *settings)))
        )

    once = "train.mini_batches=1"
    assert of("gspo", once) == sorted(["grpo", "gspo_token", "gmpo", "gigpo", "sapo"])
    assert of("gspo", once, "objective.beta=0.04") == sorted(
        [
            "grpo",
            "gspo_token",
            "gmpo",
            "gigpo",
            "sapo",
        ]
    )
    token_mean = ["dapo", "cispo", "vespo", "dppo", "bapo", "m2po", "decoupled_ppo"]
    assert of("kl_cov", once) == sorted(token_mean)
    assert of("bapo", once) == sorted({*token_mean, "kl_cov"} - {"bapo"})
    assert of("bapo", once, "model.dtype=bfloat16") == []  # its ratio is to the engine
    assert "dapo" in of("gfpo", once, "objective.keep=8")
    assert of("gspo") == sorted(["gspo_token"])
    together = {"grpo", "gspo", "gspo_token", "gmpo", "sapo", "gigpo", "kl_cov", *token_mean}
    lonely = set(ALGORITHMS) - together
    teachers = {"opd": "teacher.path=embedded", "sdpo": "teacher.policy=frozen"}
    for name in lonely:
        more = [teachers[name]] if name in teachers else []
        assert of(name, once, *more) == [], name


def test_pass_at_1_is_rloo_up_to_a_factor() -> None:
    settings = ["train.mini_batches=1", "objective.beta=0"]
    arms = {"rloo": config_of("objective.name=rloo", *settings),
            "pkpo": config_of("objective.name=pkpo", "objective.k=1", *settings)}  # fmt: skip
    (finding,) = coincidences(arms)
    assert finding.title == "rloo and pkpo differ only by a constant factor of the loss"
    rloo, pkpo = (setup_of(arms[n]).objective for n in ("rloo", "pkpo"))
    for seed in SEEDS:
        step = step_of(seed, on_policy=True)
        assert same(gradient_of(rloo, step), gradient_of(pkpo, step) * 48)
