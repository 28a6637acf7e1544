"""Training, saving, disabling and merging an adapter are exact."""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from covey.accel.activation_offload import checkpoint_layers
from covey.embedded import CHECKPOINT
from covey.engines.draw import Distribution
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.errors import ConfigError, ModelError, RunError
from covey.models.adapter import adapter_off, add_adapter, load_adapter
from covey.models.export import merge_adapter, merged_state_dict
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.models.logp import batch_logp
from covey.models.model_path import adapter_base
from covey.policy.checkpoint import load_policy, save_policy
from covey.policy.optimizer import MasterAdamW
from covey.policy.policy import Policy
from covey.types import Batch
from tests.conftest import build, make_batch, rollouts_of
from tests.engines.native.test_engine import ragged_prompts


def adapted(
    name: str, dtype: torch.dtype = torch.float32, base: LanguageModel | None = None, **options: Any
) -> LanguageModel:
    """Return a model whose adapter is not zero."""
    model = add_adapter(base or build(name, dtype), **{"rank": 3, "alpha": 6, **options})
    return shaken(model)


@torch.no_grad()
def shaken(model: LanguageModel) -> LanguageModel:
    for number, parameter in enumerate(trained(model).values()):
        places = torch.arange(parameter.numel(), dtype=torch.float32) + number
        parameter.add_((0.05 * torch.sin(places)).view_as(parameter))
    return model


def trained(model: LanguageModel) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.model.named_parameters() if p.requires_grad}


def policy_of(model: LanguageModel) -> Policy:
    optimizer = MasterAdamW(
        model.model.named_parameters(),
        betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, max_grad_norm=1.0,
    )  # fmt: skip
    return Policy(model=model, optimizer=optimizer, temperature=1.0, logits_megabytes=1.0)


def learn(policy: Policy, steps: int, seed: int = 5) -> None:
    for step in range(steps):
        batch = make_batch(seed=seed + step)
        loss = -(policy.logp(batch).logp * torch.cos(batch.tokens.float())).sum()
        loss.backward()
        policy.step(0.01)


def embedded_model() -> LanguageModel:
    return load_language_model("embedded", device="cpu")


# ----------------------------------------------------------------------------- at the beginning


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_fresh_adapter_changes_nothing(name: str) -> None:
    batch = make_batch()
    before = batch_logp(build(name), batch).logp
    model = add_adapter(build(name), rank=4, also_train=["lm_head"])
    assert torch.equal(batch_logp(model, batch).logp, before)


def test_initial_weights_depend_only_on_seed_and_layer() -> None:
    first = trained(add_adapter(build("llama"), rank=4, seed=7))
    torch.rand(3)  # advances torch's generator
    again = trained(add_adapter(build("llama"), rank=4, seed=7, targets=["q_proj", "up_proj"]))
    other = trained(add_adapter(build("llama"), rank=4, seed=8))
    assert len(again) == 2 * 2 * 2
    assert all(torch.equal(first[name], p) for name, p in again.items())
    downs = [name for name in first if "lora_A" in name]
    assert len(downs) == 2 * 7
    assert not any(torch.equal(first[name], other[name]) for name in downs)
    assert len({first[name][0, 0].item() for name in downs}) == len(downs)
    weight = first["model.layers.0.self_attn.q_proj.lora_A.default.weight"].detach()
    # As in kaiming_uniform_(a=sqrt(5)): uniform up to 1 / sqrt(inputs).
    assert 0.9 < float(weight.abs().max()) * math.sqrt(32) < 1
    assert float(weight.std()) == pytest.approx(1 / math.sqrt(3 * 32), rel=0.15)
    assert weight[0, :2].tolist() == pytest.approx(PINNED, abs=1e-7)


PINNED = [-0.14631269872188568, -0.10447004437446594]


# ------------------------------------------------------------------------------------- training


