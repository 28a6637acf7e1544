"""Reward functions of TRL run unchanged: columns, tokens, progress, None, scripts and notebooks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import covey
from covey.errors import ConfigError
from covey.records.folder import RunFolder
from covey.rewards.user import function_reward
from covey.tasks.rows import dataset_task
from tests.trackers import Notes

ROWS = [{"prompt": f"{i}+1=", "solution": i + 1, "target": i + 1, "kind": "sum"} for i in range(24)]
CHAT = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
SMALL = {"train.steps": 2, "rollout.prompts_per_step": 4, "rollout.group_size": 3,
         "rollout.max_tokens": 6, "evaluate.every": 0}  # fmt: skip


def small(path: Path, **more: Any) -> covey.TrainResult:
    """Train two steps on data of the test's own."""
    given = {"model": "embedded", "dataset": ROWS, "quiet": True, "run": path / "run", **SMALL}
    return covey.train(**{**given, **more})


def test_a_function_gets_what_trl_gives_it(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def length(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]],
        solution: list[int], trainer_state: Any, **columns: Any,
    ) -> list[float]:  # fmt: skip
        calls.append({**columns, **locals()})
        return [float(len(ids)) for ids in completion_ids]

    settings = {"train.mini_batches": 2, "train.epochs": 3}
    result = small(tmp_path, rewards=length, **settings)
    first = [c for c in calls if c["trainer_state"].global_step == 0]
    assert len(first) == 4  # one call for each group
    # Six optimizer steps follow each of the two batches of rollouts, and TRL counts those.
    assert {c["trainer_state"].global_step for c in calls} == {0, 6}
    assert {c["trainer_state"].max_steps for c in calls} == {12} == {result.metrics[-1]["updates"]}
    assert all(type(c["solution"][0]) is int and len(c["solution"]) == 3 for c in calls)
    assert all(c["target"] == c["solution"] and c["kind"] == ["sum"] * 3 for c in calls)
    rows = RunFolder(result.folder).rollouts(1)
    assert [row["reward"] for row in rows] == [len(row["tokens"]) for row in rows]
    assert result.metrics[0]["reward_id"].startswith("length@1#")  # under its own name


def test_evaluations_have_the_progress_of_a_finished_run(tmp_path: Path) -> None:
    """A function may divide by max_steps, or follow a schedule: evaluations are comparable."""
    seen: list[float] = []

    def scheduled(completions: list[str], trainer_state: Any) -> list[float]:
        seen.append(trainer_state.global_step / trainer_state.max_steps)
        return [0.0] * len(completions)

    small(tmp_path, rewards=scheduled, **{"evaluate.every": 2, "evaluate.prompts": 1})
    assert seen == [1.0, *[0.0] * 4, *[0.5] * 4, 1.0]
    function_reward(scheduled)(dataset_task(ROWS).train()[0], "2")  # without a run
    assert seen[-1] == 1.0


def test_prompts_of_messages_get_completions_of_messages() -> None:
    seen: list[Any] = []

    def correct(completions: list[Any], **columns: Any) -> list[float]:
        seen.append((completions, columns["prompts"]))
        return [1.0] * len(completions)

    for rows in (ROWS, CHAT):
        task = dataset_task(rows)
        reward: Any = function_reward(correct, conversational=task.conversational)
        reward.score_group(task.train()[0], ["2"])
    assert seen[0] == (["2"], [ROWS[0]["prompt"]])
    assert seen[1] == ([[{"role": "assistant", "content": "2"}]], [CHAT[0]["prompt"]])


def test_a_missing_column_is_found_before_anything_is_sampled(tmp_path: Path) -> None:
    def strict(completions: list[str], solutoin: list[int]) -> list[float]:
        raise AssertionError("it is never called")

    with pytest.raises(
        ConfigError, match=r"the argument 'solutoin'.*no column.*columns are .*solution"
    ):
        small(tmp_path, rewards=strict)
    assert not (tmp_path / "run").exists()


def some(completions: list[str], **columns: Any) -> list[float | None]:
    return [1.0, None, 0.0][: len(completions)]


def never(completions: list[str]) -> list[None]:
    return [None for _ in completions]


def test_none_is_skipped_if_the_settings_say_so(tmp_path: Path) -> None:
    with pytest.raises(covey.CoveyError, match=r"returned None; scoring\.none_rewards"):
        small(tmp_path / "a", rewards=[some, never])
    skip = {"scoring.none_rewards": "skip"}
    result = small(tmp_path / "b", rewards=[some, never], **skip)
    rows = RunFolder(result.folder).rollouts(1)
    assert [row["reward"] for row in rows] == [1.0, None, 0.0] * 4
    assert [row["parts"] for row in rows[:3]] == [{"some": 1.0}, {}, {"some": 0.0}]
    assert rows[1]["advantage"] == 0.0


@pytest.mark.parametrize(
    ("returned", "words"),
    [(1.0, r"returned 1\.0; it must return a list"), (["a"], "returned 'a', which is no number")],
)
def test_a_wrong_return_value_is_shown(returned: Any, words: str) -> None:
    reward = function_reward(lambda completions: returned)
    with pytest.raises(TypeError, match=words):
        reward(dataset_task(ROWS).train()[0], "2")


def test_a_run_from_python_is_resumed_from_python(tmp_path: Path) -> None:
    calls: list[int] = []

    def breaks(completions: list[str]) -> list[float]:
        calls.append(1)
        return [1 / max(0, 5 - len(calls))] * len(completions)

    notes = Notes()
    with pytest.raises(covey.CoveyError, match="ZeroDivisionError"):
        small(tmp_path, rewards=breaks, trackers=[notes])
    call = f"covey.train(resume='{tmp_path}/run', dataset=..., rewards=...)"
    assert f"saved step 1; resume with: {call}" in notes.notes


def other(completions: list[str]) -> list[float]:
    return [0.5] * len(completions)


def test_another_reward_cannot_resume_the_run(tmp_path: Path) -> None:
    result = small(tmp_path, rewards=other, **{"train.steps": 1})
    again = {"resume": result.folder, "dataset": ROWS, "quiet": True, "train.steps": 2}
    with pytest.raises(
        ConfigError,
        match="started with the reward other; pass this reward instead of the reward some",
    ):
        covey.train(**again, rewards=some)
    assert covey.train(**again, rewards=other).step == 2


SCRIPT = """
import asyncio
import covey

async def near(completions, solution, **columns):
    await asyncio.sleep(0)
    return [float(str(s) in c) for c, s in zip(completions, solution)]

async def notebook():
    rows = [{"prompt": f"{i}+1=", "solution": i + 1} for i in range(24)]
    return covey.train(model="embedded", dataset=rows, rewards=near, quiet=True, run="run", **SMALL)

print(asyncio.run(notebook()).metrics[-1]["reward_id"])
"""


def test_a_script_and_a_running_event_loop(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("**SMALL", f"**{SMALL}"))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.startswith("near@1#"), done.stderr
