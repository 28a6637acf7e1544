"""Merging an adapter of experts, in memory and into files."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers

from covey.models.adapter import adapted_layers, add_adapter, load_adapter, save_adapter
from covey.models.chat import Template
from covey.models.export import merge_adapter, merged_state_dict
from covey.models.load_model import load_language_model
from tests.conftest import build
from tests.models.test_adapter import shaken, trained
from tests.policy.test_checkpoint import RENAMED

IDS = torch.arange(6, 40)[None]


def saved_base(name: str, folder: Path) -> str:
    model = build(name, kinds=RENAMED)
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return str(folder)


def assert_same(model: torch.nn.Module, said: torch.Tensor) -> None:
    # Grouped products of experts do not support float64.
    torch.testing.assert_close(model(IDS).logits, said, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "gpt_neox"])
def test_merged_experts_equal_base_plus_adapter(name: str) -> None:
    model = shaken(add_adapter(build(name, kinds=RENAMED), rank=3, alpha=6))
    plain = build(name, kinds=RENAMED).model
    start = plain(IDS).logits
    plain.load_state_dict(merged_state_dict(model))  # every name, and no other
    said = model.model(IDS).logits
    assert (said - start).abs().max() > 0.1
    assert_same(plain, said)


def test_transposed_experts_are_merged_too(tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    theirs = build("gpt_oss", kinds=RENAMED).model
    peft.get_peft_model(theirs, config).save_pretrained(tmp_path)
    model = shaken(load_adapter(build("gpt_oss", kinds=RENAMED), tmp_path))
    assert len(adapted_layers(model)) == 2 * 3
    plain = build("gpt_oss", kinds=RENAMED).model
    plain.load_state_dict(merged_state_dict(model))
    assert_same(plain, model.model(IDS).logits)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_merged_folder_of_experts_is_an_ordinary_model(name: str, tmp_path: Path) -> None:
    base = saved_base(name, tmp_path / "base")
    model = shaken(add_adapter(load_language_model(base, device="cpu"), rank=3, base=base))
    (tmp_path / "saved").mkdir()
    save_adapter(model, trained(model), tmp_path / "saved")
    merge_adapter(tmp_path / "saved", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_same(merged, model.model(IDS).logits)


def test_a_broken_chat_template_does_not_prevent_merging(tmp_path: Path) -> None:
    base = saved_base("gpt_neox", tmp_path / "base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ raise_exception('tools are required') }}"
    tokenizer.save_pretrained(base)
    plain = load_language_model(base, device="cpu", template=Template(form="plain"))
    model = shaken(add_adapter(plain, rank=2, base=base))
    (tmp_path / "saved").mkdir()
    save_adapter(model, trained(model), tmp_path / "saved")
    merge_adapter(tmp_path / "saved", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_same(merged, model.model(IDS).logits)
