"""A KV cache that is too small for all completions pauses some of them, and changes none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from covey.engines.draw import Distribution
from covey.engines.native import pages
from covey.engines.protocol import Sampling
from covey.models.language_model import LanguageModel
from covey.types import Rollout
from tests.conftest import rollouts_of
from tests.engines.native.test_decode_graph import by_graph, made, questions, shape_of

pytest.importorskip("triton")

PAGE = 16


def completions(model: LanguageModel, sampling: Sampling) -> tuple[list[Rollout], int]:
    """Return completions and how many times one was paused."""
    engine = by_graph(model)
    found = rollouts_of(engine, questions(model), step=2, sampling=sampling)
    return [rollout for group in found for rollout in group], engine.preemptions


@pytest.mark.parametrize(
    ("kind", "distribution", "mask_replay"),
    [
        ("llama", Distribution(), False),
        ("qwen2", Distribution(temperature=0.0), False),
        ("llama", Distribution(top_k=5), True),
    ],
    ids=["sampled", "greedy", "kept sets"],
)
def test_a_small_pool_gives_the_same_completions(
    kind: str, distribution: Distribution, mask_replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE", PAGE)
    model = made(kind)
    large = Sampling(
        group_size=2, max_tokens=36, max_concurrent=4, distribution=distribution, seed=1,
        mask_replay=mask_replay,
    )  # fmt: skip
    # Four slots with three pages each would need twelve.
    small = replace(large, cache_gigabytes=5 * shape_of(model).bytes(PAGE) / 1e9)
    expected, none = completions(model, large)
    got, paused = completions(model, small)
    assert none == 0
    assert paused > 0
    assert len(got) == 6
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.finish == theirs.finish
        assert mine.sampler_logp == pytest.approx(theirs.sampler_logp, abs=1e-5)
        assert [s.kept for s in mine.segments] == [s.kept for s in theirs.segments]
