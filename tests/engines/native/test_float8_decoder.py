"""The float8 decoder: how far it is from the model, and that it follows the model's weights."""

from __future__ import annotations

from functools import partial
from itertools import chain

import pytest
import torch

from covey.collate import collate
from covey.engines.native.backend import Precision, decode_with_cache, decode_without_cache
from covey.engines.native.engine import NativeEngine
from covey.engines.native.llama_decoder import UnsupportedModel
from covey.engines.protocol import Sampling
from covey.errors import ModelError
from covey.models.adapter import add_adapter
from covey.models.language_model import LanguageModel
from covey.models.logp import batch_logp
from covey.rollout.episode import generate
from tests.conftest import build
from tests.engines.native.test_decode_graph import made as on_device
from tests.engines.native.test_decode_graph import questions
from tests.engines.native.test_llama_decoder import UNDERSTOOD
from tests.engines.native.test_llama_decoder import made as randomized

pytest.importorskip("triton")

from covey.engines.native.decode_graph import (
    FLOAT8_TOLERANCE,
    Float8Decoder,
    FusedDecoder,
    _small_cache,
)

FLOAT8 = Precision(products=True)
BOUND = 0.2
"""The relative error of hidden states after three layers of random weights; each float8 product
adds about 4 %."""


def made(name: str) -> LanguageModel:
    model = randomized(UNDERSTOOD[name]())
    model.model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).float().norm() / other.float().norm())


@pytest.mark.parametrize("name", ["llama", "llama with biases", "qwen2", "qwen3"])
def test_hidden_states_are_within_a_bound_of_the_models(name: str) -> None:
    model = made(name)
    expected = decode_without_cache(model)
    assert apart(decode_with_cache(model, FusedDecoder(model), _small_cache), expected) < 1e-5
    found = apart(decode_with_cache(model, Float8Decoder(model), _small_cache), expected)
    assert 0.01 < found < BOUND < FLOAT8_TOLERANCE


def test_new_weights_are_quantized_at_the_same_addresses() -> None:
    model = made("qwen2")
    decoder = Float8Decoder(model)
    kept = [decoder.products[0].gate_up.weight.values, decoder.products[0].qkv.bias]
    before = decode_with_cache(model, decoder, _small_cache)
    with torch.no_grad():
        model.backbone.layers[0].mlp.up_proj.weight.mul_(1.5)
        model.backbone.layers[0].self_attn.q_proj.bias.add_(1.0)
    after = decode_with_cache(model, decoder, _small_cache)
    assert apart(after, before) > 0.05
    assert after.equal(decode_with_cache(model, Float8Decoder(model), _small_cache))
    again = [decoder.products[0].gate_up.weight.values, decoder.products[0].qkv.bias]
    assert all(a is b for a, b in zip(kept, again, strict=True))


def test_the_engine_samples_with_float8_products_and_says_so() -> None:
    model = on_device("llama")
    engine = NativeEngine(model, FLOAT8)
    assert not engine.info.exact_logp
    assert "float8" in engine.info.backend
    assert "ms per generation call" in engine.info.backend
    sampling = Sampling(group_size=2, max_tokens=4, max_concurrent=4, seed=1)
    groups = generate(questions(model), engine=engine, model=model, sampling=sampling, step=1)
    batch = collate(groups, model.device)
    with torch.no_grad():
        logp = batch_logp(model, batch, temperature=1.0, logits_megabytes=64).logp
    gap = (logp - batch.sampler_logp)[batch.mask].abs()
    assert 0.01 < gap.mean() < 0.15
    exact = generate(
        questions(model), engine=NativeEngine(model), model=model, sampling=sampling, step=1
    )
    same = [
        a.tokens == b.tokens
        for a, b in zip(
            chain(*(g.rollouts for g in groups)), chain(*(g.rollouts for g in exact)), strict=True
        )
    ]
    assert any(same)  # the same random numbers


def test_models_that_cannot_be_quantized_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="adapter"):
        Float8Decoder(add_adapter(build("llama"), rank=4))
    with pytest.raises(ModelError, match="float8"):
        NativeEngine(build("gpt2"), FLOAT8)
    model = made("llama")
    layer = model.backbone.layers[0].mlp
    layer.gate_proj = layer.up_proj = torch.nn.Linear(32, 60, bias=False)
    with pytest.raises(UnsupportedModel, match="32 inputs and 120 outputs"):
        Float8Decoder(model)


def test_the_cache_may_store_float8_numbers() -> None:
    model = made("qwen2")
    expected = decode_without_cache(model)
    small = partial(_small_cache, float8=True)
    found = apart(decode_with_cache(model, FusedDecoder(model), small), expected)
    assert 1e-4 < found < 0.1
    engine = NativeEngine(model, Precision(cache=True))
    assert not engine.info.exact_logp
    assert "float8 KV cache" in engine.info.backend
    sampling = Sampling(group_size=2, max_tokens=4, max_concurrent=4, seed=1)
    generate(questions(model), engine=engine, model=model, sampling=sampling, step=1)
    cache = engine.backend.cache
    assert {cache.layer_keys[0].dtype, cache.prompt_keys[0].dtype} == {torch.float8_e4m3fn}
    # The largest key of the prompts is about a quarter of the largest float8 number, 448.
    largest = torch.stack([k.float().abs().amax(dim=(0, 2, 3)) for k in cache.prompt_keys])
    assert ((largest >= 104) & (largest <= 120)).all()
