"""A KV cache that is too small for all completions pauses some of them, and changes none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from covey.cluster.ray_engine import EngineActor
from covey.engines.draw import Distribution
from covey.engines.native import sizes
from covey.engines.native.backend import EagerBackend, decoder_for
from covey.engines.native.engine import NativeEngine
from covey.engines.native.kv_cache import SlotCache
from covey.engines.native.slots import Slots
from covey.engines.process.engine import ProcessEngine
from covey.engines.process.shared_weights import SharedWeights
from covey.engines.protocol import Sampling
from covey.rollout.episode import SingleTurnEpisodes
from tests.conftest import rollouts_of
from tests.engines.native.test_decode_graph import by_graph, made, questions, shape_of

pytest.importorskip("triton")

# The interpreter is slow, and has no smallest tile.
PAGE, TOKENS = (16, 56) if torch.cuda.is_available() else (4, 14)


@pytest.mark.parametrize(
    ("kind", "distribution", "mask_replay"),
    [
        ("qwen2", Distribution(temperature=0.0), False),
        ("llama", Distribution(top_k=5), True),
    ],
    ids=["greedy", "sampled with kept sets"],
)
def test_a_small_pool_gives_the_same_completions(
    kind: str, distribution: Distribution, mask_replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PAGE", "LEAST_PAGE"):
        monkeypatch.setattr(sizes, name, PAGE)
    model = made(kind)
    sampling = Sampling(
        group_size=3, max_tokens=TOKENS, max_concurrent=4, distribution=distribution, seed=1,
        mask_replay=mask_replay,
    )  # fmt: skip
    asked = questions(model)[1:2]
    plain = NativeEngine(model)
    plain.backend = EagerBackend(model, decoder_for(model), shape_of(model))
    (expected,) = rollouts_of(plain, asked, step=2, sampling=sampling)
    # Three completions of four pages each need twelve.
    small = replace(sampling, cache_gigabytes=6 * shape_of(model).bytes(PAGE) / 2**30)
    engine = by_graph(model)
    (got,) = rollouts_of(engine, asked, step=2, sampling=small)
    assert engine.preemptions > 0
    assert len(got) == 3
    for mine, theirs in zip(got, expected, strict=True):
        assert len(mine.tokens) == TOKENS
        assert mine.tokens == theirs.tokens
        assert mine.finish == theirs.finish
        assert mine.sampler_logp == pytest.approx(theirs.sampler_logp, abs=1e-5)
        assert [s.kept for s in mine.segments] == [s.kept for s in theirs.segments]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process cannot use CUDA")
@pytest.mark.usefixtures("_forked_workers")
def test_engines_in_other_processes_report_their_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGE", "LEAST_PAGE"):
        monkeypatch.setattr(sizes, name, PAGE)
    model = made("llama")
    sampling = Sampling(
        group_size=3, max_tokens=TOKENS, max_concurrent=4,
        cache_gigabytes=6 * shape_of(model).bytes(PAGE) / 2**30,
    )  # fmt: skip
    episodes = partial(
        SingleTurnEpisodes, prompts=questions(model)[1:2], model=model, sampling=sampling, step=1,
        finished=lambda number, rollout: None,
    )  # fmt: skip
    own, weights = by_graph(model), dict(model.model.named_parameters())
    shared = SharedWeights.allocate(weights.items(), on_gpu=False)
    process = ProcessEngine("tests.engines.native.pausing_worker", "llama", shared)
    actor = EngineActor(lambda: by_graph(model), 0)
    own.run(episodes())
    assert own.preemptions > 0
    for calls in (1, 2):
        process.run(episodes())
        assert process.preemptions == calls * own.preemptions
    process.close()
    source = episodes()
    actor.begin(actor.version, [], source.limits)
    actor.add(source.take())
    ended = 0
    while ended < sampling.group_size:
        ended += len(actor.collect())
    assert actor.end() == own.preemptions


def test_paused_completions_continue_where_they_were() -> None:
    cache = SlotCache(3, 9, None, torch.device("cpu"))
    slots = Slots.make(cache, Sampling(max_tokens=4), stop_ids=[7])
    index = torch.tensor([2, 0, 1])
    cache.place[index] = -1  # as after `enter` of a cache that stores prompts apart
    slots.open(index, torch.rand(3, 4))
    tokens = [np.array(row, dtype=np.int32) for row in ([5, 6], [5, 7], [1, 2, 3, 4])]
    logps = [-row.astype(np.float32) for row in tokens]
    slots.resume(index, tokens, logps)
    # The second ended with a stop token, and the third is as long as it may be.
    assert cache.active.tolist() == [False, False, True]
    assert slots.count.tolist() == [2, 4, 2]
    assert cache.place.tolist() == [1, 3, 1]
    assert slots.last.tolist() == [7, 4, 6]
    starts = np.array([0, 1, 1])
    found = slots.written([2, 0, 1], starts, np.array([2, 2, 4])).read()
    for row, start, (mine, theirs) in zip(tokens, starts, found, strict=True):
        assert mine.tolist() == row[start:].tolist()
        assert theirs.tolist() == (-row[start:]).tolist()
