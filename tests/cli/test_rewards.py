"""Rewards from the command line: listed, refused, run in processes, changed, and interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import run
from covey.config import load_config
from covey.config.resolve import resolve
from covey.records.folder import RunFolder
from covey.records.trackers.console import before_and_after
from covey.rewards.registry import REWARDS
from covey.sandbox.program import isolation_problem
from tests.processes import alive, forked, wait_until

QUICK = (
    "model.device=cpu", "train.steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4",
    "evaluate.every=0", "save.every=1", "save.keep=10", "scoring.workers=2",
)  # fmt: skip

LENGTHS = """
def reward(prompt, text):
    return len(text) / {most}
"""

SLOW = """
import pathlib, time
def reward(prompt, text):
    (pathlib.Path(__file__).parent / "begun").touch()
    time.sleep({seconds})
    return float(len(text))
"""


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def train(path: Path | str, *settings: str, more: tuple[str, ...] = ()) -> int:
    return run(["train", "--run", str(path), *sets(*QUICK, *settings), *more])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder of the user's own, where modules called `mine` are read anew."""
    monkeypatch.chdir(tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    sys.modules.pop("mine", None)


def one_line(capfd: pytest.CaptureFixture[str]) -> str:
    error = capfd.readouterr().err
    assert error.startswith("covey: "), error
    assert error.count("\n") == 1, error
    return error


def scorers_of(parent: int) -> list[int]:
    """Return the scoring processes of a process."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text().rsplit(") ", 1)[1].split()
                words = (folder / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[1]) == parent and b"covey.workers" in words:
                found.append(int(folder.name))
    return found


# A reward that changes between two parts of a run.


def test_a_reward_that_was_edited_is_noted_and_every_completion_says_which_it_was(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "mine.py").write_text(LENGTHS.format(most=10))
    assert train("run", "reward.name=mine:reward") == 0
    folder = RunFolder(here / "run")
    old = folder.environment()["reward"]
    assert re.fullmatch(r"mine:reward@1#[0-9a-f]{12}", old)
    assert [m["reward_id"] for m in folder.steps()] == [old, old]
    assert "the reward has changed" not in capfd.readouterr().out

    (here / "mine.py").write_text(LENGTHS.format(most=20))
    forget()
    assert run(["train", "--resume", "run", "--step", "1"]) == 2
    again = ["train", "--resume", "run", "--step", "1", "--allow-changed-reward"]
    assert run(again) == 0
    out = capfd.readouterr().out
    new = folder.steps()[1]["reward_id"]
    assert new != old
    assert f"from {old} to {new}" in " ".join(out.split())
    for step, who, most in ((1, old, 10), (2, new, 20)):
        rows = folder.rollouts(step)
        assert {row["reward_id"] for row in rows} == {who}
        assert [row["reward"] for row in rows] == [len(row["text"]) / most for row in rows]
    assert folder.environment()["reward"] == old


def test_a_reward_that_was_not_edited_is_not_noted(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "mine.py").write_text(LENGTHS.format(most=10))
    assert train("run", "reward.name=mine:reward") == 0
    forget()
    assert run(["train", "--resume", "run", "--step", "1"]) == 0
    out = capfd.readouterr().out
    assert "resuming after step 1" in out
    assert "the reward has changed" not in out


# Ctrl-C while answers are judged.


def wait(child: int) -> int:
    """Wait for a process to end by itself, and return its exit code."""
    limit = time.monotonic() + 60
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the process does not end")
        time.sleep(0.01)


def start(folder: Path, seconds: float, *settings: str) -> tuple[int, list[int]]:
    """Start a run with a slow reward; return it and its scoring processes once they judge."""
    (folder / "mine.py").write_text(SLOW.format(seconds=seconds))
    slow = ("train.steps=3", "save.every=0", "reward.name=mine:reward", *settings)
    child = forked(lambda: train("run", *slow), folder / "output")
    wait_until((folder / "begun").exists)
    return child, scorers_of(child)


def test_ctrl_c_while_judging_finishes_the_step_and_can_be_resumed(here: Path) -> None:
    trainer, scorers = start(here, 0.05)
    os.kill(trainer, signal.SIGINT)
    assert wait(trainer) == 130
    output = (here / "output").read_text()
    assert "SIGINT: saved step 1 of 3" in output
    assert "covey train --resume run" in output
    assert len(scorers) == 2
    assert not any(alive(pid) for pid in scorers)
    assert run(["train", "--resume", "run", "--step", "1"]) == 0
    steps = RunFolder(here / "run").steps()
    assert [m["step"] for m in steps] == [1, 2, 3]
    assert [m["objective/unscored"] for m in steps] == [0, 0, 0]
    assert scorers_of(os.getpid()) == []


def test_ctrl_c_twice_ends_at_once_and_says_so(here: Path) -> None:
    trainer, scorers = start(here, 0.2, "rollout.group_size=64")
    began = time.monotonic()
    os.kill(trainer, signal.SIGINT)
    time.sleep(0.3)
    os.kill(trainer, signal.SIGINT)
    assert wait(trainer) == 130
    assert time.monotonic() - began < 20  # judging 256 answers takes 25 seconds
    output = (here / "output").read_text()
    assert output.splitlines()[-1] == "covey: interrupted"
    assert "Traceback" not in output
    assert len(scorers) == 2
    assert not any(alive(pid) for pid in scorers)
    folder = RunFolder.open(here / "run")
    assert folder.checkpoints() == []
    assert folder.steps() == []


def test_no_process_is_left_when_the_run_folder_cannot_be_used(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "mine.py").write_text(LENGTHS.format(most=10))
    (here / "run").mkdir()
    (here / "run/precious").write_text("data")
    assert train("run", "reward.name=mine:reward") == 1
    assert "already contains files" in one_line(capfd)
    assert scorers_of(os.getpid()) == []


# Data with bad rows.


@pytest.fixture
def bad_rows(here: Path) -> list[str]:
    good = [json.dumps({"question": f"{n}+5?", "answer": str(n + 5)}) for n in range(10, 16)]
    (here / "train.jsonl").write_text(
        "\n".join([*good[:2], "not JSON", *good[2:], '{"answer": "7"}'])
    )
    (here / "test.jsonl").write_text("\n".join([*good[:2], '{"question": "1+1?"}']))
    return ["task.name=jsonl", "task.train_file=train.jsonl", "task.held_out_file=test.jsonl"]


def test_a_bad_row_is_one_line_that_names_it(
    bad_rows: list[str], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train("run", *bad_rows) == 1
    assert "train.jsonl:3 is not JSON" in one_line(capfd)
    assert not (here / "run").exists()


def test_bad_rows_can_be_skipped_and_are_counted(
    bad_rows: list[str], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train("run", *bad_rows, more=("--skip-bad-rows",)) == 0
    note = next(line for line in capfd.readouterr().out.splitlines() if "bad rows" in line)
    assert note.startswith("3 bad rows skipped; the first error: task: train.jsonl:3 is not JSON")
    asked = {row["prompt_id"] for step in (1, 2) for row in RunFolder(here / "run").rollouts(step)}
    assert asked <= {f"jsonl/train/{line}" for line in (1, 2, 4, 5, 6, 7)}
    assert run(["train", "--resume", "run", "--step", "1"]) == 0
    assert "3 bad rows skipped" in capfd.readouterr().out


def test_skipping_is_an_option_of_tasks_that_read_rows(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train("run", more=("--skip-bad-rows",)) == 2
    assert "task.skip_bad_rows is not an option of arithmetic" in one_line(capfd)


# Several tasks, each with its reward.

MIXED = """
[task]
name = "mixed"
[task.parts.arithmetic]
weight = 3
max_operations = 2
[task.parts.tools]
system = "Call a tool."
[reward]
name = "by_task"
[reward.tasks.arithmetic]
name = "mix"
gated = false
[reward.tasks.arithmetic.parts.accuracy]
name = "math_answer"
weight = 0.75
[reward.tasks.arithmetic.parts.format]
name = "think_answer_form"
weight = 0.25
[reward.tasks.tools]
name = "agent"
[rollout]
max_tokens = 48
"""


def test_several_tasks_each_have_their_reward_and_the_run_reads_back(here: Path) -> None:
    (here / "both.toml").write_text(MIXED)
    assert run(["train", "both.toml", "--run", "run", *sets(*QUICK)]) == 0
    folder = RunFolder(here / "run")
    written = load_config("run/config.toml")
    assert written == resolve(load_config("both.toml", QUICK))
    assert written == resolve(written)
    assert written.task.options["parts"]["arithmetic"] == {"weight": 3, "max_operations": 2}
    rows = [row for step in (1, 2) for row in folder.rollouts(step)]
    assert {row["task"] for row in rows} == {"arithmetic", "tools"}
    for row in rows:
        if row["task"] == "arithmetic":
            assert set(row["parts"]) >= {"accuracy", "format"}
            expected = 0.75 * row["parts"]["accuracy"] + 0.25 * row["parts"]["format"]
            assert row["reward"] == pytest.approx(expected)
        else:
            assert {"accuracy", "format", "efficiency", "safety"} <= set(row["parts"])
    before = [{k: v for k, v in m.items() if "time/" not in k} for m in folder.steps()]
    assert run(["train", "--resume", "run", "--step", "1"]) == 0
    assert [{k: v for k, v in m.items() if "time/" not in k} for m in folder.steps()] == before
    assert [row for step in (1, 2) for row in folder.rollouts(step)] == rows


def parts_of(*settings: str) -> dict[str, Any]:
    config = load_config("both.toml", settings)
    return resolve(config).reward.options["tasks"]["arithmetic"]["parts"]  # type: ignore[no-any-return]


def test_settings_reach_into_nested_tables(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "both.toml").write_text(MIXED)
    prefix = "reward.tasks.arithmetic.parts"
    weights = (f"{prefix}.accuracy.weight=0.5", f"{prefix}.format.weight=0.5")
    assert [part["weight"] for part in parts_of(*weights).values()] == [0.5, 0.5]
    assert run(["train", "both.toml", *sets(*QUICK, weights[0])]) == 2
    assert "must sum to 1, not 0.75" in one_line(capfd)
    assert run(["train", "both.toml", *sets(f"{prefix}.accuracy.tolerence=0.1")]) == 2
    assert "parts.accuracy.tolerence is not an option" in one_line(capfd)


def test_names_may_be_set_in_any_order(here: Path) -> None:
    settings = [
        "reward.parts.accuracy.name=math_answer",
        "reward.parts.accuracy.weight=1.0",
        "reward.name=mix",
    ]
    for order in (settings, settings[::-1]):
        options = load_config("arithmetic", order).reward.options
        assert options == {"parts": {"accuracy": {"name": "math_answer", "weight": 1.0}}}


# Mistakes.

ALONE = sets(
    "reward.name=judge",
    "reward.model=m",
    "reward.base_url='http://127.0.0.1:9'",
    "reward.api_key_env=''",
)
ANSWERS = "\n".join(json.dumps({"completion": c, "answer": "4"}) for c in ("4", "5", ""))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["rewards", "list", "think_anser"], 2, ["'think_anser' is not a known reward", "'think_answer'"]),
        (["rewards", "list", "no.such:thing", "--trust", "no"], 2, ["cannot import 'no.such'"]),
        (["rewards", "score", "missing.jsonl"], 1, ["cannot read missing.jsonl"]),
        (["rewards", "score", "empty.jsonl"], 1, ["empty.jsonl has no completions"]),
        (["rewards", "score", "bad.jsonl"], 1, ["bad.jsonl:1 is not JSON"]),
        (["rewards", "score", "answers.jsonl", "--config", "no.toml"], 2, ["'no.toml'"]),
        (["rewards", "score", "answers.jsonl", *sets("reward.name=maths")], 2, ["'maths'", "'math'"]),
        (["rewards", "score", "answers.jsonl", *sets("reward.corect=2.0")], 2, ["reward.corect", "'correct'"]),
        (["rewards", "score", "answers.jsonl", *ALONE], 2, ["cannot be the only reward"]),
        (["rewards", "lab", "arithmetics"], 2, ["'arithmetics'", "'arithmetic'"]),
        (["rewards", "lab", *ALONE], 2, ["cannot be the only reward"]),
        (["rewards", "lab", "--labelled", "missing.jsonl"], 1, ["cannot read missing.jsonl"]),
        (["rewards", "lab", "--labelled", "answers.jsonl"], 1, ["completion 1 has no label; add the field 'correct'"]),
        (["rewards", "lab", *sets("reward.name=math", "reward.tolerence=1.0")], 2, ["reward.tolerence", "'tolerance'"]),
        (["rewards", "lab", *sets("reward.name=by_task", "reward.tasks={arithmetic={name='judge', model='m', base_url='http://127.0.0.1:9', api_key_env=''}}")], 2, ["reward.tasks.arithmetic.name = 'judge'", "cannot be the only reward"]),
        (["train", *ALONE], 2, ["cannot be the only reward"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    arguments: list[str],
    code: int,
    words: list[str],
    here: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (here / "answers.jsonl").write_text(ANSWERS)
    (here / "empty.jsonl").write_text("\n\n")
    (here / "bad.jsonl").write_text("[" * 100_000)
    assert run(arguments) == code
    error = one_line(capfd)
    assert all(word in error for word in words), error
    assert scorers_of(os.getpid()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["rewards", "score", "answers.jsonl", *sets("reward.name=code")],
        ["rewards", "lab", *sets("reward.name=code", "task.name=code")],
        ["train", *sets("reward.name=by_task", "reward.tasks={arithmetic={name='code_tests'}}")],
    ],
)
def test_programs_are_not_judged_without_isolation(arguments: list[str], here: Path) -> None:
    (here / "answers.jsonl").write_text(ANSWERS)

    def work() -> int:
        os.environ["PATH"] = str(here)
        isolation_problem.cache_clear()
        return run(arguments)

    assert wait(forked(work, here / "output")) == 2
    line = (here / "output").read_text().splitlines()[-1]
    assert "bwrap is not installed; install bubblewrap" in line
    assert "unsafe = true" in line


def test_every_reward_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rewards", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(REWARDS)
    assert all(row["text"] for row in rows)
    assert run(["rewards", "list", "math"]) == 0
    assert "reward.early_format = 0.0" in capsys.readouterr().out


# Scoring a file, and measuring a model, with a reward in processes.


def test_a_file_is_scored_in_its_order(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.py").write_text("def reward(prompt, text): return {'n': float(text)}\n")
    texts = [*(str(n) for n in range(20)), "word", "2028\u2028"]
    lines = [json.dumps({"text": t, "answer": "1"}, ensure_ascii=False) for t in texts]
    (here / "answers.jsonl").write_text("\n".join(lines))
    arguments = ["rewards", "score", "answers.jsonl", *sets("reward.name=mine:reward")]
    assert run([*arguments, "--json", "--out", "scores.jsonl"]) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (here / "scores.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [*map(float, range(20)), None, 2028.0]
    assert (summary["completions"], summary["unscored"]) == (22, 1)
    assert summary["mean_reward"] == summary["parts"]["n"] == pytest.approx((190 + 2028) / 21)
    assert summary["success"] == pytest.approx(20 / 21)
    assert "could not convert string to float: 'word'" in summary["first_error"]
    assert scorers_of(os.getpid()) == []


def test_eval_judges_in_processes_and_says_what_it_could_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "from covey.rewards import ThinkAnswer\n"
    text += "def reward(prompt, text): return ThinkAnswer()(prompt, text)\n"
    text += "def fails(prompt, text): raise OSError('offline')\n"
    (here / "mine.py").write_text(text)
    measure = [
        "eval",
        "embedded",
        "--samples",
        "2",
        *sets("evaluate.prompts=16", "scoring.workers=2"),
    ]
    assert run([*measure, "--json"]) == 0
    usual = json.loads(capsys.readouterr().out)
    assert run([*measure, "--json", *sets("reward.name=mine:reward")]) == 0
    own = json.loads(capsys.readouterr().out)
    # The user's function is not called for baselines, so only the frequent target is known.
    assert set(own.pop("baselines")) == {"constant"}
    assert set(usual.pop("baselines")) == {"constant", "empty", "copy"}
    assert own == usual
    assert usual["unscored"] == 0
    assert 0 < usual["greedy"]["value"] < 1
    assert run([*measure, *sets("reward.name=mine:fails")]) == 1
    error = capsys.readouterr().err
    assert "embedded: none of the 48 completions could be scored; the first error: " in error
    assert "offline" in error
    assert scorers_of(os.getpid()) == []


def test_parts_that_come_and_go_do_not_break_the_table_at_the_end(here: Path) -> None:
    folder = RunFolder.create(here / "run", "", {})
    value = {"value": 0.5, "low": 0.4, "high": 0.6}
    for step, parts in ((0, {"often": 1.0, "once": 1.0}), (5, {"often": 0.5, "late": 1.0})):
        estimates = {f"parts/{name}": {**value, "value": part} for name, part in parts.items()}
        row = {"step": step, "prompts": 4, "greedy": value, **estimates, "parts": parts}
        folder.log_evaluation(row)
    table = before_and_after(folder)
    assert table is not None
    assert [str(cell) for cell in table.columns[0].cells] == ["greedy", "greedy: often"]
