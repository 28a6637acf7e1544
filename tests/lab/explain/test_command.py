from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.cli.main import run


def test_the_table_of_a_step(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(run_path), "--step", "2"]) == 0
    shown = capsys.readouterr().out
    assert "step 2: grpo, 32 rollouts, 2 optimizer steps" in shown
    assert "checkpoints/000001): the weights that generated these rollouts" in shown
    rows = [
        json.loads(line) for line in (run_path / "rollouts/000002.jsonl").read_text().splitlines()
    ]
    assert all(row["prompt"] in shown for row in rows)
    logged = json.loads((run_path / "steps.jsonl").read_text().splitlines()[1])
    assert f"logged {logged['loss/policy_avg']:.6g}" in shown
    for lines in ("1-8", "9-16", "17-24", "25-32"):
        assert lines in shown


def test_a_rollout_is_shown_whole_and_without_colour_in_a_pipe(
    run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", str(run_path), "--step", "2", "--rollout", "3"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "…" not in shown  # no number is cut
    row = json.loads((run_path / "rollouts/000002.jsonl").read_text().splitlines()[2])
    assert row["text"] in shown
    table = shown.partition("push\n")[2] or shown.partition(" push ")[2]
    numbered = [line.split()[0] for line in table.splitlines() if line.strip()[:1].isdecimal()]
    assert numbered == [str(n) for n in range(1, len(row["tokens"]) + 1)]


def test_json_holds_every_token(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        json.loads(line) for line in (run_path / "rollouts/000002.jsonl").read_text().splitlines()
    ]
    assert run(["explain", str(run_path), "--step", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["exact"] is True
    assert [a["line"] for a in data["rollouts"]] == list(range(1, 33))
    for rollout, row in zip(data["rollouts"], rows, strict=True):
        assert [t["id"] for t in rollout["tokens"]] == row["tokens"]
        assert [t["sampler_logp"] for t in rollout["tokens"]] == pytest.approx(row["sampler_logp"])
    assert run(["explain", str(run_path), "--step", "2", "--rollout", "9", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["rollouts"] == [data["rollouts"][8]]
    assert one["groups"] == [data["groups"][1]]


def test_replay_prints_families_and_cosines(
    run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["explain", str(run_path), "--step", "1", "--replay", "grpo,gspo,dapo"]
    assert run([*arguments, "--set", "beta=0"]) == 0
    shown = capsys.readouterr().out
    assert "the initial model (embedded): the weights that generated these rollouts" in shown
    assert "equal: grpo = gspo\n" in shown
    assert "after the run's 2 optimizer steps with grpo" in shown
    assert run([*arguments, "--set", "beta=0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [m["updates"] for m in data["moments"]] == [0, 2]
    assert data["options"] == {"beta": "0"}
    first, later = (moment["cosine"] for moment in data["moments"])
    assert first[0][1] == pytest.approx(1, abs=1e-9)
    assert later[0][1] < 0.999
    assert first[0][2] < 1 - 1e-6  # lengths differ


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--step", "9"],
            1,
            "has no completions of step 9; it has completions of steps 1 to 3",
        ),
        (["--step", "1", "--rollout", "33"], 2, "--rollout 33: the step has only 32 rollouts"),
        (
            ["--step", "1", "--rollout", "1", "--replay", "all"],
            2,
            "--rollout cannot be combined with --replay",
        ),
        (["--step", "1", "--replay", "grop"], 2, "did you mean 'grpo'"),
        (["--step", "1", "--replay", "grpo", "--set", "beta"], 2, "write an option as key=value"),
        (["--step", "1", "--set", "beta=0"], 2, "--replay"),
        (["--step", "1", "--replay", ","], 2, "--replay"),
    ],
)
def test_a_mistake_is_one_line(
    run_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    assert run(["explain", str(run_path), *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
