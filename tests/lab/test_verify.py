"""Checkpoints are verified: damage is named, and the newest follows from its rollouts."""

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
from covey.lab.verify import checkpoint_checks
from covey.records.files import write_digests
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
        "checkpoint 2", "checkpoint 4", "recomputed step",
    ]  # fmt: skip
    assert all(check["passed"] for check in checks)
    assert "step 4 from step 2" in checks[-1]["figure"]
    resume = ["train", "--resume", str(run), "--verify", "--set", "train.steps=6"]
    assert covey(resume) == 0
    assert "verified: step 4 from step 2" in capsys.readouterr().out
    assert covey(["runs", "verify", str(run)]) == 0


def _damage_checkpoint(run: Path) -> None:
    file = run / "checkpoints/000004/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def _damage_state(run: Path) -> None:
    file = run / "checkpoints/000004/covey.json"
    file.write_text(file.read_text()[:-20])
    (run / "checkpoints/000004/SHA256SUMS").unlink()


@pytest.mark.parametrize("change", [_damage_checkpoint, _damage_state])
def test_a_damaged_checkpoint_is_named(
    whole: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    change(run)
    results = {result.name: result.passed for result in checkpoint_checks(RunFolder(run))}
    assert results == {"checkpoint 2": True, "checkpoint 4": False}
    assert covey(["runs", "verify", str(run)]) == 1


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