def reference_gradients(
    model: LanguageModel, base: LanguageModel, batch: Batch, **options: Any
) -> dict[str, torch.Tensor]:
    """Differentiate peft's own model, one row at a time, with all logits."""
    config = peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **options)
    theirs = peft.get_peft_model(base.model, config, autocast_adapter_dtype=False)
    ours = trained(model)
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(ours[name.removeprefix("base_model.model.")])
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(batch)):
        start, length = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        ids = torch.cat([batch.prompt_tokens[row, :start], batch.tokens[row, :length]])
        logp = theirs(ids[None]).logits[0].log_softmax(-1)
        chosen = logp[start - 1 : -1].gather(-1, ids[start:, None]).squeeze(-1)
        total = total + (chosen * weights_of(batch)[row, :length])[batch.mask[row, :length]].sum()
    total.backward()
    return {
        name.removeprefix("base_model.model."): p.grad
        for name, p in theirs.named_parameters()
        if p.grad is not None
    }


def weights_of(batch: Batch) -> torch.Tensor:
    return torch.cos(batch.tokens.double())


def gradients(model: LanguageModel, batch: Batch) -> dict[str, torch.Tensor]:
    model.model.zero_grad()
    (batch_logp(model, batch).logp * weights_of(batch)).sum().backward()
    frozen = [n for n, p in model.model.named_parameters() if p.grad is not None]
    assert frozen == list(trained(model))
    return {name: p.grad.clone() for name, p in trained(model).items()}


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("llama", {}, {"target_modules": "all-linear"}),
        (
            "qwen2",
            {"targets": ["q_proj", "down_proj"]},
            {"target_modules": ["q_proj", "down_proj"]},
        ),
        ("gpt2", {}, {"target_modules": "all-linear", "fan_in_fan_out": True}),
        (
            "llama",
            {"targets": ["v_proj"], "also_train": ["lm_head", "norm"]},
            {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "model.norm"]},
        ),
    ],
)
def test_gradients_equal_autograd_on_the_peft_model(
    name: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    batch = make_batch(seed=4)
    model = adapted(name, torch.float64, **ours)
    expected = reference_gradients(model, build(name, torch.float64), batch, **theirs)
    assert min(float(g.abs().max()) for g in expected.values()) > 1e-4
    for packs in (True, False):
        got = gradients(replace(model, packs=packs), batch)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "mistral"])
def test_packing_and_gradient_checkpointing_change_nothing_in_float32(
    name: str,
) -> None:
    model, batch = adapted(name), make_batch(rows=7, longest=11)
    assert model.packs
    packed, padded = (
        batch_logp(replace(model, packs=packs), batch).logp for packs in (True, False)
    )
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0)
    plain = gradients(model, batch)
    checkpoint_layers(model.model, offload=False)
    model.model.train()
    for key, value in gradients(model, batch).items():
        torch.testing.assert_close(value, plain[key], atol=1e-5, rtol=1e-5)


def test_in_bfloat16_only_the_adapter_has_master_weights_and_changes() -> None:
    policy = policy_of(add_adapter(build("qwen2", torch.bfloat16), rank=2, also_train=["norm"]))
    model = policy.model.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learn(policy, 3)
    names = [n for n in before if ".lora_" in n or ".modules_to_save." in n]
    assert len(names) == 3 * 7 * 2 + 1
    assert list(policy.optimizer.masters) == names
    assert len(policy.optimizer.state()) == 3 * len(names)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, before[name]) == (name not in names), name
        if name in names:
            master = policy.optimizer.masters[name]
            assert master.dtype == torch.float32
            assert torch.equal(parameter, master.bfloat16())
            assert not torch.equal(parameter.float(), master)


# ----------------------------------------------------------------------------------- switched off


