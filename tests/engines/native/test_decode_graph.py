"""The CUDA graph backend: captured on a GPU, elsewhere step by step in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from covey.accel.packing import to_device
from covey.engines.draw import Distribution
from covey.engines.native.backend import EagerBackend, decoder_for
from covey.engines.native.engine import NativeEngine
from covey.engines.native.kv_cache import KVCache, KVShape
from covey.engines.native.prefill import read_prompts
from covey.engines.native.slots import Slots
from covey.engines.protocol import Sampling
from covey.models.adapter import add_adapter
from covey.models.language_model import LanguageModel
from covey.models.load_model import load_language_model
from covey.rollout.episode import EncodedPrompt
from covey.types import Prompt
from tests.conftest import build, rollouts_of

pytest.importorskip("triton")

from covey.engines.native import decode_graph as fused_decoder
from covey.engines.native.decode_graph import FusedDecoder, GraphBackend
from covey.engines.native.llama_decoder import UnsupportedModel


def made(kind: str) -> LanguageModel:
    model = add_adapter(build("llama"), rank=4) if kind == "adapter" else build(kind)
    if torch.cuda.is_available():
        model.model.to("cuda")
    return model


def questions(model: LanguageModel) -> list[EncodedPrompt]:
    size = model.model.config.vocab_size
    return [
        EncodedPrompt(
            prompt=Prompt(id=str(number), task="t", messages=(), target=""),
            tokens=tuple((3 + 5 * number + i * i) % size for i in range(2 + 3 * number)),
        )
        for number in range(3)
    ]


def shape_of(model: LanguageModel) -> KVShape:
    prefix = DynamicCache()
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model.backbone(input_ids=ids, past_key_values=prefix, use_cache=True)
    return KVShape.of(prefix)


def by_graph(model: LanguageModel) -> NativeEngine:
    from covey.engines.native.decode_graph import graph_backend

    sampler = NativeEngine(model)
    backend = graph_backend(model, shape_of(model))
    sampler.backend = backend
    return sampler


@pytest.mark.parametrize(
    ("kind", "distribution"),
    [
        ("llama", Distribution()),
        ("qwen2", Distribution(temperature=0.0)),
        ("adapter", Distribution(top_k=5, top_p=0.8)),
    ],
    ids=["llama-plain", "qwen2-greedy", "adapter-truncated"],
)
def test_the_graph_backend_equals_the_eager_one(kind: str, distribution: Distribution) -> None:
    from covey.engines.native.decode_graph import GraphBackend

    model = made(kind)
    sampling = Sampling(
        group_size=2, max_tokens=4, max_concurrent=4, distribution=distribution, seed=1
    )
    asked = questions(model)
    plain = NativeEngine(model)
    plain.backend = EagerBackend(model, decoder_for(model), shape_of(model))
    expected = rollouts_of(plain, asked, step=2, sampling=sampling)
    sampler = by_graph(model)
    for slots in (4, 3):  # the second call finds the memory of the first
        got = rollouts_of(sampler, asked, step=2, sampling=replace(sampling, max_concurrent=slots))
        for mine, theirs in zip(chain(*got), chain(*expected), strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.finish == theirs.finish
            assert mine.sampler_logp == pytest.approx(theirs.sampler_logp, abs=1e-5)
    assert isinstance(sampler.backend, GraphBackend)
    memory = sampler.backend.cache
    assert memory is not None
    assert not memory.rows  # all rows are free again
    assert len(memory.free) == len(memory.prompt_keys[0])
    assert not memory.active.any()


@pytest.mark.parametrize(("tokens", "passes"), [(1000, [3]), (16, [2, 1])])
def test_upcoming_prompts_are_prefilled_together(
    tokens: int, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from covey.engines.native import scheduler as writer

    model, read = made("llama"), []

    def counted(model: LanguageModel, memory: KVCache, prompts: dict) -> dict:
        read.extend([len(prompts)] if prompts else [])
        return read_prompts(model, memory, prompts)

    monkeypatch.setattr(writer, "read_prompts", counted)
    monkeypatch.setattr(writer, "PREFILL_TOKENS", tokens)
    sampling = Sampling(group_size=4, max_tokens=2, max_concurrent=4, seed=1)
    found = rollouts_of(by_graph(model), questions(model), step=2, sampling=sampling)
    assert read == passes
    assert [len(answers) for answers in found] == [4, 4, 4]
    read.clear()
    plain = NativeEngine(model)
    plain.backend = EagerBackend(model, decoder_for(model), shape_of(model))
    rollouts_of(plain, questions(model), step=2, sampling=sampling)
    assert read == [1, 1, 1]


def test_small_16_bit_heads_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    small = load_language_model("embedded", dtype="bfloat16", device="cpu")
    FusedDecoder(load_language_model("embedded", dtype="float32", device="cpu"))
    with pytest.raises(UnsupportedModel, match="its heads are too small"):
        FusedDecoder(small)
    monkeypatch.setattr(fused_decoder, "SMALLEST_HEAD", 16)
    FusedDecoder(small)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_model_samples_on_a_gpu(dtype: str) -> None:
    model = load_language_model("embedded", dtype=dtype, device="cuda")
    sampling = Sampling(group_size=4, max_tokens=20, max_concurrent=4, seed=1)
    sampler = NativeEngine(model)
    found = rollouts_of(sampler, questions(model), step=2, sampling=sampling)
    assert [len(answers) for answers in found] == [4, 4, 4]
    assert isinstance(sampler.backend, GraphBackend)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_slots_are_refilled_without_synchronization() -> None:
    from covey.engines.native.decode_graph import _no_synchronization
    from covey.engines.native.shared_prompt_cache import SharedPromptCache

    device, slots = torch.device("cuda"), 6
    shape = KVShape(layers=2, heads=2, size=4, dtype=torch.float32, device=device)
    cache = SharedPromptCache(slots=slots, capacity=5, prompts=3, prompt_capacity=8, shape=shape)
    room = Slots.make(cache, Sampling(max_tokens=5), [1])
    read = [(torch.randn(7, 2, 4, device=device), torch.randn(7, 2, 4, device=device))] * 2
    tokens, logps = torch.arange(4, device=device), torch.arange(-4.0, 0.0, device=device)

    def refill() -> None:
        cache.emptied()
        cache.store_packed([8, 9], [3, 4], read)
        index, uniforms = to_device([torch.arange(4), torch.rand(4, 5)], device)
        cache.enter([0, 1, 2, 3], [8, 8, 9, 9])
        room.open(index, uniforms)
        room.write(index, tokens, logps)

    refill()
    with _no_synchronization():
        refill()
    found = room.written([0, 1, 2, 3], np.zeros(4, dtype=int), np.ones(4, dtype=int)).read()
    assert [written.tolist() for written, _ in found] == [[0], [1], [2], [3]]
    assert [said.tolist() for _, said in found] == [[-4.0], [-3.0], [-2.0], [-1.0]]
    assert cache.active.tolist() == [True, False, True, True, False, False]
    row, length = cache.rows[9]
    assert cache.prompt_length[:4].tolist() == [3, 3, 4, length]
    assert cache.prompt_keys[0][row, :, :length].equal(read[0][0][3:].transpose(0, 1))
