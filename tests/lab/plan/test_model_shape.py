"""Shapes from config.json alone equal those of transformers' models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from covey.config import load_config
from covey.embedded import CHECKPOINT
from covey.lab.plan import model_shape
from covey.lab.plan.model_shape import measure, shape_of

SIZES = {
    "vocab_size": 262, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_act": "silu",
}  # fmt: skip
CONFIGS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "untied": {"model_type": "llama", "head_dim": 20, "attention_bias": True, "mlp_bias": True},
    "scaled": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "sliding_window": 64,
              "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "hidden_act": "gelu"},
}  # fmt: skip
ADAPTERS = (
    (),
    ("adapter.rank=4",),
    ("adapter.rank=3", 'adapter.targets=["q_proj","down_proj"]', 'adapter.also_train=["lm_head"]'),
)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shape_from_config_json_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **CONFIGS[name]}))
    assert model_shape._llama_config(str(tmp_path)) is not None
    built = model_shape._meta_model(str(tmp_path), {})
    for adapter in ADAPTERS:
        config = load_config(None, [f"model.path={tmp_path}", *adapter])
        section = config.adapter
        assert shape_of(config) == measure(built, section.rank, section.targets, section.also_train)


@pytest.mark.parametrize(
    "more",
    [
        {"model_type": "mistral"},
        {"model_type": "qwen2", "use_sliding_window": True},
        {"model_type": "qwen3"},  # its default head_dim is not hidden_size / heads
        {"model_type": "llama", "num_key_value_heads": None},
    ],
)
def test_other_configurations_are_left_to_transformers(
    more: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **more}))
    assert model_shape._llama_config(str(tmp_path)) is None


def test_a_plan_imports_no_model_code_of_transformers(tmp_path: Path) -> None:
    """It takes two thirds of the time of `covey plan`."""
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    code = (
        "import sys; from covey.cli.main import run; "
        f"assert run(['plan', '--model', {str(tmp_path / 'model')!r}]) == 0; "
        "slow = ('transformers.modeling_utils', 'torch._dynamo', 'scipy', 'triton'); "
        "assert not [name for name in slow if name in sys.modules]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
