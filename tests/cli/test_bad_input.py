"""Every mistake is one clear line, the right exit code, and nothing half written."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from covey.cli.main import run
from tests.processes import forked

QUICK = ("train.steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "evaluate.every=0")


LONG = f"{'x' * 300}/x"


def train(path: Path, *settings: str, more: tuple[str, ...] = ()) -> int:
    overrides = [word for setting in (*QUICK, *settings) for word in ("--set", setting)]
    return run(["train", "--run", str(path), *overrides, *more])


def jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (["model.path=/no/such/model"], 1, ["/no/such/model"]),
        (
            ["model.path='someone/unknown-model'"],
            1,
            ["someone/unknown-model", "there is no folder"],
        ),
        (["model.device=cuda:9"], 1, ["cuda:9"]),
        (["model.device=foo"], 2, ["model.device = 'foo'", "auto|cpu|cuda"]),
        (["model.path="], 2, ["model.path = ''"]),
        (["model.path=" + "x" * 300], 1, ["File name too long"]),
        (["seed=" + "[" * 3000], 2, ["config: the value of a setting is nested too deeply"]),
        (["a." * 3000 + "b=1"], 2, ["nested too deeply"]),
        (
            ["task.name=jsonl", 'task.train_file="a\\u0000"', "task.held_out_file=b"],
            1,
            ["null byte"],
        ),
        (['model.path="a\\u0000"'], 1, ["NUL character"]),
        (
            ["rollout.prompts_per_step=1000000001"],
            2,
            ["rollout.prompts_per_step", "less than or equal to 1000000"],
        ),
        (
            ["rollout.group_size=1000000001"],
            2,
            ["rollout.group_size", "less than or equal to 100000"],
        ),
        (["rollout.max_tokens=1000000001"], 2, ["rollout.max_tokens", "equal to 10000000"]),
        (
            ["engine.max_concurrent=1000000001"],
            2,
            ["engine.max_concurrent", "less than or equal to 1000000"],
        ),
        (
            ["rollout.prompts_per_step=1000000", "rollout.group_size=11"],
            2,
            ["11000000 completions per step"],
        ),
        (["train.steps=1000000001"], 2, ["train.steps", "less than or equal to 1000000000"]),
        (["train.epochs=1000000001"], 2, ["train.epochs"]),
        (["adapter.rank=1000000001"], 2, ["adapter.rank"]),
        (["scoring.workers=1000000001"], 2, ["scoring.workers"]),
        (["evaluate.samples=1000000001"], 2, ["evaluate.samples"]),
        (["task.train_size=1000000001"], 2, ["train_size", "at most 1000000000"]),
        (
            ["rollout.group_size=1", "train.mini_batches=1"],
            2,
            ["rollout.group_size = 1", "to at least 2"],
        ),
        (["rollout.prompts_per_step=0"], 2, ["rollout.prompts_per_step = 0"]),
        (["rollout.temperature=0.0"], 2, ["rollout.temperature"]),
        (["optimizer.learning_rate=fast"], 2, ["optimizer.learning_rate = 'fast'"]),
        (["optimizer.learning_rate=nan"], 2, ["optimizer.learning_rate"]),
        (["train.mini_batches=5"], 2, ["train.mini_batches = 5", "4 completions"]),
        (["objective.name=gropo"], 2, ["'gropo'", "did you mean 'grpo'"]),
        (["objective.clip=0.1"], 2, ["objective.clip", "grpo"]),
        (["objective.clip_low=abc"], 2, ["objective.clip_low = 'abc'"]),
        (["task.name=arithmetics"], 2, ["did you mean 'arithmetic'"]),
        (["task.max_operations=0"], 2, ["max_operations"]),
        (["reward.correct=-1.0"], 2, ["correct=-1.0"]),
        (["trian.steps=5"], 2, ["trian", "did you mean 'train'"]),
        (["learning_rate=1"], 2, ["did you mean 'optimizer.learning_rate'"]),
        (["temperature=1"], 2, ["did you mean 'rollout.temperature'"]),
        (["train.old_logp=sampler", "rollout.top_p=0.5"], 2, ["old_logp", "top_p"]),
        (["train.old_logp=sampler", "objective.veto=0.5"], 2, ["old_logp", "veto", "'recompute'"]),
        (["rollout.max_tokens=600"], 2, ["600", "no prompt fits", "context of 512"]),
        (["task.train_size=1"], 1, ["1 training prompts", "rollout.prompts_per_step"]),
    ],
)
def test_one_line_and_nothing_written(
    settings: list[str],
    code: int,
    words: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert train(tmp_path / "run", *settings) == code
    error = capfd.readouterr().err
    assert error.startswith("covey: ")
    assert error.count("\n") == 1
    assert all(word in error for word in words), error
    assert not list(tmp_path.rglob("*.partial"))
    assert not (tmp_path / "run/checkpoints").exists() or not list(
        (tmp_path / "run/checkpoints").iterdir()
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "--stesp", "3"], 2, ["--stesp"]),
        (["trian"], 2, ["trian"]),
        (["train", "no-such-recipe"], 2, ["no-such-recipe", "arithmetic"]),
        (["train", "missing.toml"], 2, ["missing.toml"]),
        (["train", "--set", "steps"], 2, ["key=value"]),
        (["train", "--resume", "nowhere"], 1, ["nowhere", "not a run"]),
        (["train", "--resume", "nowhere", "--set", "seed=1"], 1, ["nowhere", "not a run"]),
        (["train", "arithmetic", "--resume", "nowhere"], 2, ["--resume"]),
        (["eval", "/no/such/model"], 1, ["/no/such/model"]),
        (["doctor", "--out", "no/a.json"], 2, ["--out no/a.json: the folder no does not exist"]),
        (["rewards", "score", "x", "--out", "no/a"], 2, ["--out no/a: the folder no does not"]),
        (["eval"], 2, ["RUN|MODEL"]),
        (["runs", "nowhere"], 1, ["no runs in nowhere"]),
        (["eval", ""], 2, ["model.path = ''"]),
        (["export", "", "out"], 1, ["the path is empty"]),
        (["compare", "--seeds", "1000000000"], 2, ["--seeds", "1000"]),
        *(
            ([*words, LONG], 1, ["File name too long"])
            for words in (
                ["train", "--run"],
                ["train", "--resume"],
                ["sft", "--run"],
                ["runs"],
                ["eval"],
                ["numerics"],
                ["explain", "--step", "1"],
                ["export", "embedded"],
                ["compare", "--report"],
                ["compare", "--folder"],
                ["eval", "embedded", "--out"],
                ["rewards", "score"],
            )
        ),
        (["train", LONG], 2, ["File name too long"]),
    ],
)
def test_wrong_commands(
    arguments: list[str], code: int, words: list[str], capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == code
    error = capfd.readouterr().err
    assert error.startswith("covey: ")
    assert error.count("\n") == 1
    assert all(word in error for word in words), error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["has no prompts"]),
        (["not an object"], ["train.jsonl:1", "str"]),
        ([{"question": "1+1?", "answer": "2"}, {"qestion": "2+2?", "answer": "4"}], ["train.jsonl:2", "'question'", "did you mean 'qestion'"]),
        ([{"question": "9" * 600, "answer": "2"}] * 4, ["jsonl/train/1, has 600", "context is 512"]),
    ],
)  # fmt: skip
def test_bad_datasets_are_named_by_file_and_line(
    rows: list[object], words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = (
        jsonl(tmp_path / "train.jsonl", rows),
        jsonl(tmp_path / "test.jsonl", [{"question": "1+1?", "answer": "2"}]),
    )
    task = ("task.name=jsonl", f"task.train_file='{files[0]}'", f"task.held_out_file='{files[1]}'")
    assert train(tmp_path / "run", *task) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words), error


def test_a_run_folder_in_use_is_not_overwritten(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/precious").write_text("data")
    assert train(tmp_path / "run") == 1
    assert "already contains files" in capfd.readouterr().err
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["precious"]


def test_a_disk_that_fills_up_during_a_save_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    def with_a_full_disk() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        with errors.open("w") as file, contextlib.redirect_stderr(file):
            return train(tmp_path / "run", "train.steps=2")

    errors = tmp_path / "errors"
    child = forked(with_a_full_disk, tmp_path / "output")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    error = errors.read_text()
    assert error.count("\n") == 1
    assert "cannot write" in error
    assert "checkpoints/000002" in error
    assert list((tmp_path / "run/checkpoints").iterdir()) == []
    assert len((tmp_path / "run/steps.jsonl").read_text().splitlines()) == 2
    # With room again, the run goes on.
    assert run(["train", "--resume", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run/checkpoints/000002/model.safetensors").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed = " + "[" * 3000 + "]" * 3000, ["nested too deeply"]),
        ("[reward]\nparts = " + "{a = " * 40 + "1" + "}" * 40, ["nested too deeply", "16 tables"]),
        ("[model]\npath = 'a\0b'", ["x00"]),
    ],
    ids=["arrays", "tables", "nul"],
)
def test_a_file_that_no_setting_can_hold(
    text: str, words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_text(text)
    assert run(["train", str(tmp_path / "bad.toml"), "--print-config"]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"covey: config: {tmp_path / 'bad.toml'}: ")
    assert error.count("\n") == 1
    assert all(word in error for word in words), error


def test_a_byte_order_mark_is_no_part_of_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "marked.toml").write_text("[train]\nsteps = 3\n", encoding="utf-8-sig")
    assert run(["train", str(tmp_path / "marked.toml"), "--print-config"]) == 0
    assert "\nsteps = 3\n" in capfd.readouterr().out
    row = '{"completion": "<answer>2</answer>", "answer": "2"}\n'
    (tmp_path / "rows.jsonl").write_text(row, encoding="utf-8-sig")
    assert run(["rewards", "score", str(tmp_path / "rows.jsonl")]) == 0
    assert "1 completions scored" in capfd.readouterr().out


def test_scores_of_nothing_are_no_mean_of_zero(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "away.py").write_text("def reward(prompt, text): raise OSError('offline')\n")
    jsonl(tmp_path / "rows.jsonl", [{"completion": "2", "answer": "2"}] * 3)
    own = ["--set", "reward.name=away:reward", "--trust", "away", "--out", "scores.jsonl"]
    assert run(["rewards", "score", "rows.jsonl", *own, "--json"]) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "covey: rows.jsonl: none of the 3 completions could be scored; the first error: OSError: "
        f"offline ({tmp_path / 'away.py'}, line 1)\n"
    )
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == 3
