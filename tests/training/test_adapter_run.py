"""A run that trains an adapter: repeated, resumed and evaluated, it comes out the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from covey.cli.main import run as covey
from covey.config import load_config
from covey.config.check import check_start
from covey.embedded import CHECKPOINT
from covey.errors import ConfigError
from covey.policy.policy import load_model
from tests.training.test_resume import timeless

SETTINGS = (
    "model.device=cpu", "adapter.rank=4", "adapter.also_train=lm_head", "optimizer.learning_rate=2e-3",
    "train.steps=4", "save.every=2", "save.keep=10", "evaluate.every=2", "evaluate.prompts=16",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "train.mini_batches=1", "objective.beta=0.1",
)  # fmt: skip


def train(path: Path, *more: str) -> int:
    overrides = [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]
    return covey(["train", "--run", str(path), *overrides])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert train(path) == 0
    return path


def test_a_resumed_run_goes_on_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut short"
    shutil.copytree(whole, path)
    assert covey(["train", "--resume", str(path), "--step", "2"]) == 0
    for name in ("steps.jsonl", "eval.jsonl"):
        assert timeless(path / name) == timeless(whole / name)
    names = {file.name for file in (whole / "checkpoints/000004").iterdir()}
    assert names == {
        "adapter_config.json", "adapter_model.safetensors", "covey.json", "optimizer.safetensors",
        "samples.json", "SHA256SUMS",
    }  # fmt: skip
    for name in ("rollouts/000004.jsonl", *(f"checkpoints/000004/{name}" for name in names)):
        assert (path / name).read_bytes() == (whole / name).read_bytes(), name
    learned = timeless(whole / "steps.jsonl")
    assert learned[0]["objective/kl_avg"] == 0.0  # from here the policy leaves the reference
    assert learned[-1]["objective/kl_avg"] > 1e-4


def test_eval_loads_base_and_adapter(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = timeless(whole / "eval.jsonl")[-1]
    for target in (whole, whole / "checkpoints/000004"):
        capsys.readouterr()
        assert covey(["eval", str(target), "--json"]) == 0
        row = json.loads(capsys.readouterr().out)
        shared = {k: v for k, v in row.items() if k in recorded and not k.startswith("time")}
        assert len(shared) > 1
        assert shared == {k: recorded[k] for k in shared}


def test_an_adapter_folder_is_a_model_whose_adapter_is_trained_further(whole: Path) -> None:
    path = f"model.path={whole}/checkpoints/000004"
    model = load_model(load_config(None, [path, "model.device=cpu"]))
    assert model.adapter.r == 4
    with pytest.raises(ConfigError, match=r"adapter.rank = 8, but the adapter .* has rank 4"):
        load_model(load_config(None, [path, "model.device=cpu", "adapter.rank=8"]))


def test_an_adapter_that_transformers_loads_by_itself_is_refused(
    whole: Path, tmp_path: Path
) -> None:
    """As it does for a name on the hub: base and adapter, without saying which is trained."""
    shutil.copytree(CHECKPOINT, tmp_path / "base")
    folder = tmp_path / "both"
    shutil.copytree(whole / "checkpoints/000004", folder)
    shutil.copytree(CHECKPOINT, folder, dirs_exist_ok=True)
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text())
    settings |= {"base_model_name_or_path": str(tmp_path / "base"), "modules_to_save": None}
    file.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="contains both an adapter and a model; give a folder"):
        load_model(load_config(None, [f"model.path={folder}", "model.device=cpu"]))


def test_layers_to_train_in_full_need_an_adapter() -> None:
    with pytest.raises(ConfigError, match=r"adapter.also_train has no effect without an adapter"):
        check_start(load_config(None, ["adapter.also_train=['lm_head']", "model.device=cpu"]), 1)
