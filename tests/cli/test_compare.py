"""`covey compare`, with real processes that train the embedded model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from covey.cli.main import run as covey
from covey.errors import DataError
from covey.lab.compare import launch
from covey.lab.compare.comparison import (
    Comparison,
    RunResult,
    load_comparison,
    log_path,
    read_outcome,
    run_path,
)
from covey.lab.compare.design import Prepared, Request, checked, design_comparison, extend
from covey.lab.compare.launch import Job, make_jobs, ready
from covey.records.folder import RunFolder
from tests.processes import Forked, wait_until

SETTINGS = (
    "model.device=cpu", "train.steps=6", "train.mini_batches=1", "save.every=2",
    "evaluate.every=3", "evaluate.prompts=16", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "task.train_size=500",
)  # fmt: skip


def command(folder: Path, *more: str) -> list[str]:
    overrides = [word for setting in SETTINGS for word in ("--set", setting)]
    return ["compare", "--folder", str(folder), "--seeds", "1", "--threads", "1", *overrides, *more]


class ForkedRun(Forked):
    """The process of a run, like that of `launch.start`, but torch is imported already."""

    def __init__(self, job: Job) -> None:
        reading, writing = os.pipe()

        def work() -> int:
            os.setsid()
            os.close(writing)
            sys.stdin = os.fdopen(reading)
            launch.main()
            return 1

        super().__init__(work, log_path(job.path))
        os.close(reading)
        self.stdin = os.fdopen(writing, "wb")
        self.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        self.stdin.flush()


def arms(folder: Path) -> dict[str, RunResult]:
    return {run.arm: run for run in load_comparison(folder).runs}


def timeless(comparison: Comparison) -> Comparison:
    """Leave out what always differs between two runs."""
    return replace(
        comparison,
        name="",
        environment={},
        runs=tuple(
            replace(
                o,
                points=tuple(replace(p, seconds=0.0) for p in o.points),
                memory_gib=0.0,
                cpu_seconds=0.0,
            )
            for o in comparison.runs
        ),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparisons") / "whole"
    frozen = "frozen: optimizer.learning_rate=0"
    form = "form: optimizer.learning_rate=0, reward.name=think_answer_form"
    more = ("--arm", frozen, "--arm", form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start", ForkedRun)
        assert covey(command(folder, "--algorithms", "grpo,gspo", *more)) == 0
    return folder


def test_grpo_and_gspo_with_one_update_per_step_are_bitwise_equal(finished: Path) -> None:
    found = arms(finished)
    assert [run.state for run in found.values()] == ["done"] * 4
    assert found["grpo"].weights == found["gspo"].weights != ""
    solved = [[p.correct for p in found[arm].points] for arm in ("grpo", "gspo")]
    assert solved[0] == solved[1]
    assert found["frozen"].weights != found["grpo"].weights
    (start, *later) = [p.correct for p in found["frozen"].points]
    assert later == [start, start]
    assert "same algorithm" in (finished / "report.md").read_text()


def test_all_arms_of_a_seed_start_alike_and_have_the_same_held_out_prompts(finished: Path) -> None:
    found = arms(finished)
    starts = []
    for run in found.values():
        first = (finished / run.folder / "rollouts/000001.jsonl").read_text().splitlines()
        starts.append([json.loads(line)["tokens"] for line in first])
        assert starts[-1] == starts[0]
        assert [p.step for p in run.points] == [0, 3, 6]
        assert [p.updates for p in run.points] == [0, 3, 6]
        assert {tuple(p.correct) for p in run.points} == {tuple(found["grpo"].points[0].correct)}
        assert len(run.points[0].correct) == 16
        assert run.points[-1].seconds > run.points[0].seconds == 0.0


def test_finished_runs_are_not_repeated(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(job: Job) -> subprocess.Popen[bytes]:
        raise AssertionError(f"{job.folder} was started")

    monkeypatch.setattr(launch, "start", refuse)
    reports = {file.name: file.read_bytes() for file in finished.glob("report.*")}
    assert set(reports) == {"report.html", "report.md", "report.json"}
    assert covey(["compare", "--folder", str(finished)]) == 0
    assert covey(command(finished, "--algorithms", "gspo,grpo")) == 0
    assert covey(["compare", "--report", str(finished)]) == 0
    assert {file.name: file.read_bytes() for file in finished.glob("report.*")} == reports
    # Another comparison in the same folder copies runs with the same key.
    near = finished.parent / "near"
    arm = "still: optimizer.learning_rate=0"
    assert covey(command(near, "--algorithms", "grpo", "--arm", arm)) == 0
    assert arms(near)["still"].weights == arms(finished)["frozen"].weights
    capsys.readouterr()
    assert covey(command(finished, "--algorithms", "grpo,dapo")) == 2
    assert "already contains a comparison with different settings" in capsys.readouterr().err
    assert covey(["compare", "--folder", str(finished), "--threads", "7"]) == 2
    assert "change the last digits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "lost"),
    [
        ("evaluations/000006.jsonl", None, (6,)),
        ("evaluations/000006.jsonl", "damaged", (6,)),
        ("evaluations/000000.jsonl", None, (0,)),
        ("eval.jsonl", "unfinished line", (6,)),
        ("eval.jsonl", None, (0, 3, 6)),
        ("steps.jsonl", None, (3, 6)),
    ],
)
def test_a_run_with_damaged_evaluations_is_not_compared(
    file: str, text: str | None, lost: tuple[int, ...], finished: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = tmp_path / "damaged"
    shutil.copytree(finished, folder)
    path = folder / "runs/grpo/seed-0" / file
    if text == "damaged":
        path.write_text(f"x{path.read_text()}")
    elif text is not None:
        path.write_bytes(path.read_bytes()[:-9])
    else:
        path.unlink()
    assert covey(["compare", "--report", str(folder)]) == 0
    assert arms(folder)["grpo"].unreadable == lost
    data = json.loads((folder / "report.json").read_text())
    grpo, gspo, *_ = data["conclusion"]["arms"]
    steps = ", ".join(map(str, lost))
    assert grpo["missing"] == [
        f"grpo seed 0: done, but without a readable evaluation of step {steps}"
    ]
    assert (grpo["seeds"], gspo["seeds"]) == (0, 1)
    assert "delete its folder" in capsys.readouterr().out


def test_arms_with_other_rewards_are_evaluated_with_the_common_one(finished: Path) -> None:
    # Neither of the two learns, so a difference could only come from the evaluation.
    found = {arm: arms(finished)[arm] for arm in ("frozen", "form")}
    assert [p.correct for p in found["form"].points] == [p.correct for p in found["frozen"].points]
    runs = [RunFolder(finished / run.folder) for run in found.values()]
    judges = {run.environment()["evaluation_reward"] for run in runs}
    rewards = {run.environment()["reward"] for run in runs}
    assert (len(judges), len(rewards)) == (1, 2)
    trained_on = [run.steps()[0]["objective/scores"] for run in runs]
    assert trained_on[0] != trained_on[1]


def test_edited_data_change_the_run_key(tmp_path: Path) -> None:
    for name, text in (("train", "1+0?"), ("test", "3-2?")):
        row = json.dumps({"question": text, "answer": "1"})
        (tmp_path / f"{name}.jsonl").write_text(f"{row}\n")
    request = Request(
        source="arithmetic", algorithms=("grpo", "gspo"), seeds=1, threads=1,
        overrides=(
            "model.device=cpu", "task.name=jsonl", f"task.train_file='{tmp_path}/train.jsonl'",
            f"task.held_out_file='{tmp_path}/test.jsonl'",
        ),
    )  # fmt: skip
    design = design_comparison(request)
    before = [job.key for job in make_jobs(tmp_path, design)]
    assert [job.key for job in make_jobs(tmp_path, design)] == before
    (tmp_path / "test.jsonl").write_text('{"question": "3-2?", "answer": "2"}\n')
    assert not {job.key for job in make_jobs(tmp_path, design)} & set(before)
    # A resumed comparison checks the data again.
    (tmp_path / "test.jsonl").write_text('{"question": "1+0?", "answer": "1"}\n')
    resumed = Prepared(folder=tmp_path, design=design, previous=design)
    with pytest.raises(DataError, match="held-out prompts are also training prompts"):
        checked(resumed)


def test_adapters_with_dropout_can_be_compared(tmp_path: Path) -> None:
    adapter = ("adapter.rank=2", "adapter.also_train=['lm_head']", "model.device=cpu")
    plain, dropped = (
        make_jobs(tmp_path, design_comparison(
            Request(source="demo", algorithms=("grpo", "rloo"), seeds=1, threads=1,
                    overrides=("task.train_size=3000", *adapter, *more))
        ))
        for more in ((), ("adapter.dropout=0.1",))
    )  # fmt: skip
    assert len({job.key for job in (*plain, *dropped)}) == 4


def test_arms_and_seeds_can_be_added(finished: Path) -> None:
    prepared = extend(finished, algorithms=["dapo"], seeds=2)
    jobs = make_jobs(finished, prepared.design)
    assert [(job.seed, job.arm) for job in jobs] == [
        (seed, arm) for seed in (0, 1) for arm in ("grpo", "gspo", "frozen", "form", "dapo")
    ]
    left = [(job.arm, job.seed) for job in jobs if ready(job, {})]
    assert left == [("dapo", 0), ("grpo", 1), ("gspo", 1), ("frozen", 1), ("form", 1), ("dapo", 1)]


def test_run_with_another_key_is_moved_aside(finished: Path, tmp_path: Path) -> None:
    (job, *_) = make_jobs(finished, extend(finished).design)
    made = replace(job, folder=str(tmp_path / "seed-0"))
    (tmp_path / "seed-0").symlink_to(job.path)
    assert not ready(made, {})
    assert ready(replace(made, key="other"), {})
    assert (tmp_path / "seed-0.aside-1/config.toml").is_file()
    assert not (tmp_path / "seed-0").exists()


def test_a_run_of_other_code_is_not_taken_over(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (job, *_) = make_jobs(finished, extend(finished).design)
    monkeypatch.setattr(launch, "code_digest", lambda: "0" * 64)
    (other, *_) = make_jobs(finished, extend(finished).design)
    assert other.key != job.key
    assert other.key.partition("-")[0] == job.key.partition("-")[0]
    made = replace(other, folder=str(tmp_path / "seed-0"))
    (tmp_path / "seed-0").symlink_to(job.path)
    assert ready(made, {job.key: job.path})
    assert (tmp_path / "seed-0.aside-1/config.toml").is_file()
    note = capsys.readouterr().err
    assert "seed-0.aside-1" in note
    assert "other code" in note


def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, subprocess.Popen[bytes] | ForkedRun]:
    """Return the processes of runs by arm, filled as they start; only the first is not forked."""
    processes: dict[str, subprocess.Popen[bytes] | ForkedRun] = {}
    start = launch.start

    def remember(job: Job) -> subprocess.Popen[bytes] | ForkedRun:
        processes[job.arm] = ForkedRun(job) if processes else start(job)
        return processes[job.arm]

    monkeypatch.setattr(launch, "start", remember)
    return processes


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def test_killed_run_is_reported_and_resumes_to_the_same_weights(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "killed"
    # The second arm needs more prompts than there are, which fails at the start of its run.
    words = command(folder, "--algorithms", "grpo", "--arm", "hungry: rollout.prompts_per_step=501")
    processes = started(monkeypatch)

    def kill() -> None:
        wait_until(lambda: lines(folder / "runs/grpo/seed-0/steps.jsonl") >= 3)
        processes["grpo"].send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert covey([*words, "--parallel", "1"]) == 1
    killer.join()
    found = arms(folder)
    assert (found["grpo"].state, found["hungry"].state) == ("failed", "failed")
    assert found["grpo"].error.startswith("killed (SIGKILL)")
    assert "a step needs 501 different prompts" in found["hungry"].error
    assert [p.step for p in found["grpo"].points] in ([0], [0, 3])
    output = capsys.readouterr().out
    assert "failed: grpo seed 0: killed (SIGKILL)" in output
    assert "killed (SIGKILL)" in (folder / "report.md").read_text()
    assert "Traceback" in log_path(run_path(folder, "hungry", 0)).read_text()

    assert covey(words) == 1  # the other arm fails as before
    again, whole = arms(folder)["grpo"], arms(finished)["grpo"]
    log = log_path(run_path(folder, "grpo", 0)).read_text()
    assert re.search("after step [24] of 6", log)  # killed after step 3 or later
    assert (again.state, again.weights) == ("done", whole.weights)
    same = [timeless(replace(load_comparison(f), command="", arms=(), runs=(o,), findings=()))
            for f, o in ((folder, again), (finished, whole))]  # fmt: skip
    assert same[0] == same[1]


def test_run_exits_when_its_parent_is_gone(finished: Path, tmp_path: Path) -> None:
    (job, *_) = make_jobs(finished, extend(finished).design)
    job = replace(job, folder=str(tmp_path / "run/seed-0"), config_toml=job.config_toml.replace(
        "steps = 6", "steps = 100000"))  # fmt: skip
    job.path.parent.mkdir()
    process = ForkedRun(job)
    wait_until(lambda: lines(job.path / "steps.jsonl") >= 1)
    process.stdin.close()  # as if the parent were killed
    wait_until(lambda: process.poll() is not None)
    assert process.returncode == 3
    assert read_outcome(job.path) is None  # unfinished, and not failed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithms", "grpo"], "nothing to compare: give at least two arms"),
        (["--add", "dapo"], "--add needs the --folder of an existing comparison"),
        (["--report", "nowhere"], "nowhere is not a comparison folder"),
        (["--algorithms", "grpo,gspo", "--set", "model.path=nowhere/x"], "nowhere/x"),
        (
            ["--algorithms", "grpo,gspo", "--budget", "tokens"],
            "--budget tokens needs --amount TOKENS",
        ),
    ],
)
def test_user_error_is_one_line_and_leaves_no_files(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["--set", "task.train_size=50"] if "--report" not in words else []
    assert covey(["compare", *words, *(quick if "--add" not in words else [])]) in (1, 2)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []
