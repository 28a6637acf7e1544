from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.analysis.compare.design import Asked, arm_configs, parse_arm, plan_comparison
from covey.analysis.compare.digest import task_digest
from covey.analysis.compare.fairness import check_prompts, known_beforehand
from covey.analysis.compare.jobs import run_key
from covey.config import Config, load_config
from covey.errors import ConfigError, DataError
from covey.training.build import resolve, task_of


def questions(path: Path, *texts: str) -> str:
    path.write_text("".join(json.dumps({"question": t, "answer": "1"}) + "\n" for t in texts))
    return str(path)


def asking(train: str, held_out: str) -> Config:
    task = [f"task.train_file='{train}'", f"task.held_out_file='{held_out}'"]
    return resolve(load_config("arithmetic", ["task.name=jsonl", *task]))


def test_a_held_out_prompt_that_is_trained_on_is_refused(tmp_path: Path) -> None:
    train = questions(tmp_path / "train.jsonl", "what is 1+0?", "2-1?")
    check_prompts({"a": asking(train, questions(tmp_path / "other.jsonl", "3-2?"))})
    # Capitals and spaces make no new question.
    same = questions(tmp_path / "same.jsonl", "3-2?", "What  is 1+0?")
    with pytest.raises(DataError, match=r"task: 1 of 2 held-out prompts are training prompts too"):
        check_prompts({"a": asking(train, same)})


def test_arms_are_measured_on_the_same_prompts(tmp_path: Path) -> None:
    train = questions(tmp_path / "train.jsonl", "1+0?")
    one, two = (asking(train, questions(tmp_path / f"{n}.jsonl", f"{n}-2?")) for n in (3, 4))
    with pytest.raises(ConfigError, match="--arm b: it has other held-out prompts than a"):
        check_prompts({"a": one, "b": two})


def test_arms_are_judged_by_the_same_answers(tmp_path: Path) -> None:
    train = questions(tmp_path / "train.jsonl", "1+0?")
    one, two = (asking(train, questions(tmp_path / f"{n}.jsonl", "3-2?")) for n in "ab")
    check_prompts({"a": one, "b": two})
    (tmp_path / "b.jsonl").write_text('{"question": "3-2?", "answer": "2"}\n')
    with pytest.raises(ConfigError, match="--arm b: it has other held-out prompts than a"):
        check_prompts({"a": one, "b": two})


def test_a_run_is_known_by_its_data_and_by_who_judges_it(tmp_path: Path) -> None:
    config = asking(
        questions(tmp_path / "train.jsonl", "1+0?"), questions(tmp_path / "test.jsonl", "3-2?")
    )
    form = resolve(load_config("arithmetic", ["reward.name=think_answer_form"]))

    def key(common: Config = config) -> str:
        data = task_digest(task_of(config))
        return run_key(config, common, start="", data=data, threads=1)

    before, judged_otherwise = key(), key(form)
    assert before == key() != judged_otherwise
    (tmp_path / "test.jsonl").write_text('{"question": "3-2?", "answer": "2"}\n')
    edited = key()
    questions(tmp_path / "train.jsonl", "2+0?")
    assert len({before, judged_otherwise, edited, key()}) == 4


def test_a_run_is_known_by_dates_too() -> None:
    written = ("2024-02-28", "2024-02-29", "'2024-02-29'")
    configs = [load_config("arithmetic", [f"task.since={value}"]) for value in written]
    keys = {run_key(c, c, start="", data="", threads=1) for c in configs}
    assert len(keys) == 3


def test_what_arms_are_measured_by_is_said_where_they_differ() -> None:
    arms = ("form: reward.name=think_answer_form", "long: rollout.max_tokens=96")
    asked = Asked(source="arithmetic", algorithms=("grpo",), arms=tuple(map(parse_arm, arms)))
    record = plan_comparison(asked)
    told = {row["title"]: row for row in known_beforehand(record, arm_configs(record))}
    judged = told["some arms learn from another reward than the one that measures them"]
    assert judged["arms"] == "form"
    assert judged["remedy"].endswith("now it is think_answer")
    own = told["some arms answer the held-out prompts under conditions of their own"]
    assert own["arms"] == "long"


def test_the_embedded_task_is_fair() -> None:
    check_prompts({"a": resolve(load_config("demo", ["task.train_size=3000"]))})


def test_what_is_known_beforehand_says_of_which_arms() -> None:
    arms = (parse_arm("frozen: optimizer.learning_rate=0"), parse_arm("cold: rollout.top_k=5"))
    record = plan_comparison(
        Asked(
            source="arithmetic",
            algorithms=("grpo", "gspo"),
            arms=arms,
            overrides=("train.mini_batches=1",),
        )
    )
    rows = known_beforehand(record, arm_configs(record))
    told = {row["title"]: row.get("arms", "") for row in rows}
    assert any("grpo" in title and "gspo" in title for title in told)
    assert [arms for title, arms in told.items() if "learning_rate = 0" in title] == ["frozen"]
    assert told["some arms sample the first step's answers for themselves"] == "cold"
    assert not any("reward" in title or "conditions" in title for title in told)
    assert all({"title", "why", "remedy", "docs"} <= row.keys() for row in rows)
