"""The forecast for several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.config import Config, load_config
from covey.config.resolve import resolve
from covey.lab.plan.forecast import Device, Forecast
from covey.lab.plan.memory import forecast, memory_findings, ranks_that_fit
from covey.lab.plan.model_shape import shape_of
from covey.lab.plan.task_facts import TaskFacts, task_facts

GPU = Device.gpu(24)


def config_of(*settings: str) -> Config:
    return resolve(load_config("arithmetic", ["model.dtype=bfloat16", *settings]))


def parts(found: Forecast) -> dict[str, int]:
    return {part.name: part.bytes for part in found.parts}


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_sharded_state_takes_sixteen_bytes_a_parameter_over_all_ranks(ranks: int) -> None:
    config = config_of("parallel.strategy=fsdp")
    count = shape_of(config).parameters
    found = parts(forecast(config, GPU, ranks=ranks))
    own = found["sharded weights"] + found["moments"] + found["gradients"]
    assert own == pytest.approx(16 * count / ranks, abs=3)
    assert found["weights"] == 2 * count  # the engine's, whole


def test_a_compact_state_takes_twelve_bytes_a_parameter_over_all_ranks() -> None:
    config = config_of("parallel.strategy=fsdp", "optimizer.state=compact")
    found = parts(forecast(config, GPU, ranks=2))
    own = found["sharded weights"] + found["moments"] + found["gradients"]
    assert own == pytest.approx(12 * shape_of(config).parameters / 2, abs=3)


def test_weights_stay_gathered_on_a_single_rank_only() -> None:
    config = config_of("parallel.strategy=fsdp")
    one, two = (parts(forecast(config, GPU, ranks=ranks)) for ranks in (1, 2))
    assert one["gathered"] == one["weights"]
    assert "gathered grad" in two
    assert "gathered grad" not in one


def test_a_reference_that_moves_is_sharded() -> None:
    settings = ("parallel.strategy=fsdp", "objective.beta=0.1", "reference.kind=moving")
    count = shape_of(config_of()).parameters
    for ranks in (1, 2):
        held = parts(forecast(config_of(*settings), GPU, ranks=ranks))["reference"]
        assert held == pytest.approx(6 * count / ranks, abs=1)


def test_shard_ranks_decides_into_how_many_parts() -> None:
    whole = parts(forecast(config_of("parallel.strategy=fsdp"), GPU, ranks=2))
    hybrid = config_of("parallel.strategy=fsdp", "parallel.shard_ranks=2")
    assert parts(forecast(hybrid, GPU, ranks=8))["moments"] == whole["moments"]


def test_ranks_that_each_have_the_model_divide_only_the_work() -> None:
    one, four = (forecast(config_of(), GPU, ranks=ranks) for ranks in (1, 4))
    for name in ("weights", "moments", "gradients"):
        assert parts(one)[name] == parts(four)[name]
    assert parts(four)["KV cache"] < parts(one)["KV cache"]
    assert "each of 4 ranks" in " ".join(four.notes)


LLAMA_3B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 3072,
    "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "head_dim": 128,
}  # fmt: skip


def test_a_finding_says_how_many_devices_a_run_needs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3B))
    config, facts = config_of(f"model.path={tmp_path}"), TaskFacts(longest_prompt=64, held_out=64)
    shape = shape_of(config)
    needed = ranks_that_fit(config, GPU, facts, shape)
    assert needed == 8
    sharded = config_of(f"model.path={tmp_path}", "parallel.strategy=fsdp")
    peaks = [forecast(sharded, GPU, facts, shape, ranks).peak for ranks in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[2] > 0.9 * GPU.memory >= peaks[3]
    (found,) = memory_findings(config, forecast(config, GPU, facts, shape), facts, shape)
    assert "or train on 8 such devices with parallel.strategy = 'fsdp'" in found.remedy
    two = forecast(sharded, GPU, facts, shape, 2)
    (found,) = memory_findings(sharded, two, facts, shape, 2)
    assert found.remedy == "train on 8 ranks with parallel.strategy = 'fsdp'"


def test_facts_of_a_task_serve_any_number_of_ranks() -> None:
    config = config_of()
    assert forecast(config, GPU, task_facts(config), ranks=2).fits
