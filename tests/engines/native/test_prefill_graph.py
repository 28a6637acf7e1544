"""Prefill on static buffers: captured on a GPU, elsewhere in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from covey.accel import fused_forward as fused
from covey.accel import packing as static
from covey.accel import sizes
from covey.accel.fused_parameters import fuse_parameters
from covey.accel.packing import copy_bytes
from covey.engines.native import prefill
from covey.engines.native import shared_prompt_cache as prefill_graph
from covey.engines.native.shared_prompt_cache import PrefillGraphs, SharedPromptCache
from covey.models.language_model import LanguageModel
from tests.accel.test_fused_forward import per_row
from tests.conftest import build
from tests.engines.native.test_decode_graph import shape_of

PROMPTS = {4: (5, 6, 7, 8), 7: (9, 10), 9: (11, 12, 13)}
OTHERS = {1: (14, 15, 16), 2: (20, 21, 22, 23)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of a few tokens, because the interpreter is slow."""
    monkeypatch.setattr(fused, "flash_attention", per_row)
    monkeypatch.setattr(sizes, "TOKEN_STEP", 24)
    monkeypatch.setattr(static, "PADDING_ROW", 4)


def fast(kind: str) -> LanguageModel:
    model = build(kind)
    model.backbone.layers = model.backbone.layers[:2]
    fuse_parameters(model.backbone)
    return replace(model, fused=True, flash=True)


def cache_for(model: LanguageModel, capacity: int = 8) -> SharedPromptCache:
    return SharedPromptCache(
        slots=4, capacity=4, prompts=6, prompt_capacity=capacity, shape=shape_of(model)
    )


def stored(cache: SharedPromptCache) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*cache.prompt_keys, *cache.prompt_values)]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("small")
@torch.no_grad()
def test_padding_changes_neither_logits_nor_any_row_of_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = fast("qwen2")
    padded, plain = cache_for(model), cache_for(model)
    for prompts in (PROMPTS, OTHERS):  # the second time, the buffers contain the first prompts
        found = prefill.read_prompts(model, padded, prompts)
        with monkeypatch.context() as eager:
            eager.setattr(prefill_graph, "PREFILL_FLOPS", 0.0)
            expected = prefill.read_prompts(model, plain, prompts)
        assert padded.rows == plain.rows
        assert_close([*found.values()], [*expected.values()])
        assert_close(stored(padded), stored(plain))
    assert [size.tokens for size in padded.prefill.passes] == [24]
    assert not plain.prefill.passes


@pytest.mark.usefixtures("small")
@torch.no_grad()
def test_the_least_recently_used_bucket_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_graph, "MAX_BUCKETS", 2)
    model, graphs = fast("llama"), PrefillGraphs()
    cache = cache_for(model, capacity=64)
    for length in (20, 40, 20, 60):
        graphs.read(model, cache, [tuple(range(3, 3 + length))], [0])
    assert [size.tokens for size in graphs.passes] == [24, 72]


def test_long_passes_and_float8_caches_are_not_captured() -> None:
    model = fast("llama")
    cache = cache_for(model)
    weights = sum(p.numel() for p in model.backbone.layers.parameters())
    most = int(prefill_graph.PREFILL_FLOPS / 2 / weights)
    assert cache.prefill.suits(model, cache, most)
    assert not cache.prefill.suits(model, cache, most + 1)
    cache.float8 = True
    assert not cache.prefill.suits(model, cache, 1)


def test_bytes_of_tensors_are_copied_at_their_places() -> None:
    whole = torch.full((64,), 255, dtype=torch.uint8)
    parts = [torch.arange(6).view(2, 3).t(), torch.tensor([-1.5], dtype=torch.float32)]
    for at, part in zip((8, 60), parts, strict=True):
        copy_bytes(whole, at, part)
    assert whole[8:56].view(torch.int64).tolist() == [0, 3, 1, 4, 2, 5]
    assert whole[60:].view(torch.float32).tolist() == [-1.5]
    assert whole[:8].tolist() + whole[56:60].tolist() == [255] * 12
    copy_bytes(whole, 64, torch.zeros(0, dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lengths", [[100, 56, 100], [90, 1, 7, 30]], ids=["full", "padded"])
@torch.inference_mode()
def test_captured_prefill_equals_eager_prefill_bit_for_bit(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.accel.test_gpu import build as build_on_gpu

    model = build_on_gpu("qwen2")
    assert model.fused
    assert model.flash
    captured, cache = cache_for(model, 128), cache_for(model, 128)
    for number in range(4):  # eager, captured, and two replays
        draw = torch.Generator().manual_seed(number)
        prompts = {
            place: tuple(torch.randint(2, 262, (length,), generator=draw).tolist())
            for place, length in enumerate(lengths)
        }
        found = prefill.read_prompts(model, captured.emptied(), prompts)
        cache.prefill = PrefillGraphs()  # which has captured nothing
        expected = prefill.read_prompts(model, cache.emptied(), prompts)
        assert all(found[place].equal(expected[place]) for place in prompts)
        assert all(a.equal(b) for a, b in zip(stored(captured), stored(cache), strict=True))
        (one,) = captured.prefill.passes.values()
        assert (one.graph is None) == (number == 0)
        if sum(lengths) == one.buffers.size.tokens:  # without padding, as before
            monkeypatch.setattr(prefill_graph, "PREFILL_FLOPS", 0.0)
            plain = prefill.read_prompts(model, cache.emptied(), prompts)
            monkeypatch.undo()
            assert all(found[place].equal(plain[place]) for place in prompts)
