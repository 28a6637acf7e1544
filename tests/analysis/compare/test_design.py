from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from covey.analysis.compare.design import (
    Asked,
    AskedArm,
    algorithm_arm,
    arm_configs,
    config_of,
    parse_arm,
    plan_comparison,
    same_comparison,
    shares_first_answers,
    with_arms,
    with_seeds,
)
from covey.analysis.compare.record import ArmRecord, Record, read_record, write_record
from covey.config import parse_config, to_toml
from covey.errors import ConfigError, RunError
from covey.training.build import resolve


def planned(*algorithms: str, arms: tuple[str, ...] = (), **asked: Any) -> Record:
    return plan_comparison(
        Asked(
            source="arithmetic",
            algorithms=algorithms,
            arms=tuple(parse_arm(arm) for arm in arms),
            **asked,
        )
    )


def arm_of(record: Record, name: str) -> ArmRecord:
    return next(arm for arm in record.arms if arm.name == name)


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("a:", AskedArm(name="a")),
        ("a: train.epochs=2", AskedArm(name="a", settings=("train.epochs=2",))),
        (
            "lora-16 : adapter.rank=16, adapter.targets=['q_proj', 'v_proj'],rollout.stop=[\"a,b\"]",
            AskedArm(
                name="lora-16",
                settings=(
                    "adapter.rank=16",
                    "adapter.targets=['q_proj', 'v_proj']",
                    'rollout.stop=["a,b"]',
                ),
            ),
        ),
        ("again: seed+=1000", AskedArm(name="again", seed_offset=1000)),
        ("again: seed += 7, x.y=1", AskedArm(name="again", settings=("x.y=1",), seed_offset=7)),
        ("t: reward.name=my:reward", AskedArm(name="t", settings=("reward.name=my:reward",))),
    ],
)
def test_an_arm_is_read(text: str, arm: AskedArm) -> None:
    assert parse_arm(text) == arm


@pytest.mark.parametrize("text", ["", "a", ": x=1", "a b: x=1", "../a: x=1", "..: x=1", "a/b: x=1"])
def test_an_arm_has_a_name_that_a_folder_can_have(text: str) -> None:
    with pytest.raises(ConfigError, match="--arm takes 'NAME: key=value"):
        parse_arm(text)


def test_options_that_were_given_are_kept_where_the_other_algorithm_has_them() -> None:
    given = {"objective": {"name": "grpo", "beta": 0.01, "dual": 3.0}}
    arm = algorithm_arm(given, "gspo")
    assert arm.settings == ('objective.name="gspo"', "objective.beta=0.01")  # gspo has no dual clip
    assert algorithm_arm(given, "grpo") == AskedArm(name="grpo")
    assert algorithm_arm({}, "grpo").settings == ()  # what stands there by default


def test_another_algorithm_has_its_own_defaults_and_every_difference_is_declared() -> None:
    record = planned("grpo", "gspo")
    config = config_of(record, arm_of(record, "gspo"))
    # Not the clip of the algorithm that it replaces, which fits tokens.
    assert (config.objective.options["low"], config.objective.options["high"]) == (3e-4, 4e-4)
    assert arm_of(record, "grpo").differences == {}
    assert arm_of(record, "gspo").differences == {
        "objective.name": "gspo",
        "objective.clip_low": 3e-4,
        "objective.clip_high": 4e-4,
        "objective.dual": None,
    }


def test_an_option_that_depends_on_a_setting_follows_the_arm() -> None:
    record = planned("dr_grpo", arms=("long: objective.name=dr_grpo, rollout.max_tokens=96",))
    assert arm_of(record, "dr_grpo").differences["objective.length"] == 48
    assert arm_of(record, "long").differences["objective.length"] == 96


def test_a_single_arm_is_compared_with_the_common_configuration() -> None:
    record = planned(arms=("frozen: optimizer.learning_rate=0",))
    assert [arm.name for arm in record.arms] == ["grpo", "frozen"]
    assert arm_of(record, "frozen").differences == {"optimizer.learning_rate": 0.0}


@pytest.mark.parametrize(
    "setting",
    [
        "train.steps=9", "evaluate.prompts=9", "train.stop_after={tokens=9}", "seed=3",
        "evaluate.every=1", "train={steps=9}", "evaluate={every=1}",
    ],
)  # fmt: skip
def test_no_arm_changes_how_it_is_measured(setting: str) -> None:
    with pytest.raises(ConfigError, match="would measure it by other means"):
        planned("grpo", arms=(f"other: {setting}",))


