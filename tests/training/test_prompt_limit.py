"""Prompts that are too long are found before training, and are refused, left out or cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from covey.config import Config, load_config
from covey.config.resolve import resolve
from covey.errors import ConfigError, DataError
from covey.lab.plan.findings import findings
from covey.lab.plan.summary import summarize
from covey.lab.plan.task_facts import task_facts, usable_prompt
from covey.loop import train
from covey.models.language_model import LanguageModel
from covey.records.folder import RunFolder
from covey.rollout.prompt_limit import fitting_prompts
from covey.run import Run
from covey.stopping import StopSignal
from covey.tasks.task import Generated
from covey.types import Prompt
from tests.trackers import Notes

LONG = 12_000


def config_of(tmp_path: Path, *settings: str) -> Config:
    """Return a run whose 98th prompt has 12,013 tokens; the model's context is 512."""
    rows = [{"prompt": f"What is {i} + 1?", "target": str(i + 1)} for i in range(200)]
    rows[97]["prompt"] = "x" * LONG + " What is 1+1?"
    files = {"train": rows, "held_out": rows[90:100]}
    for name, some in files.items():
        text = "".join(json.dumps(row) + "\n" for row in some)
        (tmp_path / f"{name}.jsonl").write_text(text)
    own = [f"task.{name}_file={tmp_path / name}.jsonl" for name in files]
    quick = ["train.steps=13", "rollout.prompts_per_step=16", "rollout.group_size=2",
             "rollout.max_tokens=4", "reward.name=exact_text"]  # fmt: skip
    return resolve(load_config(None, ["task.name=jsonl", *own, *quick, *settings]))


@contextmanager
def parts_of(config: Config) -> Iterator[Run]:
    parts = Run.build(config)
    try:
        yield parts
    finally:
        parts.close()


def test_a_long_prompt_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 of 200 training prompts.*508.*jsonl/train/98.*12013"):
        Run.build(config_of(tmp_path))


def test_long_prompts_are_left_out_counted_and_shown(tmp_path: Path) -> None:
    with parts_of(config_of(tmp_path, "rollout.long_prompts=skip")) as parts:
        ids = [prompt.id for prompt in parts.prompts]
        assert len(ids) == 199
        assert "jsonl/train/98" not in ids
        assert len(parts.held_out) == 9
        assert [note.split(" have")[0] for note in parts.notes] == [
            "1 of 200 training prompts", "1 of 10 held-out prompts",
        ]  # fmt: skip


def test_a_run_with_a_long_prompt_cut_off_ends(tmp_path: Path) -> None:
    """An epoch over all prompts, the long one among them."""
    config = config_of(tmp_path, "rollout.long_prompts=truncate", "rollout.max_prompt_tokens=40")
    run, notes = RunFolder.create(tmp_path / "run", "", {}), Notes()
    with parts_of(config) as parts:
        assert train(parts, run, [notes], StopSignal()) == 13
        whole = parts.policy.model.renderer.tokens(parts.prompts[97].messages)
        cut = parts.policy.model.encode(parts.prompts[97].messages)
    assert len(whole) == 12_013
    assert len(cut) == 40
    assert cut[-39:] == whole[-39:]
    rows = [row for step in range(1, 14) for row in run.rollouts(step)]
    assert max(len(row["prompt_tokens"]) for row in rows) == 40
    assert any("1 of 200 training prompts have more than 40" in note for note in notes.notes)


def test_a_generated_task_is_checked_where_the_run_draws(
    embedded: LanguageModel, tmp_path: Path
) -> None:
    made: set[int] = set()

    def make(index: int) -> Prompt:
        made.add(index)
        text = "y" * (600 if index % 50 == 0 else 5)
        messages = ({"role": "user", "content": text},)
        return Prompt(id=str(index), task="t", messages=messages, target="")

    config, prompts = load_config("arithmetic", ["train.steps=40"]), Generated(5000, make)
    with pytest.raises(DataError, match="of 640 training prompts have more than 464"):
        fitting_prompts(config, embedded, prompts, "training")
    assert len(made) == 640  # 40 steps of 16 prompts
    skip = load_config("arithmetic", ["rollout.long_prompts=skip"])
    kept, (note,) = fitting_prompts(skip, embedded, prompts, "training")
    assert len(kept) == 4900
    assert "100 of 5000" in note


def test_no_room_for_any_prompt_is_a_mistake_in_the_config(embedded: LanguageModel) -> None:
    config = load_config("arithmetic", ["rollout.max_tokens=512"])
    with pytest.raises(ConfigError, match=r"max_tokens = 512, no prompt fits.*context of 512"):
        fitting_prompts(config, embedded, [], "training")


def test_the_plan_shows_the_lengths_and_the_long_prompt(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    facts = task_facts(config)
    text = summarize(config, facts).paragraph()
    assert "Prompts have" in text
    assert "has 12,013" in text
    found = [f for f in findings(config, facts) if "rollout.long_prompts" in f.settings]
    assert [f.title.split(":")[0] for f in found] == [
        f"1 of {facts.prompts} prompts have more than 508 tokens"
    ]
    limited = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"max_prompt_tokens": 2})}
    )
    (found_2,) = [f for f in findings(limited, facts) if "rollout.long_prompts" in f.settings]
    assert found_2.title.startswith(f"at least 32 of {facts.prompts} prompts have more than 2")
    assert "rollout.max_prompt_tokens = 2" in found_2.why
    assert usable_prompt(config, facts) == 508  # what the memory forecast counts with
    short = load_config("arithmetic")
    assert "rollout.long_prompts" not in str(findings(resolve(short), task_facts(resolve(short))))
