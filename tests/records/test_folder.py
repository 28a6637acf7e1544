from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from covey.errors import CoveyError, DiskError, RunError
from covey.records.folder import (
    RunFolder,
    check_new_run,
    limit_of,
    list_runs,
    next_run_path,
    set_aside_failed,
    settings_of,
)
from covey.records.resume import put_aside_after, start_of
from covey.types import Group, Prompt, Rollout

HOLDER = """
import sys
from pathlib import Path
from covey.errors import RunError
from covey.records.folder import RunFolder
try:
    with RunFolder.open(Path(sys.argv[1])).locked():
        print("held", flush=True)
        sys.stdin.read()
except RunError as error:
    print(error, flush=True)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "seed = 1\n", {"threads": 2, "command": ["ü"]})


def checkpoint(run: RunFolder, step: int) -> None:
    with run.new_checkpoint(step) as folder:
        (folder / "model.bin").write_text(str(step))


def evaluation(step: int) -> dict[str, object]:
    greedy = {"value": 0.5, "low": 0.1, "high": 0.9}
    return {"step": step, "prompts": 8, "greedy": greedy, "parts": {}, "mean_tokens": 9.5}


def rollout(sample: int, trained: tuple[bool, ...] = (True, True), **changes: object) -> Rollout:
    fields: dict[str, object] = {
        "prompt_id": "p",
        "sample": sample,
        "prompt_tokens": (1, 2, 3),
        "tokens": (4, 5),
        "trained": trained,
        "sampler_logp": (-0.1, -1 / 3),
        "text": f"text {sample}\n\u2028ü",
        "finish": "stop",
        "policy_version": 7,
        "reward": 0.1,
        "success": False,
        "parts": {"correct": 0.0, "format": 1.0},
        **changes,
    }
    return Rollout.single_turn(**fields)  # type: ignore[arg-type]


def group(*rollouts: Rollout) -> Group:
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "47+8-6?"})
    prompt = Prompt(id="p", task="arithmetic", messages=messages, target="49")
    return Group(prompt=prompt, rollouts=rollouts)


def write_rollouts(
    run: RunFolder, step: int, groups: list[Group], advantages: list[list[Any]]
) -> None:
    """Write the rollouts of a step as the training loop does."""
    run.write_table("rollouts", step, run.rollout_rows(groups, advantages))


def test_a_new_run_holds_its_configuration_and_environment(run: RunFolder) -> None:
    assert run.config_file.read_text() == "seed = 1\n"
    assert run.environment() == {"threads": 2, "command": ["ü"], "config": "seed = 1\n"}
    names = sorted(p.name for p in run.path.iterdir())
    assert names == [
        "checkpoints", "checkpoints.jsonl", "config.toml", "environment.json", "rollouts"
    ]  # fmt: skip
    assert (run.steps(), run.evaluations(), run.checkpoints()) == ([], [], [])
    assert run.rollouts(1) == []


def test_a_run_can_be_made_in_an_empty_folder_or_below_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty", "", {}).path == tmp_path / "empty"
    assert RunFolder.create(tmp_path / "a" / "b", "", {}).path.is_dir()


@pytest.mark.parametrize("name", ["config.toml", ".hidden", "folder/"])
def test_a_folder_that_holds_anything_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("mine")
    with pytest.raises(RunError, match="already contains files") as raised:
        RunFolder.create(tmp_path, "", {})
    assert len(str(raised.value).splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == [name.rstrip("/")]


def test_the_folder_of_a_run_without_a_step_may_be_deleted(run: RunFolder) -> None:
    with pytest.raises(RunError, match=r"or resume='x'; .* no step: delete the folder"):
        check_new_run(run.path, "pass another run=..., or resume='x'")
    (run.path / "steps.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunError, match=r"--resume \S+$"):
        check_new_run(run.path)


def test_a_run_that_failed_before_its_first_step_is_set_aside(run: RunFolder) -> None:
    """The name is free again, and nothing of the failed run is lost."""
    (run.path / "failure.txt").write_text("ZeroDivisionError")
    check_new_run(run.path)
    assert run.path.exists()  # only the start of the new run moves it
    aside = run.path.with_name(f"{run.path.name}-failed-1")
    assert str(aside) in set_aside_failed(run.path)
    assert (aside / "failure.txt").read_text() == "ZeroDivisionError"
    assert RunFolder.create(run.path, "seed = 2\n", {}).steps() == []
    assert set_aside_failed(run.path) == ""


@pytest.mark.parametrize("kept", ["steps.jsonl", "checkpoints/000001", "lock"])
def test_a_failed_run_with_progress_or_in_use_is_not_set_aside(run: RunFolder, kept: str) -> None:
    (run.path / "failure.txt").write_text("error")
    if kept == "steps.jsonl":
        (run.path / kept).write_text('{"step": 1}\n')
    elif kept != "lock":
        (run.path / kept).mkdir()
    with run.locked() if kept == "lock" else nullcontext():
        assert set_aside_failed(run.path) == ""
        with pytest.raises(RunError, match="already contains files"):
            check_new_run(run.path)


def test_a_run_cannot_be_made_twice(run: RunFolder) -> None:
    with pytest.raises(RunError, match="--resume"):
        RunFolder.create(run.path, "seed = 2\n", {})
    assert run.config_file.read_text() == "seed = 1\n"


def test_a_file_where_the_folder_should_be_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DiskError, match="cannot create"):
        RunFolder.create(tmp_path / "file" / "run", "", {})
    with pytest.raises(CoveyError):
        RunFolder.create(tmp_path / "file", "", {})
    assert (tmp_path / "file").read_text() == "mine"


def test_only_a_folder_with_a_configuration_opens_as_a_run(run: RunFolder, tmp_path: Path) -> None:
    assert RunFolder.open(run.path) == run
    for path in (tmp_path, tmp_path / "missing", run.path / "missing"):
        with pytest.raises(RunError, match=r"is not a run folder: it has no config\.toml$"):
            RunFolder.open(path)
    for path in (run.config_file, run.path / "checkpoints"):
        with pytest.raises(RunError, match=f"give the run folder: {run.path}$"):
            RunFolder.open(path)


def test_steps_and_evaluations_read_back_in_order(run: RunFolder) -> None:
    steps = [{"step": n, "objective/scores": n / 3} for n in range(1, 4)]
    evaluations = [evaluation(0)]
    for row in steps:
        run.log_step(row)
    for row in evaluations:
        run.log_evaluation(row)
    assert (run.steps(), run.evaluations()) == (steps, evaluations)


def hold(run: RunFolder) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_run_is_held_by_one_process_until_that_is_killed(run: RunFolder) -> None:
    with hold(run) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=r"^.* is in use by another process$"), run.locked():
            pytest.fail("two processes hold the run")
        process.kill()
        process.wait(timeout=30)
        with run.locked():
            assert run.steps() == []


def test_another_process_is_refused_while_this_one_holds_the_run(run: RunFolder) -> None:
    with run.locked(), hold(run) as process:
        output, _ = process.communicate(timeout=30)
        assert output == f"the run {run.path} is in use by another process\n"


def test_the_lock_is_given_back_after_an_exception(run: RunFolder) -> None:
    with pytest.raises(ValueError), run.locked():
        raise ValueError
    with run.locked(), pytest.raises(RunError), run.locked():
        pytest.fail("held twice")


def test_checkpoints_come_oldest_first_by_number_and_only_complete_ones(run: RunFolder) -> None:
    for step in (50, 1_000_000, 999_999, 100, 9):
        checkpoint(run, step)
    (run.path / "checkpoints" / ".000200.partial").mkdir()
    with pytest.raises(ValueError), run.new_checkpoint(300):
        raise ValueError
    assert [step for step, _ in run.checkpoints()] == [9, 50, 100, 999_999, 1_000_000]
    assert run.checkpoints()[1][1] == run.path / "checkpoints" / "000050"
    assert all((path / "model.bin").read_text() == str(step) for step, path in run.checkpoints())


def test_a_run_without_its_folder_of_checkpoints_has_none(run: RunFolder) -> None:
    (run.path / "checkpoints").rmdir()
    assert run.checkpoints() == []
    run.prune_checkpoints(1)


@pytest.mark.parametrize(("keep", "kept"), [(1, [4]), (2, [3, 4]), (4, [1, 2, 3, 4])])
def test_pruning_keeps_the_newest(run: RunFolder, keep: int, kept: list[int]) -> None:
    for step in (1, 2, 3, 4):
        checkpoint(run, step)
    run.prune_checkpoints(keep)
    assert [step for step, _ in run.checkpoints()] == kept


def test_pruning_with_fewer_than_are_kept_removes_nothing(run: RunFolder) -> None:
    run.prune_checkpoints(2)
    checkpoint(run, 1)
    run.prune_checkpoints(2)
    assert [step for step, _ in run.checkpoints()] == [1]


def test_what_came_after_is_put_aside_and_what_came_before_stays(run: RunFolder) -> None:
    for step in range(1, 6):
        run.log_step({"step": step})
        write_rollouts(run, step, [group(rollout(step))], [[0.0]])
    for step in (0, 2, 4):
        run.log_evaluation(evaluation(step))
    checkpoint(run, 3)
    (run.path / "checkpoints" / ".000004.partial").mkdir()
    with (run.path / "steps.jsonl").open("a") as file:
        file.write('{"step": 6, "obj')
    assert put_aside_after(run, start_of(run)) == run.path / "superseded/1"
    assert [row["step"] for row in run.steps()] == [1, 2, 3]
    assert [row["step"] for row in run.evaluations()] == [0, 2]
    assert [len(run.rollouts(step)) for step in range(1, 6)] == [1, 1, 1, 0, 0]
    assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["000003"]
    run.log_step({"step": 4})
    assert [row["step"] for row in run.steps()] == [1, 2, 3, 4]
    aside = run.path / "superseded/1"
    assert (aside / "steps.jsonl").read_text() == '{"step": 4}\n{"step": 5}\n{"step": 6, "obj'
    assert json.loads((aside / "eval.jsonl").read_text()) == evaluation(4)
    assert [p.name for p in sorted((aside / "rollouts").iterdir())] == [
        "000004.jsonl",
        "000005.jsonl",
    ]
    assert put_aside_after(run, start_of(run)) == run.path / "superseded/2"


def test_resuming_a_fresh_run_makes_no_files(run: RunFolder) -> None:
    before = sorted(run.path.rglob("*"))
    assert put_aside_after(run, start_of(run)) is None
    assert sorted(run.path.rglob("*")) == before


def test_rollouts_read_back_with_what_a_person_reads_first(run: RunFolder) -> None:
    groups = [group(rollout(0), rollout(1, reward=None, success=None, parts={}))]
    write_rollouts(run, 12, groups, [[0.5, None]])
    assert (run.path / "rollouts" / "000012.jsonl").is_file()
    first, second = run.rollouts(12)
    lead = ["prompt", "target", "text", "reward", "success", "parts", "advantage", "finish"]
    assert list(first)[: len(lead)] == lead
    assert first == {
        "prompt": "47+8-6?",
        "target": "49",
        "text": "text 0\n\u2028ü",
        "reward": 0.1,
        "success": False,
        "parts": {"correct": 0.0, "format": 1.0},
        "advantage": 0.5,
        "finish": "stop",
        "prompt_id": "p",
        "sample": 0,
        "prompt_tokens": [1, 2, 3],
        "tokens": [4, 5],
        "trained": True,
        "sampler_logp": [-0.1, -1 / 3],
        "policy_version": 7,
        "reward_id": "",
        "task": "arithmetic",
        "info": {},
    }
    assert (second["reward"], second["success"], second["advantage"]) == (None, None, None)


def test_which_tokens_are_trained_is_written_out_only_where_not_all_are(run: RunFolder) -> None:
    write_rollouts(run, 1, [group(rollout(0), rollout(1, (True, False)))], [[0.0, 0.0]])
    assert [row["trained"] for row in run.rollouts(1)] == [True, [True, False]]


def test_rollouts_are_written_in_the_order_of_groups_and_samples(run: RunFolder) -> None:
    write_rollouts(
        run,
        1,
        [group(rollout(0), rollout(1)), group(rollout(2), rollout(3))],
        [[1.0, 2.0], [3.0, 4.0]],
    )
    rows = run.rollouts(1)
    assert [(row["sample"], row["advantage"]) for row in rows] == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize("advantages", [[], [[0.0]], [[0.0, 0.0], [0.0]]])
def test_advantages_that_do_not_match_the_rollouts_write_nothing(
    run: RunFolder, advantages: list[list[float]]
) -> None:
    with pytest.raises(ValueError):
        write_rollouts(run, 1, [group(rollout(0), rollout(1))], advantages)
    assert list((run.path / "rollouts").iterdir()) == []


def test_the_next_run_takes_the_first_free_number(tmp_path: Path) -> None:
    assert next_run_path(tmp_path / "none", "a-grpo") == tmp_path / "none" / "a-grpo-1"
    for name in ("a-grpo-1", "a-grpo-2", "a-grpo-4", "b-grpo-1"):
        (tmp_path / name).mkdir()
    assert next_run_path(tmp_path, "a-grpo") == tmp_path / "a-grpo-3"
    assert next_run_path(tmp_path, "a") == tmp_path / "a-1"


def test_runs_are_listed_by_name_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("b-1", "a-2", "a-1"):
        RunFolder.create(tmp_path / name, "", {})
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "config.toml").touch()
    assert [run.path.name for run in list_runs(tmp_path)] == ["a-1", "a-2", "b-1"]
    assert list_runs(tmp_path / "missing") == []


def test_every_file_is_read_by_any_json_reader(run: RunFolder) -> None:
    run.log_step({"step": 1, "lr": 1e-6})
    write_rollouts(run, 1, [group(rollout(0))], [[0.0]])
    for path in (run.path / "steps.jsonl", run.path / "rollouts" / "000001.jsonl"):
        (line,) = path.read_text(encoding="ascii").splitlines()
        assert isinstance(json.loads(line, parse_constant=pytest.fail), dict)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"train": {"steps": 7, "stop_after": {"tokens": 0, "epochs": 2.0}}}, ("step", 7)),
        ({"train": {"steps": 7, "stop_after": {"updates": 30}}}, ("updates", 30)),
        ({"train": {"steps": 7, "stop_after": {"tokens": 500}}}, ("tokens", 500)),
        ({"train": {"steps": "many", "stop_after": 3}}, ("step", 0)),
        ({}, ("step", 0)),
    ],
)
def test_a_run_ends_at_one_limit(settings: dict[str, Any], limit: tuple[str, int]) -> None:
    assert limit_of(settings) == limit


def test_a_section_that_is_not_a_table_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("seed = 3\ntrain = 5\n[model]\npath = 'x'\n")
    assert settings_of(RunFolder(tmp_path)) == {"seed": 3, "model": {"path": "x"}}
