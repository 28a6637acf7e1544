"""Parity checks: which layers they use, and which models they exclude."""

from __future__ import annotations

import pytest
import torch
import transformers

from covey.accel.activation_offload import checkpoint_layers
from covey.accel.parity import first_layers
from covey.accel.sizes import plain_positions
from covey.models.adapter import add_adapter
from tests.conftest import build

SIZES = {
    "vocab_size": 262, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 256,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_hidden_layers=8)
    ),
    # Every fourth layer without RoPE, which only its attention module shows.
    "smollm3": lambda: transformers.SmolLM3ForCausalLM(
        transformers.SmolLM3Config(**SIZES, num_hidden_layers=8, pad_token_id=0)
    ),
    # Experts after three layers without.
    "glm4_moe": lambda: transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(
            **SIZES, num_hidden_layers=8, head_dim=8, first_k_dense_replace=3,
            moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "layers"), [("llama", 2), ("smollm3", 4), ("glm4_moe", 4)])
def test_first_layers_include_every_layer_type(name: str, layers: int) -> None:
    model = build(name, torch.bfloat16, KINDS)
    assert len(first_layers(model.backbone).layers) == layers


def test_checkpointing_and_adapters_add_no_layer_types() -> None:
    model = build("llama", torch.bfloat16, KINDS)
    checkpoint_layers(model.model, offload=False)
    assert len(first_layers(add_adapter(model, rank=2).backbone).layers) == 2


def test_a_late_layer_with_another_setting_is_a_type_of_its_own() -> None:
    backbone = build("llama", torch.bfloat16, KINDS).backbone
    backbone.layers[5].self_attn.scaling *= 2
    assert len(first_layers(backbone).layers) == 6


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (transformers.LlamaConfig(**SIZES), True),
        (transformers.LlamaConfig(**SIZES, rope_parameters=YARN), True),
        (transformers.SmolLM3Config(**SIZES, no_rope_layers=[1] * 36), True),
        (transformers.SmolLM3Config(**SIZES, no_rope_layers=[1] * 35 + [0]), False),
        (
            transformers.Ministral3Config(
                **SIZES, rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}
            ),
            False,
        ),
    ],
)
def test_positions_are_plain_if_all_layers_use_rope_and_none_scales(
    config: transformers.PretrainedConfig, plain: bool
) -> None:
    assert plain_positions(config) is plain
