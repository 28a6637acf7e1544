from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.config import Config, load_config
from covey.config.resolve import resolve, task_of
from covey.errors import ConfigError, DataError
from covey.lab.compare.design import (
    Request,
    arm_configs,
    check_prompts,
    design_comparison,
    known_beforehand,
    parse_arm,
    task_digest,
)
from covey.lab.compare.design import config_of as config_of_arm
from covey.lab.compare.launch import inputs_digest


def prompts(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"question": t, "answer": "1"}) + "\n" for t in texts))
    return str(path)


def config_of(train: str, held_out: str) -> Config:
    task = [f"task.train_file='{train}'", f"task.held_out_file='{held_out}'"]
    return resolve(load_config("arithmetic", ["task.name=jsonl", *task]))


def test_held_out_prompt_in_the_training_data_is_an_error(tmp_path: Path) -> None:
    train = prompts(tmp_path / "train.jsonl", "what is 1+0?", "2-1?")
    check_prompts({"a": config_of(train, prompts(tmp_path / "other.jsonl", "3-2?"))})
    # Case and whitespace make no new prompt.
    same = prompts(tmp_path / "same.jsonl", "3-2?", "What  is 1+0?")
    with pytest.raises(DataError, match=r"task: 1 of 2 held-out prompts are also training prompts"):
        check_prompts({"a": config_of(train, same)})


def test_arms_are_measured_on_the_same_prompts(tmp_path: Path) -> None:
    train = prompts(tmp_path / "train.jsonl", "1+0?")
    one, two = (config_of(train, prompts(tmp_path / f"{n}.jsonl", f"{n}-2?")) for n in (3, 4))
    with pytest.raises(ConfigError, match="arm b and arm a have different held-out prompts"):
        check_prompts({"a": one, "b": two})


def test_arms_are_scored_with_the_same_targets(tmp_path: Path) -> None:
    train = prompts(tmp_path / "train.jsonl", "1+0?")
    one, two = (config_of(train, prompts(tmp_path / f"{n}.jsonl", "3-2?")) for n in "ab")
    check_prompts({"a": one, "b": two})
    (tmp_path / "b.jsonl").write_text('{"question": "3-2?", "answer": "2"}\n')
    with pytest.raises(ConfigError, match="arm b and arm a have different held-out prompts"):
        check_prompts({"a": one, "b": two})


def test_inputs_digest_covers_data_and_evaluation_reward(tmp_path: Path) -> None:
    config = config_of(
        prompts(tmp_path / "train.jsonl", "1+0?"), prompts(tmp_path / "test.jsonl", "3-2?")
    )
    form = resolve(load_config("arithmetic", ["reward.name=think_answer_form"]))

    def key(common: Config = config) -> str:
        data = task_digest(task_of(config))
        return inputs_digest(config, common, start="", data=data, threads=1)

    before, other_reward = key(), key(form)
    assert before == key() != other_reward
    (tmp_path / "test.jsonl").write_text('{"question": "3-2?", "answer": "2"}\n')
    edited = key()
    prompts(tmp_path / "train.jsonl", "2+0?")
    assert len({before, other_reward, edited, key()}) == 4


def test_inputs_digest_covers_dates() -> None:
    written = ("2024-02-28", "2024-02-29", "'2024-02-29'")
    configs = [load_config("arithmetic", [f"task.since={value}"]) for value in written]
    keys = {inputs_digest(c, c, start="", data="", threads=1) for c in configs}
    assert len(keys) == 3


def test_findings_name_differences_in_reward_and_generation() -> None:
    arms = (
        "form: reward.name=think_answer_form", "long: rollout.max_tokens=96",
        "turns: environment.max_turns=2", "hosts: environment.workers=2",
    )  # fmt: skip
    request = Request(source="arithmetic", algorithms=("grpo",), arms=tuple(map(parse_arm, arms)))
    design = design_comparison(request)
    titles = {row["title"]: row for row in known_beforehand(design, arm_configs(design))}
    reward = titles["some arms are trained on a different reward than the one that evaluates them"]
    assert reward["arms"] == "form"
    assert reward["remedy"].endswith("now it is think_answer")
    own = titles["some arms generate the held-out completions with their own settings"]
    assert own["arms"] == "long, turns"


def test_the_embedded_task_is_fair() -> None:
    check_prompts({"a": resolve(load_config("demo", ["task.train_size=3000"]))})


def test_findings_name_their_arms() -> None:
    arms = (parse_arm("frozen: optimizer.learning_rate=0"), parse_arm("cold: rollout.top_k=5"))
    design = design_comparison(
        Request(
            source="arithmetic",
            algorithms=("grpo", "gspo"),
            arms=arms,
            overrides=("train.mini_batches=1",),
        )
    )
    rows = known_beforehand(design, arm_configs(design))
    titles = {row["title"]: row.get("arms", "") for row in rows}
    assert any("grpo" in title and "gspo" in title for title in titles)
    assert [arms for title, arms in titles.items() if "learning_rate = 0" in title] == ["frozen"]
    assert not any("reward" in title or "conditions" in title for title in titles)
    assert all({"title", "why", "remedy", "docs"} <= row.keys() for row in rows)


def test_an_arm_that_keeps_the_clip_range_of_another_algorithm_is_a_finding() -> None:
    request = Request(
        source="arithmetic",
        algorithms=("grpo", "gspo", "dapo"),
        arms=(parse_arm("own: objective.name=gspo"),),
        overrides=("objective.clip_low=0.1", "objective.clip_high=0.1", "objective.ddof=0"),
    )
    design = design_comparison(request)
    kept = [
        row for row in known_beforehand(design, arm_configs(design)) if "are kept" in row["title"]
    ]
    # ddof has the same default in all of them, and clip_low in grpo and dapo.
    assert [(row["arms"], row["title"]) for row in kept] == [
        (
            "gspo",
            "options of the recipe are kept: objective.clip_low = 0.1, objective.clip_high = 0.1",
        ),
        ("dapo", "options of the recipe are kept: objective.clip_high = 0.1"),
    ]
    assert kept[0]["why"] == (
        "The recipe sets them for grpo; gspo's own defaults are clip_low = 0.0003, "
        "clip_high = 0.0004."
    )
    arm = parse_arm(kept[0]["remedy"].partition("the arm '")[2].removesuffix("'"))
    options = config_of_arm(design, arm).objective.options
    assert (options["clip_low"], options["clip_high"]) == (3e-4, 4e-4)


def test_an_arm_with_the_default_options_of_its_algorithm_is_no_finding() -> None:
    design = design_comparison(Request(source="arithmetic", algorithms=("grpo", "gspo")))
    rows = known_beforehand(design, arm_configs(design))
    assert not any("are kept" in row["title"] for row in rows)
