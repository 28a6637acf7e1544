from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from covey.config import parse_config, to_toml
from covey.config.resolve import resolve
from covey.errors import ConfigError, RunError
from covey.lab.compare.comparison import (
    Arm,
    Design,
    RunOutcome,
    read_design,
    read_outcome,
    write_design,
)
from covey.lab.compare.design import (
    Request,
    algorithm_arm,
    arm_configs,
    config_of,
    design_comparison,
    parse_arm,
    same_comparison,
    with_arms,
    with_seeds,
)


def planned(*algorithms: str, arms: tuple[str, ...] = (), **request: Any) -> Design:
    return design_comparison(
        Request(
            source="arithmetic",
            algorithms=algorithms,
            arms=tuple(parse_arm(arm) for arm in arms),
            **request,
        )
    )


def arm_of(design: Design, name: str) -> Arm:
    return next(arm for arm in design.arms if arm.name == name)


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("a:", Arm(name="a")),
        ("a: train.epochs=2", Arm(name="a", settings=("train.epochs=2",))),
        (
            "lora-16 : adapter.rank=16, adapter.targets=['q_proj', 'v_proj'],rollout.stop=[\"a,b\"]",
            Arm(
                name="lora-16",
                settings=(
                    "adapter.rank=16",
                    "adapter.targets=['q_proj', 'v_proj']",
                    'rollout.stop=["a,b"]',
                ),
            ),
        ),
        ("again: seed+=1000", Arm(name="again", seed_offset=1000)),
        ("again: seed += 7, x.y=1", Arm(name="again", settings=("x.y=1",), seed_offset=7)),
        ("t: reward.name=my:reward", Arm(name="t", settings=("reward.name=my:reward",))),
    ],
)
def test_arm_is_parsed(text: str, arm: Arm) -> None:
    assert parse_arm(text) == arm


@pytest.mark.parametrize("text", ["", "a", ": x=1", "a b: x=1", "../a: x=1", "..: x=1", "a/b: x=1"])
def test_arm_needs_a_name_that_can_be_a_folder(text: str) -> None:
    with pytest.raises(ConfigError, match="must have the form 'NAME: key=value"):
        parse_arm(text)


def test_given_options_are_kept_if_the_other_algorithm_has_them() -> None:
    given = {"objective": {"name": "grpo", "beta": 0.01, "dual": 3.0}}
    arm = algorithm_arm(given, "gspo")
    assert arm.settings == ('objective.name="gspo"', "objective.beta=0.01")  # gspo has no dual clip
    assert algorithm_arm(given, "grpo") == Arm(name="grpo")
    assert algorithm_arm({}, "grpo").settings == ()  # the default algorithm


def test_another_algorithm_gets_its_own_defaults_and_declares_every_difference() -> None:
    design = planned("grpo", "gspo")
    config = config_of(design, arm_of(design, "gspo"))
    # Not the clip of the algorithm that it replaces, which fits tokens.
    assert (config.objective.options["clip_low"], config.objective.options["clip_high"]) == (
        3e-4,
        4e-4,
    )
    assert arm_of(design, "grpo").differences == {}
    assert arm_of(design, "gspo").differences == {
        "objective.name": "gspo",
        "objective.clip_low": 3e-4,
        "objective.clip_high": 4e-4,
        "objective.dual": None,
    }


def test_an_option_that_depends_on_a_setting_follows_the_arm() -> None:
    design = planned("dr_grpo", arms=("long: objective.name=dr_grpo, rollout.max_tokens=96",))
    assert arm_of(design, "dr_grpo").differences["objective.length"] == 48
    assert arm_of(design, "long").differences["objective.length"] == 96


def test_a_single_arm_is_compared_with_the_common_configuration() -> None:
    design = planned(arms=("frozen: optimizer.learning_rate=0",))
    assert [arm.name for arm in design.arms] == ["grpo", "frozen"]
    assert arm_of(design, "frozen").differences == {"optimizer.learning_rate": 0.0}


@pytest.mark.parametrize(
    "setting",
    [
        "train.steps=9", "evaluate.prompts=9", "train.stop_after={tokens=9}", "seed=3",
        "evaluate.every=1", "train={steps=9}", "evaluate={every=1}",
    ],
)  # fmt: skip
def test_no_arm_can_change_how_it_is_measured(setting: str) -> None:
    with pytest.raises(ConfigError, match="but all arms must have the same"):
        planned("grpo", arms=(f"other: {setting}",))


