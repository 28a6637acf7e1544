"""A run is verified against its own records; what was lost, repeated or changed is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.cli.main import run as covey
from covey.lab.explain.recorded import recomputed
from covey.lab.verify.chain import chain_checks
from covey.records.digests import write_digests
from covey.records.folder import RunFolder

SETTINGS = ("model.device=cpu", "train.steps=4", "save.every=2", "evaluate.every=0",
            "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_tokens=40",
            "train.mini_batches=2", "optimizer.schedule=constant")  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    assert covey(["train", "--run", str(path), *words]) == 0
    return path


def test_a_run_and_its_longer_self_pass(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    assert covey(["runs", "verify", str(run), "--recompute", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["name"] for check in checks] == [
        "steps", "rollouts", "data", "reward", "config", "digests", "checkpoints",
        "recomputed step",
    ]  # fmt: skip
    assert all(check["passed"] for check in checks)
    assert "step 4 from step 2" in checks[-1]["figure"]
    resume = ["train", "--resume", str(run), "--verify", "--set", "train.steps=6"]
    assert covey(resume) == 0
    assert "verified: step 4 from step 2" in capsys.readouterr().out
    assert covey(["runs", "verify", str(run)]) == 0


def _drop_step(run: Path) -> None:
    lines = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    (run / "steps.jsonl").write_text("".join(lines[:1] + lines[2:]))


def _repeat_step(run: Path) -> None:
    lines = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    (run / "steps.jsonl").write_text("".join([*lines[:2], *lines[1:]]))


def _lose_rollout(run: Path) -> None:
    file = run / "rollouts/000003.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))


def _other_prompt(run: Path) -> None:
    file = run / "rollouts/000002.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows[:4]:
        row["prompt"] = "What is 2 + 2?"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _other_text(run: Path) -> None:
    """One letter of a completion; all counts and means stay the same."""
    file = run / "rollouts/000002.jsonl"
    file.write_text(file.read_text().replace("<think>", "<thank>", 1))


def _no_json(run: Path) -> None:
    file = run / "rollouts/000003.jsonl"
    file.write_bytes(b"\xff" + file.read_bytes()[1:])


def _other_reward(run: Path) -> None:
    text = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    text[3] = text[3].replace('"think_answer@', '"mine@')
    (run / "steps.jsonl").write_text("".join(text))


def _edit_config(run: Path) -> None:
    file = run / "config.toml"
    file.write_text(file.read_text().replace("temperature = 1.0", "temperature = 0.5", 1))


def _damage_checkpoint(run: Path) -> None:
    file = run / "checkpoints/000004/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_drop_step, {"steps", "rollouts", "checkpoints", "digests"}),
        (_repeat_step, {"steps", "rollouts", "digests"}),
        (_lose_rollout, {"rollouts", "digests"}),
        (_other_prompt, {"data", "digests"}),
        (_other_reward, {"reward", "rollouts", "digests"}),
        (_other_text, {"digests"}),
        (_no_json, {"rollouts", "data", "digests"}),
        (_edit_config, {"config"}),
        (_damage_checkpoint, {"checkpoints"}),
    ],
)
def test_each_change_is_named(
    whole: Path, tmp_path: Path, change: Callable[[Path], None], names: set[str]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    change(run)
    found = {result.name for result in chain_checks(RunFolder(run)) if result.passed is False}
    assert found == names


@pytest.mark.parametrize(("step", "passed"), [(2, True), (3, None), (4, None)])
def test_steps_with_other_settings_cannot_be_recomputed(
    whole: Path, tmp_path: Path, step: int, passed: bool | None
) -> None:
    """The run goes from step 2 to step 4: a resume at step 2 already had the settings of today."""
    run = shutil.copytree(whole, tmp_path / "run")
    change = {"step": step, "settings": {"save.keep": [3, 2]}}
    (run / "changes.jsonl").write_text(json.dumps(change) + "\n")
    assert recomputed(RunFolder(run)).passed is passed


def test_a_checkpoint_that_its_rollouts_do_not_teach_is_not_resumed(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its digests are right: someone wrote other weights."""
    run = shutil.copytree(whole, tmp_path / "run")
    folder = run / "checkpoints/000004"
    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    weights[name] = torch.nextafter(weights[name], weights[name] + 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "SHA256SUMS").unlink()
    write_digests(folder)
    assert recomputed(RunFolder(run)).passed is False
    assert covey(["train", "--resume", str(run), "--verify"]) == 1
    assert "--verify: step 4 from step 2" in capsys.readouterr().err
