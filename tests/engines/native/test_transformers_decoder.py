"""Decoding with a model's own forward pass, captured or not, equals the model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers

from covey.collate import collate
from covey.engines.draw import Distribution
from covey.engines.native.backend import EagerBackend, checked_decoder, decoder_for
from covey.engines.native.engine import NativeEngine
from covey.engines.native.kv_cache import KVShape
from covey.engines.native.llama_decoder import UnsupportedModel
from covey.engines.native.shared_prompt_cache import SharedPromptCache
from covey.engines.native.transformers_decoder import (
    RecomputeDecoder,
    SharedPromptDecoder,
    TransformersDecoder,
)
from covey.engines.protocol import Sampling
from covey.errors import DataError
from covey.models.adapter import add_adapter
from covey.models.language_model import LanguageModel
from covey.models.logp import batch_logp
from covey.rollout.episode import EncodedPrompt
from covey.types import Prompt
from tests.conftest import ARCHITECTURES, build, rollouts_of
from tests.engines.native.test_decode_graph import by_graph, shape_of
from tests.engines.native.test_engine import as_groups

SIZES = {
    "vocab_size": 262, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
RECORDED = {
    **{name: ARCHITECTURES[name] for name in ("gpt2", "mistral", "gemma3")},
    # A soft cap of the same size as the scores.
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **SIZES, head_dim=8, sliding_window=7, query_pre_attn_scalar=1,
            attn_logit_softcapping=0.1, attn_implementation="eager",
        )
    ),
    # RoPE on a part of each head; attention and MLP in parallel.
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.25)
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**SIZES, pad_token_id=0, sliding_window=6)
    ),
    # Every fourth layer without rotary embedding.
    "smollm3": lambda: transformers.SmolLM3ForCausalLM(
        transformers.SmolLM3Config(**SIZES | {"num_hidden_layers": 4}, pad_token_id=0)
    ),
    # Queries scaled by position, from the eighth on.
    "ministral3": lambda: transformers.Ministral3ForCausalLM(
        transformers.Ministral3Config(
            **SIZES, head_dim=8, sliding_window=None,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.1,
            },
        )
    ),
    "olmo2": lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SIZES)),
    "cohere": lambda: transformers.CohereForCausalLM(
        transformers.CohereConfig(**SIZES, use_qk_norm=True, logit_scale=0.5)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, **EXPERTS)
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
        )
    ),
}  # fmt: skip
REREAD = {
    "gpt_neo": "its local layers assume that all slots have the same length",
    "mamba": "it keeps no keys and values",
}
"""Models without a usable KV cache, and why."""
WAITING = ("mixtral", "qwen3_moe")
"""Models whose experts synchronize with the host on a GPU unless they are bfloat16."""
OTHERS = {
    # Attention sinks: scores without a position.
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SIZES, **EXPERTS, head_dim=8, sliding_window=128,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    ),
    # Windows that end where the longest slot does.
    "gpt_neo": lambda: transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            vocab_size=262, hidden_size=32, num_layers=2, num_heads=4, window_size=4,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=256,
        )
    ),
    # Other angles for all rows once one is longer than 32.
    "longrope": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            **SIZES, pad_token_id=0, sliding_window=None, original_max_position_embeddings=32,
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4, "original_max_position_embeddings": 32,
            },
        )
    ),
    # No keys at all.
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=262, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
}  # fmt: skip


def questions() -> list[EncodedPrompt]:
    return [
        EncodedPrompt(
            prompt=Prompt(id=str(number), task="t", messages=(), target=""),
            tokens=tuple((6 + 5 * number + i * i) % 262 for i in range(length)),
        )
        for number, length in enumerate((2, 9))
    ]


def made(name: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    kinds = RECORDED | OTHERS
    return build(name, dtype, kinds, device="cuda" if torch.cuda.is_available() else "cpu")


def small_cache(slots: int, shape: KVShape) -> SharedPromptCache:
    return SharedPromptCache(slots=slots, capacity=4, prompts=slots, prompt_capacity=5, shape=shape)


def check_greedy(model: LanguageModel, sampler: NativeEngine, tokens: int) -> None:
    sampling = Sampling(
        max_tokens=tokens, max_concurrent=4, distribution=Distribution(temperature=0.0)
    )
    for question, (rollout,) in zip(
        questions(), rollouts_of(sampler, questions(), step=0, sampling=sampling), strict=True
    ):
        ids = torch.tensor([question.tokens], device=model.device)
        theirs = model.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
        assert list(rollout.tokens) == theirs[0, ids.shape[1] :].tolist()


def check_logps(model: LanguageModel, sampler: NativeEngine, tokens: int) -> None:
    sampling = Sampling(max_tokens=tokens, max_concurrent=4, seed=1)
    rollouts = rollouts_of(sampler, questions(), step=0, sampling=sampling)
    batch = collate(as_groups(questions(), rollouts)).to(model.device)
    with torch.no_grad():
        logp = batch_logp(replace(model, packs=False), batch).logp
    assert batch.mask.sum() >= tokens
    torch.testing.assert_close(batch.sampler_logp, logp, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", RECORDED)
def test_the_shared_prompt_decoder_equals_the_model(name: str) -> None:
    pytest.importorskip("triton")
    model = made(name)
    if model.device.type == "cuda" and name in WAITING:
        pytest.skip("experts in float32 wait for the host")
    sampler = by_graph(model)
    assert isinstance(sampler.backend.decoder, SharedPromptDecoder)
    assert "own forward pass; not fused, because" in sampler.info.backend
    check_greedy(model, sampler, 3)
    check_logps(model, sampler, 2)


@pytest.mark.parametrize("name", [*RECORDED, *OTHERS])
def test_eager_decoding_equals_the_model(name: str) -> None:
    model = made(name)
    sampler = NativeEngine(model)
    if name in REREAD:
        assert isinstance(sampler.backend.decoder, RecomputeDecoder)
        why = f"without a KV cache, which is slow, because {REREAD[name]}"
        assert sampler.info.backend.startswith(why)
    else:
        sampler.backend = EagerBackend(model, decoder_for(model), shape_of(model))
        assert isinstance(sampler.backend.decoder, TransformersDecoder)
    check_greedy(model, sampler, 12)
    check_logps(model, sampler, 12)


@pytest.mark.parametrize("name", ["smollm3", "ministral3"])
def test_a_model_that_is_llama_only_in_its_first_layers_is_rejected(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = made(name, dtype)
        assert isinstance(decoder_for(model), TransformersDecoder)
        assert not model.fused


def test_rope_angles_that_depend_on_the_longest_row_limit_the_context() -> None:
    """A completion does not depend on others in the batch, in sampling and in training."""
    model = made("longrope")
    assert (model.context, model.packs) == (32, True)
    sampler, sampling = (
        NativeEngine(model),
        Sampling(group_size=2, max_tokens=23, max_concurrent=4, seed=1),
    )
    short, long = questions()
    (alone,) = rollouts_of(sampler, [short], step=0, sampling=sampling)
    both = rollouts_of(sampler, [short, long], step=0, sampling=sampling)
    assert [r.tokens for r in both[0]] == [r.tokens for r in alone]
    assert max(len(r.tokens) for r in both[1]) == 23  # up to the end of the context
    check_logps(model, sampler, 23)
    with pytest.raises(DataError, match=r"9 tokens.* 32"):
        rollouts_of(sampler, [short, long], step=0, sampling=replace(sampling, max_tokens=24))


def test_nonstandard_attention_is_not_captured() -> None:
    pytest.importorskip("triton")
    from covey.engines.native.decode_graph import graph_backend

    model = made("gpt_oss")
    with pytest.raises(UnsupportedModel, match="attention"):
        graph_backend(model, shape_of(model))
    sampler = NativeEngine(model)
    assert sampler.info.backend.startswith("one token at a time")
    assert sampler.info.backend.endswith("by the model's own forward pass")


def test_a_window_longer_than_the_parity_check_is_checked() -> None:
    pytest.importorskip("triton")
    from covey.engines.native.decode_graph import graph_backend

    model = made("mistral")
    for layer in model.backbone.layers:
        layer.self_attn.config = copy.copy(layer.self_attn.config)
        layer.self_attn.config.sliding_window = 100
    with pytest.raises(UnsupportedModel, match="window of 100"):
        graph_backend(model, shape_of(model))
    model.backbone.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        SharedPromptDecoder(model)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma3"])
def test_a_bfloat16_model_is_checked_in_float32(name: str) -> None:
    pytest.importorskip("triton")
    model = made(name, torch.bfloat16)
    assert isinstance(checked_decoder(model, SharedPromptDecoder, small_cache), SharedPromptDecoder)


def test_a_model_with_an_adapter_is_captured_too() -> None:
    pytest.importorskip("triton")
    model = add_adapter(made("mistral"), rank=4)
    assert isinstance(checked_decoder(model, SharedPromptDecoder, small_cache), SharedPromptDecoder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", RECORDED)
def test_on_a_gpu_the_model_is_captured(name: str) -> None:
    from covey.engines.native.decode_graph import GraphBackend

    types = (torch.bfloat16,) if name in WAITING else (torch.bfloat16, torch.float32)
    for dtype in types:
        model = made(name, dtype)
        sampler = NativeEngine(model)
        assert isinstance(sampler.backend, GraphBackend), sampler.info.backend
        assert isinstance(sampler.backend.decoder, SharedPromptDecoder)
        if dtype == torch.float32:
            check_greedy(model, sampler, 24)
            check_logps(model, sampler, 24)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_model_that_synchronizes_is_not_captured() -> None:
    model = made("mistral")
    forward = model.backbone.layers[1].mlp.forward

    def waiting(values: torch.Tensor) -> torch.Tensor:
        return forward(values) if float(values.abs().max()) >= 0 else values

    model.backbone.layers[1].mlp.forward = waiting
    sampler = NativeEngine(model)
    assert isinstance(sampler.backend, EagerBackend)
    assert "its decode step cannot be captured" in sampler.info.backend
    check_greedy(model, sampler, 12)
    assert isinstance(NativeEngine(made("mistral")).backend.decoder, SharedPromptDecoder)