@pytest.mark.parametrize("also_train", [[], ["lm_head", "embed_tokens"]])
def test_with_the_adapter_off_the_policy_equals_the_base_model(also_train: list[str]) -> None:
    batch = make_batch()
    with torch.no_grad():
        expected = batch_logp(build("qwen2"), batch).logp
    policy = policy_of(adapted("qwen2", also_train=also_train))
    learn(policy, 2)
    on, flags = policy.logp(batch).logp, list(trained(policy.model))
    with torch.no_grad(), adapter_off(policy.model) as base:
        assert torch.equal(batch_logp(base, batch).logp, expected)
        with adapter_off(base):
            pass
        assert torch.equal(batch_logp(base, batch).logp, expected)
    assert (on - expected).abs().max() > 0.1
    assert torch.equal(policy.logp(batch).logp, on)
    assert list(trained(policy.model)) == flags
    with pytest.raises(KeyError), adapter_off(policy.model):
        raise KeyError
    assert torch.equal(policy.logp(batch).logp, on)


# ---------------------------------------------------------------------------------- saved, merged


@pytest.mark.parametrize("also_train", [[], ["lm_head"]])
def test_a_checkpoint_is_in_peft_format_and_resumes_bit_for_bit(
    also_train: list[str], tmp_path: Path
) -> None:
    def make() -> Policy:
        return policy_of(add_adapter(embedded_model(), rank=2, also_train=also_train, seed=1))

    policy, restored = make(), make()
    learn(policy, 2)
    save_policy(policy, tmp_path, {"step": 2})
    files = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert files.keys() == {
        "adapter_config.json", "adapter_model.safetensors", "covey.json", "optimizer.safetensors"
    }  # fmt: skip
    count = sum(p.numel() for p in trained(policy.model).values())
    assert 4 * count < files["adapter_model.safetensors"] < 4 * count + 6000
    assert json.loads((tmp_path / "adapter_config.json").read_text())["inference_mode"] is False

    assert load_policy(restored, tmp_path) == {"step": 2, "version": 2}
    learn(policy, 2, seed=9)
    learn(restored, 2, seed=9)
    for name, parameter in trained(policy.model).items():
        assert torch.equal(trained(restored.model)[name], parameter)

    with pytest.warns() if also_train else pytest.MonkeyPatch.context():
        theirs = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT), str(tmp_path)
        )
    ours = load_adapter(embedded_model(), tmp_path)
    ids = torch.arange(6, 40)[None]
    torch.testing.assert_close(ours.model(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)
    assert adapter_base(str(tmp_path)) == "embedded"


def test_a_checkpoint_of_another_adapter_is_refused(tmp_path: Path) -> None:
    save_policy(policy_of(add_adapter(build("llama"), rank=2)), tmp_path, {"step": 1})
    other = policy_of(add_adapter(build("llama"), rank=2, also_train=["norm"]))
    with pytest.raises(RunError, match=r"\[adapter\]"):
        load_policy(other, tmp_path)
    save_policy(other, tmp_path, {"step": 1})
    fewer = policy_of(add_adapter(build("llama"), rank=2))
    with pytest.raises(RunError, match=r"\[adapter\]"):
        load_policy(fewer, tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_merged_weights_equal_base_plus_adapter(name: str) -> None:
    model, plain = adapted(name, torch.float64, also_train=["lm_head"]), build(name, torch.float64)
    before = copy.deepcopy(model.model.state_dict())
    merged = merged_state_dict(model)
    assert merged.keys() == plain.model.state_dict().keys()
    plain.model.config.tie_word_embeddings = False
    head = plain.model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    plain.model.load_state_dict(merged)
    ids = torch.arange(6, 40)[None]
    expected = model.head.logits(model.backbone(ids).last_hidden_state)
    torch.testing.assert_close(plain.model(ids).logits, expected, atol=1e-10, rtol=1e-10)
    after = model.model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("also_train", [[], ["lm_head"], ["embed_tokens"]])
def test_a_merged_checkpoint_is_an_ordinary_model_with_the_same_greedy_text(
    also_train: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "base"
    build("qwen2").model.save_pretrained(source)
    embedded_model().tokenizer.save_pretrained(source)
    base = load_language_model(str(source), dtype="bfloat16", device="cpu")
    policy = policy_of(add_adapter(base, rank=3, also_train=also_train))
    learn(policy, 5)
    (tmp_path / "saved").mkdir()
    save_policy(policy, tmp_path / "saved", {"step": 5})
    merge_adapter(tmp_path / "saved", tmp_path / "merged")

    # The masters were saved: at float32, adapter and merged model are the same to rounding.
    exact = load_language_model(str(source), dtype="float32", device="cpu")
    exact = load_adapter(exact, tmp_path / "saved")
    whole = load_language_model(str(tmp_path / "merged"), dtype="float32", device="cpu")
    assert type(whole.model) is transformers.Qwen2ForCausalLM
    assert whole.model.config.tie_word_embeddings == (not also_train)
    batch = make_batch()
    with torch.no_grad():
        ours, theirs = (batch_logp(m, batch).logp for m in (exact, whole))
        start = batch_logp(build("qwen2"), batch).logp
    assert (ours - start).abs().max() > 0.5
    torch.testing.assert_close(theirs, ours, atol=2e-4, rtol=1e-5)
    sampling = Sampling(max_tokens=20, distribution=Distribution(temperature=0.0))
    texts = [
        [
            r.text
            for (r,) in rollouts_of(NativeEngine(m), ragged_prompts(8), step=0, sampling=sampling)
        ]
        for m in (exact, whole)
    ]
    assert texts[0] == texts[1]


def test_only_an_adapter_can_be_merged(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="contains no adapter"):
        merge_adapter(Path(CHECKPOINT), tmp_path)


# ------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"targets": ["q_prj"]},
            "adapter.targets: the model has no layer 'q_prj'; did you mean 'q_proj'?",
        ),
        (
            {"also_train": ["head"]},
            "adapter.also_train: the model has no layer 'head'; did you mean ",
        ),
        ({"targets": ["lm_head"]}, "adapter.targets: 'lm_head' is not a linear layer"),
        ({"targets": ["embed_tokens"]}, "adapter.targets: 'embed_tokens' is not a linear layer"),
        ({"targets": ["norm"]}, "adapter.targets: 'norm' is not a linear layer"),
        ({"targets": ["mlp"]}, "adapter.targets: 'mlp' is not a linear layer"),
        ({"also_train": ["mlp"]}, "adapter.also_train: 'mlp' must be a single layer"),
        ({"targets": []}, "config: adapter: "),
    ],
)
def test_an_invalid_module_name_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        add_adapter(build("llama"), rank=2, **options)
    assert message in str(raised.value)
    assert str(raised.value).startswith("config: adapter")


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'covey\[lora\]'"):
        add_adapter(build("llama"), rank=2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"]),
            "sets use_dora .* only plain LoRA adapters",
        ),
        (
            peft.LoraConfig(r=2, bias="all", target_modules=["q_proj"]),
            "is not a plain LoRA adapter",
        ),
        (peft.LoraConfig(r=2, target_modules=["embed_tokens"]), "is not a plain LoRA adapter"),
        (peft.LoraConfig(r=2, target_modules=["lm_head"]), "is not a plain LoRA adapter"),
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "supports only LoRA"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # peft warns about such adapters
def test_another_kind_of_adapter_is_refused(
    config: peft.PeftConfig, message: str, tmp_path: Path
) -> None:
    peft.get_peft_model(build("llama").model, config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_adapter(build("llama"), tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_embeddings_saved_with_an_adapter_are_not_dropped_silently(
    tmp_path: Path,
) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    theirs = peft.get_peft_model(build("llama").model, config)
    theirs.save_pretrained(tmp_path, save_embedding_layers=True)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_adapter(build("llama"), tmp_path)


def test_an_incomplete_adapter_folder_is_an_error(tmp_path: Path) -> None:
    assert adapter_base("embedded") is None
    assert adapter_base(str(CHECKPOINT)) is None
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="base model"):
        adapter_base(str(tmp_path))
    with pytest.raises(ModelError, match="cannot be read"):
        load_adapter(build("llama"), tmp_path)
    save_policy(policy_of(add_adapter(embedded_model(), rank=2)), tmp_path, {"step": 1})
    with pytest.raises(ModelError, match="does not fit"):
        load_adapter(build("llama"), tmp_path)
