from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from covey.cli.main import run

SMALL = (
    "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_tokens=40", "evaluate.every=0",
    "optimizer.learning_rate=1e-4", "task.min_operations=2", "train.steps=2", "save.every=1",
    "train.mini_batches=1",
)  # fmt: skip
CHOSEN = [word for setting in SMALL for word in ("--set", setting)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "short"
    assert run(["train", "arithmetic", "--run", str(path), *CHOSEN]) == 0
    return path


def test_the_text_names_the_numbers_of_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "numerics.json"
    arguments = ["--set", "rollout.top_p=0.8", "--set", "train.mini_batches=3", "--out", str(file)]
    assert run(["numerics", *CHOSEN, *arguments]) == 0
    shown, data = capsys.readouterr().out, json.loads(file.read_text())
    table = shown.partition("difference")[2].partition("mean, p99")[0].splitlines()
    rows = [re.split(r"\s{2,}", line.strip()) for line in table if re.search(r"\de[+-]\d", line)]
    assert rows == [
        [
            c["title"], *(f"{c[key]:.2e}" for key in ("mean", "p99", "max")),
            f"{c['ratio_mean']:.5f}", f"{c['outside']:.2%}", f"{c['effective']:.2%}", c["severity"],
        ]
        for c in data["causes"]
    ]  # fmt: skip
    assert [c["title"] for c in data["causes"]][-2:] == [
        "staleness, 1 optimizer step", "staleness, 2 optimizer steps",
    ]  # fmt: skip
    for cause in data["causes"]:
        assert cause["what"] in shown
        assert cause["advice"] in shown
    assert f"{data['completions']} completions, {data['causes'][0]['tokens']} tokens" in shown
    assert "need not add up" in shown
    assert "not in [0.8, 1.2]" in shown
    assert data["clip"] == {"low": 0.8, "high": 1.2, "per_completion": False}


def test_the_newest_weights_of_a_run_are_measured_and_nothing_is_changed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As if it had been stopped after step 1: the next step is then the one that was logged.
    stopped = tmp_path / "stopped"
    shutil.copytree(finished, stopped)
    shutil.rmtree(stopped / "checkpoints/000002")
    before = {p: p.stat().st_mtime_ns for p in stopped.rglob("*")}
    assert run(["numerics", str(stopped), "--updates", "0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {p: p.stat().st_mtime_ns for p in stopped.rglob("*")} == before
    logged = json.loads((finished / "steps.jsonl").read_text().splitlines()[1])
    total = data["causes"][0]
    assert total["mean"] == pytest.approx(logged["debug/sampler_logp_diff_mean"], rel=1e-6)
    assert total["max"] == pytest.approx(logged["debug/sampler_logp_diff_max"], rel=1e-6)
    assert total["ratio_mean"] == pytest.approx(logged["debug/rho_mean"], rel=1e-9)


def test_mistakes_are_one_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        ([str(finished), "--model", "embedded"], "with its own weights"),
        (["--out", str(tmp_path / "no/x.json")], "does not exist"),
        ([str(tmp_path)], "not a run"),
        (["arithmetik"], "did you mean 'arithmetic'"),
    ):
        assert run(["numerics", *arguments]) != 0
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


def test_an_sft_run_is_an_error(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "warm"
    shutil.copytree(finished, copied)
    file = copied / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "kind": "sft"}))
    assert run(["numerics", str(copied)]) != 0
    assert "is an SFT run, which has no rollouts to measure" in capsys.readouterr().err
