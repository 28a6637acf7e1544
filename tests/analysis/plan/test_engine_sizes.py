"""Sizes that a forecast repeats are those of the engine and the trainer."""

from __future__ import annotations

import pytest
import torch

from covey.accel import attention, attention_kernels, static_buffers
from covey.analysis.plan import engine_sizes as sizes
from covey.engines.native import (
    backend,
    llama_decoder,
    prefill,
    prefill_graph,
    shared_prompt_cache,
)
from covey.models.micro_batches import balanced_parts
from tests.analysis.plan.test_memory import equal_rows


def test_limits_are_those_of_their_modules() -> None:
    assert (attention.SHORT, attention_kernels.LONG) == (sizes.SHORT, sizes.LONG)
    assert llama_decoder.FUSED_COPY_BYTES == sizes.FUSED_BYTES
    assert prefill.PREFILL_TOKENS == sizes.PREFILL_TOKENS
    assert prefill_graph.MAX_FLOPS == sizes.PREFILL_FLOPS
    assert (backend.CAPACITY_STEP, backend.SPARE_BYTES) == (sizes.CAPACITY_STEP, sizes.SPARE_BYTES)
    assert shared_prompt_cache.PROMPT_STEP == sizes.PROMPT_STEP
    assert (shared_prompt_cache.PAGE, shared_prompt_cache.LEAST_PAGE) == (
        sizes.PAGE,
        sizes.LEAST_PAGE,
    )


def test_limits_are_those_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from covey.accel import fused_head
    from covey.accel.kernels import sample

    assert (sample.BLOCK, fused_head.ROWS) == (sizes.VOCABULARY_BLOCK, sizes.CHUNK_STEP)


def test_slots_and_padded_tokens() -> None:
    for count in (*range(1, 2100, 7), 5000, 40_001, 1_000_000):
        assert sizes.width_for(count) == shared_prompt_cache.width_for(count)
        assert sizes.padded_tokens(count) == static_buffers.bucket(count)
        assert sizes.page_for(count) == shared_prompt_cache.page_for(count)


@pytest.mark.parametrize("completion", [1, 2, 40])
@pytest.mark.parametrize("group_size", [1, 4, 6])
def test_micro_batches_are_those_of_balanced_parts(group_size: int, completion: int) -> None:
    batch = equal_rows(5, group_size, prompt=30, completion=completion)
    group = batch.group
    for budget in (1, 31, 100, 170, 300, 450, 1000, 100_000):
        parts = [(len(p), len(torch.unique(group[p]))) for p in balanced_parts(batch, budget)]
        expected = max(n * (completion - 1) + prompts * 30 for n, prompts in parts)
        rows, prompts = sizes.largest_micro_batch(len(batch), group_size, 30, completion, budget)
        assert rows * (completion - 1) + prompts * 30 == expected, budget
