"""A checkpoint gives back what was saved, whatever names a model has in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from covey.errors import RunError
from covey.policy.checkpoint import load_policy, save_policy
from covey.policy.policy import Policy
from tests.conftest import ARCHITECTURES, build
from tests.models.test_adapter import learn, policy_of

SMALL = {
    "vocab_size": 262, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {**SMALL, "num_key_value_heads": 2, "num_experts_per_tok": 2}
RENAMED = {
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**EXPERTS, num_local_experts=4)
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, moe_intermediate_size=16, head_dim=8)
    ),
    "olmoe": lambda: transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**EXPERTS, num_experts=4)
    ),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL)),
    # Its experts' weights are the other way round.
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**EXPERTS, num_local_experts=4, head_dim=8)
    ),
}
"""Models that transformers keeps in other tensors than it writes."""


def made(name: str, dtype: torch.dtype = torch.float32) -> Policy:
    return policy_of(build(name, dtype, {**ARCHITECTURES, **RENAMED}))


def masters(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: master.detach().clone() for name, master in policy.optimizer.masters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*RENAMED, "qwen2", "gpt2"])
def test_a_checkpoint_goes_on_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    policy, restored = made(name, dtype), made(name, dtype)
    learn(policy, 2)
    save_policy(policy, tmp_path, {"step": 2})
    saved = masters(policy)
    assert load_policy(restored, tmp_path) == {"step": 2, "version": 2}
    assert all(torch.equal(value, saved[key]) for key, value in masters(restored).items())
    written = load_file(tmp_path / "model.safetensors")
    assert (saved.keys() - written.keys() != set()) == (name in RENAMED and name != "gpt_oss")
    learn(policy, 1, seed=9)
    learn(restored, 1, seed=9)
    after = masters(policy)
    assert all(torch.equal(value, after[key]) for key, value in masters(restored).items())
    assert any(not torch.equal(value, saved[key]) for key, value in after.items())


def cut(folder: Path, file: str, size: int) -> None:
    (folder / file).write_bytes((folder / file).read_bytes()[:size])


def without(folder: Path, file: str, name: str) -> None:
    tensors = load_file(folder / file)
    del tensors[name]
    save_file(tensors, folder / file, metadata={"format": "pt"})


def renamed_moment(folder: Path) -> None:
    tensors = load_file(folder / "optimizer.safetensors")
    tensors["exp_avg.nowhere"] = tensors.pop("exp_avg.lm_head.weight")
    save_file(tensors, folder / "optimizer.safetensors")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: cut(folder, "optimizer.safetensors", 4),
        lambda folder: cut(folder, "optimizer.safetensors", -1),
        lambda folder: cut(folder, "model.safetensors", -1),
        lambda folder: cut(folder, "covey.json", 9),
        lambda folder: (folder / "covey.json").write_text(json.dumps({"step": 2})),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: without(folder, "model.safetensors", "model.norm.weight"),
        renamed_moment,
    ],
)
def test_a_damaged_checkpoint_is_one_line(damage: Callable[[Path], object], tmp_path: Path) -> None:
    policy = made("llama")
    learn(policy, 1)
    save_policy(policy, tmp_path, {"step": 1})
    damage(tmp_path)
    with pytest.raises(RunError, match=f"checkpoint {tmp_path} cannot be read: "):
        load_policy(policy, tmp_path)
