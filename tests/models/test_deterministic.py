"""Deterministic mode: its settings, and real runs that are repeated and resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import deterministic as torch_settings

from covey.cli.main import run
from covey.config import load_config, parse_config
from covey.errors import ModelError
from covey.models.device import WORKSPACE, make_deterministic, skip_determinism_check
from covey.models.load_model import load_language_model
from covey.policy.policy import load_model, policy_of

SETTINGS = (
    "train.steps=3", "train.mini_batches=2", "rollout.prompts_per_step=4", "rollout.group_size=8",
    "rollout.max_tokens=24", "task.min_operations=2", "optimizer.learning_rate=3e-4",
    "objective.beta=0.04", "evaluate.every=0", "save.every=2",
)  # fmt: skip


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mode applies to a whole process; switch it off for later tests."""
    monkeypatch.delenv(WORKSPACE, raising=False)
    precision, filled = (
        torch.get_float32_matmul_precision(),
        torch_settings.fill_uninitialized_memory,
    )
    deterministic = torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    torch_settings.fill_uninitialized_memory = filled


def command(path: Path, *settings: str) -> list[str]:
    chosen = [word for s in (*SETTINGS, *settings) for word in ("--set", s)]
    return ["train", "arithmetic", "--run", str(path), *chosen]


def left_by(path: Path) -> tuple[dict[str, bytes], list[Any]]:
    """Return the weights and moments of a run's checkpoints, and all its rollouts."""
    tensors = {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.glob("checkpoints/*/*.safetensors"))
    }
    sampled = [
        [json.loads(line)[key] for key in ("tokens", "sampler_logp", "reward")]
        for file in sorted(path.glob("rollouts/*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert len(tensors) == 4  # two checkpoints, of weights and moments each
    assert len(sampled) == 3 * 32
    return tensors, sampled


def test_deterministic_mode_is_torchs_strict_mode(put_back: None) -> None:
    make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ[WORKSPACE] == ":4096:8"
    assert torch.get_float32_matmul_precision() == "highest"
    with skip_determinism_check():
        assert not torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_the_mode_is_off_by_default_and_keeps_a_users_workspace_setting(
    put_back: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model(load_config())
    assert not torch.are_deterministic_algorithms_enabled()
    assert WORKSPACE not in os.environ
    with skip_determinism_check():
        pass
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(WORKSPACE, ":16:8")
    make_deterministic()
    assert os.environ[WORKSPACE] == ":16:8"


def test_setting_the_mode_too_late_is_an_error(
    put_back: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ModelError, match=f"{WORKSPACE}=:4096:8"):
        make_deterministic()
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv(WORKSPACE, ":4096:8")
    make_deterministic()


def test_parity_checks_pass_in_deterministic_mode(put_back: None) -> None:
    # A refused operation would look like a failed parity check.
    before = load_language_model("embedded", device="cpu")
    make_deterministic()
    after = load_language_model("embedded", device="cpu")
    assert (after.packs, after.flash, after.fused) == (before.packs, before.flash, before.fused)
    assert after.packs


def test_no_cuda_graphs_in_deterministic_mode() -> None:
    # Which micro-batch finds a graph depends on those before it, and a resumed run has had none.
    for wanted, graphs, recorded in (
        (False, "auto", True), (True, "auto", False), (False, "off", False),
    ):  # fmt: skip
        config = parse_config({"model": {"deterministic": wanted}, "train": {"graphs": graphs}})
        assert config.records_passes is recorded
    model = load_language_model("embedded", device="cpu")
    assert not policy_of(parse_config({"model": {"deterministic": True}}), model).graphs


def test_on_a_cpu_deterministic_mode_changes_no_bit(put_back: None, tmp_path: Path) -> None:
    found = []
    for name, wanted in (("plain", "false"), ("one", "true"), ("other", "true")):
        assert run(command(tmp_path / name, f"model.deterministic={wanted}")) == 0
        assert torch.are_deterministic_algorithms_enabled() is (wanted == "true")
        found.append(left_by(tmp_path / name))
    assert found[1] == found[2]
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "top_p"), [("bfloat16", "1.0"), ("float32", "0.9")])
def test_on_a_gpu_runs_are_the_same_bit_for_bit(tmp_path: Path, dtype: str, top_p: str) -> None:
    settings = (
        "model.deterministic=true", "model.device=cuda", f"model.dtype={dtype}",
        f"rollout.top_p={top_p}",
    )  # fmt: skip
    # Separate processes: the mode has to be set before CUDA is used.
    _covey(*(command(tmp_path / name, *settings) for name in ("one", "other")))
    # Back to the checkpoint of step 2, and step 3 once more.
    shutil.copytree(tmp_path / "one", tmp_path / "resumed")
    _covey(["train", "--resume", str(tmp_path / "resumed"), "--step", "2"])
    one, other, resumed = (left_by(tmp_path / name) for name in ("one", "other", "resumed"))
    assert one[1] == other[1]  # rollouts
    assert one[0] == other[0]  # weights and moments
    assert one == resumed


def _covey(*commands: list[str]) -> None:
    """Run commands side by side."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "covey", *words],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for words in commands
    ]  # fmt: skip
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