def test_a_mistake_in_an_arm_is_found_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.learning_rte is not a setting"):
        planned("grpo", arms=("other: optimizer.learning_rte=1",))
    with pytest.raises(ConfigError, match=r"'grpoo' is not known; did you mean 'grpo'"):
        planned("grpoo")
    with pytest.raises(ConfigError, match="two arms are called 'grpo'"):
        planned("grpo", arms=("grpo: optimizer.learning_rate=0",))
    with pytest.raises(ConfigError, match="a comparison is made of evaluations"):
        planned("grpo", overrides=("evaluate.every=0",))


def test_seeds_follow_the_common_one_and_an_arm_may_move_them() -> None:
    record = planned("grpo", arms=("again: seed+=1000",), seeds=2, overrides=("seed=5",))
    assert record.seeds == (5, 6)
    seeds = [config_of(record, arm, seed).seed for arm in record.arms for seed in record.seeds]
    assert seeds == [5, 6, 1005, 1006]
    assert with_seeds(record, 4).seeds == (5, 6, 7, 8)
    assert with_seeds(record, 1).seeds == (5, 6)


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
    with pytest.raises(ConfigError, match="--budget tokens needs --amount"):
        planned("grpo", budget="tokens")


def test_only_what_decides_answers_keeps_an_arm_from_sharing_them() -> None:
    apart = ("cold: rollout.temperature=0.7", "again: seed+=1", "long: rollout.max_tokens=96")
    alike = (
        "slots: engine.max_concurrent=8", "thrifty: model.gradient_checkpointing=true",
        "exact: model.deterministic=true", "form: reward.name=think_answer_form",
    )  # fmt: skip
    record = planned("grpo", "dapo", arms=(*apart, *alike))
    shares = [arm.name for arm in record.arms if shares_first_answers(arm)]
    assert shares == ["grpo", "dapo", "slots", "thrifty", "exact", "form"]


def test_a_record_reads_back_as_it_was(tmp_path: Path) -> None:
    record = planned("grpo", "gspo", arms=('again: seed+=3, rollout.stop=["a\\"b"]',), threads=2)
    record = replace(record, command="covey compare 'a b'", findings=({"title": "x", "why": "y"},))
    write_record(tmp_path, record)
    again = read_record(tmp_path)
    assert to_toml(parse_config(again.common)) == to_toml(parse_config(record.common))
    assert replace(again, common=record.common) == record
    assert arm_configs(again) == arm_configs(record)
    with pytest.raises(RunError, match=r"is not a comparison: it has no comparison\.toml"):
        read_record(tmp_path / "nowhere")
    (tmp_path / "comparison.toml").write_text("seeds = [1]\n")
    with pytest.raises(RunError, match="cannot be read"):
        read_record(tmp_path)


def test_a_record_holds_options_of_any_name_and_dates(tmp_path: Path) -> None:
    options = {"name": "mine.task", "größe": 2, "since": date(2024, 2, 29)}
    record = replace(planned("grpo"), given={"task": options}, common={"task": options})
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record


def test_a_request_is_known_again_with_fewer_arms_and_other_seeds() -> None:
    old = planned("grpo", "gspo")
    assert same_comparison(old, planned("gspo", seeds=9))
    assert not same_comparison(planned("gspo"), old)  # it would need an arm that is not there
    assert not same_comparison(old, planned("grpo", overrides=("train.epochs=2",)))
    assert not same_comparison(old, planned("grpo", amount=50))
    assert [arm.name for arm in with_arms(old, ["dapo", "grpo"]).arms] == ["grpo", "gspo", "dapo"]


def test_a_request_writes_itself_down() -> None:
    arm = parse_arm("x: rollout.stop=['a'], seed+=3")
    asked = Asked(source="my.toml", arms=(arm, parse_arm("y:")), budget="tokens", amount=9)
    assert asked.command() == (
        "covey compare my.toml --arm 'x: rollout.stop=['\"'\"'a'\"'\"'], seed+=3' --arm y: --seeds 3 "
        "--budget tokens --amount 9"
    )
    assert parse_arm(arm.text) == arm
    small = Asked(source="demo", algorithms=("grpo", "gspo"), smoke=True, threads=2)
    assert small.command() == (
        "covey compare demo --algorithms grpo,gspo --seeds 3 --threads 2 --smoke"
    )


def test_the_common_configuration_is_the_recipe_written_out() -> None:
    record = planned("grpo")
    assert parse_config(record.common) == resolve(parse_config(record.given))
