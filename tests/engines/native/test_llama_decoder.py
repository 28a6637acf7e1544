"""The Llama decoder equals the model's own forward pass, or is not used."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from covey.embedded import CHECKPOINT
from covey.engines.native.backend import decode_with_cache, decoder_for
from covey.engines.native.engine import NativeEngine
from covey.engines.native.llama_decoder import LlamaDecoder
from covey.engines.native.transformers_decoder import TransformersDecoder
from covey.models.language_model import LanguageModel
from covey.models.load_model import wrap
from tests.conftest import build

SIZES = {
    "vocab_size": 262, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 256,
}  # fmt: skip
UNDERSTOOD = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "llama with biases": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
    ),
    "llama 3 rope": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SIZES,
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            },
        )
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, sliding_window=None)
    ),
}  # fmt: skip


def made(model: nn.Module, dtype: torch.dtype = torch.float32) -> LanguageModel:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    return wrap(model.to(dtype).eval(), tokenizer)


@pytest.mark.parametrize("name", UNDERSTOOD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_llama_like_models_are_decoded_exactly(name: str, dtype: torch.dtype) -> None:
    model = made(UNDERSTOOD[name](), dtype)
    decoder = decoder_for(model)
    assert isinstance(decoder, LlamaDecoder)
    expected, got = (
        decode_with_cache(model, TransformersDecoder(model)),
        decode_with_cache(model, decoder),
    )
    assert expected.std() > 0.1
    limit = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(got, expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma2", "gemma3"])
def test_other_models_use_their_own_forward_pass(name: str) -> None:
    assert isinstance(decoder_for(build(name)), TransformersDecoder)


def test_a_model_that_only_looks_like_llama_is_rejected() -> None:
    model = made(UNDERSTOOD["llama"]())
    forward = model.backbone.layers[1].mlp.forward
    model.backbone.layers[1].mlp.forward = lambda x: 1.01 * forward(x)
    assert isinstance(decoder_for(model), TransformersDecoder)


def test_a_layer_that_is_more_than_a_product_is_not_replaced() -> None:
    class Adapter(nn.Linear):
        pass

    model = made(UNDERSTOOD["llama"]())
    old = model.backbone.layers[0].self_attn.q_proj
    new = Adapter(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    model.backbone.layers[0].self_attn.q_proj = new
    assert isinstance(decoder_for(model), TransformersDecoder)


def test_the_decoder_uses_the_models_weights(embedded: LanguageModel) -> None:
    model = made(UNDERSTOOD["qwen2"]())
    decoder = NativeEngine(model).backend.decoder
    before = decode_with_cache(model, decoder)
    with torch.no_grad():
        model.backbone.layers[0].mlp.up_proj.weight.mul_(1.5)
    after = decode_with_cache(model, decoder)
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(after, decode_with_cache(model, TransformersDecoder(model)))
    assert isinstance(NativeEngine(embedded).backend.decoder, LlamaDecoder)