def test_a_mistake_in_an_arm_is_found_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.learning_rte is not a setting"):
        planned("grpo", arms=("other: optimizer.learning_rte=1",))
    with pytest.raises(ConfigError, match=r"'grpoo' is not a known algorithm; did you mean 'grpo'"):
        planned("grpoo")
    with pytest.raises(ConfigError, match="two arms have the name 'grpo'"):
        planned("grpo", arms=("grpo: optimizer.learning_rate=0",))
    with pytest.raises(ConfigError, match="turns evaluations off, but a comparison needs them"):
        planned("grpo", overrides=("evaluate.every=0",))


def test_seeds_are_consecutive_and_an_arm_can_offset_them() -> None:
    design = planned("grpo", arms=("again: seed+=1000",), seeds=2, overrides=("seed=5",))
    assert design.seeds == (5, 6)
    seeds = [config_of(design, arm, seed).seed for arm in design.arms for seed in design.seeds]
    assert seeds == [5, 6, 1005, 1006]
    assert with_seeds(design, 4).seeds == (5, 6, 7, 8)
    assert with_seeds(design, 1).seeds == (5, 6)


def test_budgets_are_part_of_every_arms_configuration() -> None:
    assert planned("grpo").amount == 100  # the recipe's
    steps = planned("grpo", "gspo", amount=7)
    assert [c.train.steps for c in arm_configs(steps).values()] == [7, 7]
    tokens = planned("grpo", "gspo", budget="tokens", amount=5000)
    for config in arm_configs(tokens).values():
        assert (config.train.budget, config.train.amount, config.train.steps) == (
            "tokens",
            5000,
            100,
        )
    updates = planned("grpo", arms=("twice: train.epochs=2",), budget="updates")
    assert updates.amount == 400  # 100 steps of 4 mini-batches
    assert {c.train.amount for c in arm_configs(updates).values()} == {400}
    with pytest.raises(ConfigError, match="--budget tokens needs --amount TOKENS"):
        planned("grpo", budget="tokens")


def test_design_survives_writing_and_reading(tmp_path: Path) -> None:
    design = planned("grpo", "gspo", arms=('again: seed+=3, rollout.stop=["a\\"b"]',), threads=2)
    design = replace(design, command="covey compare 'a b'", findings=({"title": "x", "why": "y"},))
    write_design(tmp_path, design)
    again = read_design(tmp_path)
    assert to_toml(parse_config(again.common)) == to_toml(parse_config(design.common))
    assert replace(again, common=design.common) == design
    assert arm_configs(again) == arm_configs(design)
    with pytest.raises(
        RunError, match=r"is not a comparison folder, because it has no file comparison\.toml"
    ):
        read_design(tmp_path / "nowhere")
    (tmp_path / "comparison.toml").write_text("seeds = [1]\n")
    with pytest.raises(RunError, match="cannot be read"):
        read_design(tmp_path)


def test_design_holds_options_of_any_name_and_dates(tmp_path: Path) -> None:
    options = {"name": "mine.task", "größe": 2, "since": date(2024, 2, 29)}
    design = replace(planned("grpo"), given={"task": options}, common={"task": options})
    write_design(tmp_path, design)
    assert read_design(tmp_path) == design


def test_same_comparison_allows_fewer_arms_and_other_seeds() -> None:
    old = planned("grpo", "gspo")
    assert same_comparison(old, planned("gspo", seeds=9))
    assert not same_comparison(planned("gspo"), old)  # it would need an arm that is not there
    assert not same_comparison(old, planned("grpo", overrides=("train.epochs=2",)))
    assert not same_comparison(old, planned("grpo", amount=50))
    assert [arm.name for arm in with_arms(old, ["dapo", "grpo"]).arms] == ["grpo", "gspo", "dapo"]


def test_request_has_a_command_line() -> None:
    arm = parse_arm("x: rollout.stop=['a'], seed+=3")
    request = Request(source="my.toml", arms=(arm, parse_arm("y:")), budget="tokens", amount=9)
    assert request.command() == (
        "covey compare my.toml --arm 'x: rollout.stop=['\"'\"'a'\"'\"'], seed+=3' --arm y: --seeds 3 "
        "--budget tokens --amount 9"
    )
    assert parse_arm(arm.text) == arm
    small = Request(source="demo", algorithms=("grpo", "gspo"), smoke=True, threads=2)
    assert small.command() == (
        "covey compare demo --algorithms grpo,gspo --seeds 3 --threads 2 --smoke"
    )


def test_common_configuration_is_the_resolved_recipe() -> None:
    design = planned("grpo")
    assert parse_config(design.common) == resolve(parse_config(design.given))


def test_an_outcome_with_fields_that_no_longer_exist_is_read(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text(
        '{"key": "k", "state": "done", "first_rollouts": "step-1"}'
    )
    assert read_outcome(tmp_path) == RunOutcome(key="k", state="done")
