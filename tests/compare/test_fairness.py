from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.compare.design import Asked, arm_configs, parse_arm, plan_comparison
from covey.compare.fairness import check_prompts, known_beforehand
from covey.config import Config, load_config
from covey.errors import ConfigError, DataError
from covey.train.assemble import resolve


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
    assert all({"title", "why", "remedy", "docs"} <= row.keys() for row in rows)
