"""A model is loaded with all of its weights or not at all, and can be saved again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.embedded import CHECKPOINT
from covey.errors import ModelError
from covey.models.chat import Template
from covey.models.export import export_model
from covey.models.load_model import load_language_model
from covey.policy.checkpoint import save_policy
from tests.models.test_adapter import policy_of

LOST = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model to damage."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))


@pytest.mark.parametrize(
    "damage",
    [lambda tensors: tensors.pop(LOST), lambda tensors: tensors.update({LOST: torch.zeros(2, 3)})],
)
def test_missing_or_misshapen_weights_are_an_error(
    folder: Path, damage: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=LOST):
        load_language_model(str(folder), device="cpu")


def test_a_truncated_file_is_a_one_line_error(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="cannot load"):
        load_language_model(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"temperature": 0.6, "top_p": 0.95}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "do_sample": False}, {}),
        (
            {"temperature": 0.6, "top_p": 0.95, "do_sample": True},
            {"temperature": 0.6, "top_p": 0.95, "do_sample": True},
        ),
    ],
)
def test_any_generation_config_can_be_saved_and_exported(
    settings: dict[str, Any], kept: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    ids = {"bos_token_id": 5, "eos_token_id": [1, 44], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ids | settings))
    model = load_language_model(str(folder), device="cpu")
    assert model.stop_ids == (1, 44)
    saved, exported = tmp_path / "saved", tmp_path / "exported"
    saved.mkdir()
    save_policy(policy_of(model), saved, {"step": 1})
    export_model(
        str(folder), exported, dtype="float32", template=Template(), card=lambda stops, merged: ""
    )
    for out in (saved, exported):
        written = json.loads((out / "generation_config.json").read_text())
        written.pop("transformers_version")
        written.pop("_from_model_config", None)
        assert written == ids | kept


def test_a_folder_without_a_tokenizer_is_told_what_it_lacks(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="no tokenizer"):
        load_language_model(str(folder), device="cpu")
