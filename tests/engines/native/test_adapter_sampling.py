"""The engine uses an adapter's weights as soon as the optimizer has changed them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from covey.collate import collate
from covey.engines.native.backend import decode_with_cache, decoder_for
from covey.engines.native.engine import NativeEngine
from covey.engines.native.llama_decoder import LlamaDecoder
from covey.engines.native.transformers_decoder import TransformersDecoder
from covey.engines.protocol import Sampling
from covey.models.adapter import add_adapter, perturbed_adapter
from covey.models.language_model import LanguageModel
from covey.policy.policy import Policy
from covey.types import Group
from tests.conftest import build, rollouts_of
from tests.engines.native.test_engine import ragged_prompts
from tests.engines.native.test_llama_decoder import UNDERSTOOD, made
from tests.models.test_adapter import adapted, embedded_model, learn, policy_of, trained


@pytest.mark.parametrize("name", ["llama with biases", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("targets", [["all-linear"], ["v_proj", "down_proj"]])
def test_the_decoder_supports_adapters_exactly(
    name: str, dtype: torch.dtype, targets: list[str]
) -> None:
    plain = made(UNDERSTOOD[name](), dtype)
    without = decode_with_cache(plain, TransformersDecoder(plain))
    model = adapted("", base=plain, targets=targets)
    decoder = decoder_for(model)
    assert isinstance(decoder, LlamaDecoder)
    expected, got = (
        decode_with_cache(model, TransformersDecoder(model)),
        decode_with_cache(model, decoder),
    )
    assert (expected - without).abs().max() > 0.1
    limit = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 0.06}[dtype]
    torch.testing.assert_close(got, expected, atol=limit, rtol=limit)


def sampled_and_trained(policy: Policy, sampler: NativeEngine) -> tuple[torch.Tensor, ...]:
    """Return what sampler and trainer say of the same answers."""
    questions = ragged_prompts(8)
    sampling = Sampling(group_size=3, max_tokens=20, max_concurrent=10)
    answers = rollouts_of(sampler, questions, step=policy.version, sampling=sampling)
    groups = [
        Group(prompt=q.prompt, rollouts=tuple(rollouts))
        for q, rollouts in zip(questions, answers, strict=True)
    ]
    batch = collate(groups, policy.model.device)
    with torch.no_grad():
        return batch.sampler_logp[batch.mask], policy.logp(batch).logp[batch.mask]


@pytest.mark.parametrize(
    ("make", "also_train", "written_out"),
    [
        (embedded_model, [], True),
        (lambda: build("qwen2"), ["lm_head", "input_layernorm"], True),
        (lambda: build("llama"), ["embed_tokens"], False),
        (lambda: build("gpt2"), [], False),
        (lambda: build("gemma3"), ["lm_head"], False),
    ],
    ids=["embedded", "qwen2", "llama", "gpt2", "gemma3"],
)
def test_after_updates_sampler_logp_equals_the_trainers(
    make: Callable[[], LanguageModel], also_train: list[str], written_out: bool
) -> None:
    policy = policy_of(add_adapter(make(), rank=4, also_train=also_train))
    sampler = NativeEngine(policy.model)
    assert isinstance(sampler.backend.decoder, LlamaDecoder) == written_out
    first, _ = sampled_and_trained(policy, sampler)
    for _ in range(2):
        learn(policy, 2)
        ours, theirs = sampled_and_trained(policy, sampler)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert ours.shape != first.shape or (ours - first).abs().max() > 0.1


def test_the_parity_check_sees_an_adapter_whose_b_is_zero() -> None:
    model = add_adapter(made(UNDERSTOOD["qwen2"]()), rank=4)
    layer = model.backbone.layers[1].self_attn.q_proj
    before = {name: p.detach().clone() for name, p in trained(model).items()}
    assert isinstance(decoder_for(model), LlamaDecoder)
    assert all(torch.equal(p, before[name]) for name, p in trained(model).items())
    # An adapter scaled by one half. While B is zero, nothing changes.
    forward, base = layer.forward, layer.base_layer
    layer.forward = lambda x: 0.5 * (forward(x) + base(x))
    lean = LlamaDecoder(model)
    same = decode_with_cache(model, lean) - decode_with_cache(model, TransformersDecoder(model))
    assert same.abs().max() < 1e-4
    assert isinstance(decoder_for(model), TransformersDecoder)


def test_a_failed_parity_check_restores_the_weights() -> None:
    model = add_adapter(build("llama"), rank=2)
    before = {name: p.detach().clone() for name, p in trained(model).items()}
    with perturbed_adapter(model):
        assert not any(torch.equal(p, before[name]) for name, p in trained(model).items())
    with pytest.raises(KeyError), perturbed_adapter(model):
        raise KeyError
    assert all(torch.equal(p, before[name]) for name, p in trained(model).items())


def test_a_hook_on_an_adapted_layer_uses_the_models_forward() -> None:
    model = add_adapter(made(UNDERSTOOD["llama"]()), rank=2)
    model.backbone.layers[0].mlp.up_proj.register_forward_hook(lambda m, x, y: y)
    assert isinstance(decoder_for(model), TransformersDecoder)
