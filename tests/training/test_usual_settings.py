"""Settings that users of other trainers expect: epochs, warm-up ratio, dropout and 4-bit weights."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from pathlib import Path

import pytest
import torch

from covey.cli.main import run as covey
from covey.config import load_config
from covey.config.check import check_start
from covey.config.resolve import resolve
from covey.errors import ConfigError
from covey.policy.policy import load_model
from covey.policy.schedule import Used, schedule_of
from covey.records.folder import RunFolder
from covey.run import Run

LORA = ("adapter.rank=2", "model.device=cpu", "rollout.prompts_per_step=2", "rollout.group_size=4",
        "evaluate.every=0", "rollout.max_tokens=40", "train.mini_batches=1")  # fmt: skip


def test_epochs_over_the_data_give_the_number_of_steps() -> None:
    """33 prompts, 8 in a step: 4 steps an epoch, and every prompt at most once in it."""
    config = resolve(
        load_config(
            "arithmetic",
            ["train.stop_after.epochs=2.5", "task.train_size=33", "rollout.prompts_per_step=8"],
        )
    )
    with closing(Run.build(config)) as parts:
        assert parts.config.train.steps == 10
        assert parts.config.train.budget == "steps"
        # What is saved with the run gives the same again.
        assert parts.config.train.over_prompts(33, 8).steps == 10


def test_one_limit_and_one_warmup() -> None:
    with pytest.raises(ConfigError, match="one of steps, tokens, updates and epochs"):
        load_config("arithmetic", ["train.stop_after.epochs=1", "train.stop_after.tokens=5"])
    with pytest.raises(ConfigError, match="not both"):
        load_config("arithmetic", ["optimizer.warmup_steps=1", "optimizer.warmup_ratio=0.1"])


def test_the_warmup_ratio_counts_optimizer_steps() -> None:
    config = load_config(
        None,
        ["train.steps=20", "train.mini_batches=2", "optimizer.warmup_ratio=0.1",
         "optimizer.learning_rate=1.0"],
    )  # fmt: skip
    rate = schedule_of(config)
    assert [rate(version, Used()) for version in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def trained(path: Path, *settings: str, resume: bool = False) -> list[dict[str, object]]:
    words = [word for setting in (*LORA, *settings) for word in ("--set", setting)]
    start = (
        ["--resume", str(path), "--set", settings[-1]] if resume else ["--run", str(path), *words]
    )
    assert covey(["train", *start]) == 0
    rows = RunFolder(path).steps()
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def test_dropout_acts_in_training_passes_alone_and_resumes_exactly(tmp_path: Path) -> None:
    settings = ("adapter.dropout=0.5", "optimizer.schedule=constant")
    whole = trained(tmp_path / "whole", *settings, "train.steps=3")
    short = trained(tmp_path / "short", *settings, "train.steps=2")
    without = trained(tmp_path / "without", "optimizer.schedule=constant", "train.steps=2")
    assert trained(tmp_path / "short", "train.steps=3", resume=True) == whole
    assert short == whole[:2]
    # B starts at zero, so the first step samples the same, and its gradient differs.
    assert short[0]["objective/scores"] == without[0]["objective/scores"]
    assert short[0]["optim/grad_norm"] != without[0]["optim/grad_norm"]
    model = load_model(resolve(load_config("arithmetic", [*LORA, "adapter.dropout=0.5"])))
    layer = model.model.model.layers[0].self_attn.q_proj
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    values = torch.randn(4, layer.in_features)
    with torch.no_grad():
        assert layer(values).equal(layer(values))
    assert not layer(values).equal(layer(values))


@pytest.mark.parametrize("setting", ["adapter.dropout=0.1", "adapter.load_in_4bit=true"])
def test_settings_of_an_adapter_need_one(setting: str) -> None:
    if "4bit" in setting and importlib.util.find_spec("bitsandbytes"):
        pytest.skip("the model is loaded first")
    with pytest.raises(ConfigError, match=r"without an adapter|needs bitsandbytes"):
        check_start(resolve(load_config("arithmetic", [setting])), 1)


def test_four_bit_weights(tmp_path: Path) -> None:
    """Engine and trainer agree on quantized weights, and the adapter alone is saved."""
    config = resolve(load_config("arithmetic", [*LORA, "adapter.load_in_4bit=true"]))
    if importlib.util.find_spec("bitsandbytes") is None:
        with pytest.raises(ConfigError, match="pip install bitsandbytes"):
            load_model(config)
        return
    steps = trained(tmp_path / "run", "adapter.load_in_4bit=true", "train.steps=2")
    assert all(abs(float(str(row["debug/sampler_logp_diff_max"]))) < 1e-3 for row in steps)
    files = {f.name for f in (tmp_path / "run/checkpoints/000002").iterdir()}
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files
