"""Completions do not depend on when the CPU reads them: step by step, or behind several steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from covey.engines.draw import Distribution
from covey.engines.native import scheduler
from covey.engines.native.backend import EagerBackend, advance_by, decoder_for
from covey.engines.native.engine import NativeEngine
from covey.engines.native.kv_cache import KVShape, SlotCache
from covey.engines.native.slots import Progress, Slots, Transcript
from covey.engines.protocol import Completion, Sampling
from covey.models.language_model import LanguageModel
from covey.rollout.episode import completion_texts
from tests.conftest import build, rollouts_of
from tests.engines.native.test_decode_graph import shape_of
from tests.engines.native.test_engine import Chained, ragged_prompts, sums


@dataclass(slots=True)
class SeveralSteps(EagerBackend):
    """Eager steps whose progress is read as that of a CUDA graph."""

    steps: int = 3

    def advance(self, slots: Slots, width: int, most: int) -> Progress:
        def step() -> None:
            EagerBackend.advance(self, slots, width, 1)

        return advance_by(step, slots, width, steps=self.steps, most=most)


def engine_of(model: LanguageModel, kind: type[EagerBackend]) -> NativeEngine:
    engine = NativeEngine(model)
    engine.backend = kind(model, decoder_for(model), shape_of(model))
    return engine


@pytest.mark.parametrize(
    "change",
    [{}, {"stop_strings": ("=5", "</think>")}, {"mask_replay": True}],
    ids=["plain", "stop strings", "kept sets"],
)
def test_several_steps_give_the_same_rollouts(
    embedded: LanguageModel, change: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "READ_TOKENS", 4)
    prompts = sums(embedded, 12)
    sampling = Sampling(
        group_size=4, max_tokens=30, seed=1, max_concurrent=5,
        distribution=Distribution(top_k=4 if "mask_replay" in change else 0),
    )  # fmt: skip
    sampling = replace(sampling, **change)
    one, several = (
        [r for g in rollouts_of(engine_of(embedded, kind), prompts, step=1, sampling=sampling)
         for r in g]
        for kind in (EagerBackend, SeveralSteps)
    )  # fmt: skip
    assert {r.finish for r in one} == {"stop", "length"}
    for mine, theirs in zip(several, one, strict=True):
        assert mine.tokens == theirs.tokens
        assert (mine.finish, mine.text, mine.turns) == (theirs.finish, theirs.text, theirs.turns)
        assert mine.text == embedded.opening + embedded.decode(mine.tokens)
        assert mine.sampler_logp == pytest.approx(theirs.sampler_logp, abs=1e-5)
        assert [s.kept for s in mine.segments] == [s.kept for s in theirs.segments]


class Reloading(Chained):
    """A source that changes the weights when it is asked for requests for the n-th time."""

    def __init__(self, engine: NativeEngine, asked: int, sampling: Sampling) -> None:
        super().__init__(ragged_prompts(1), sampling)
        self.engine, self.asked = engine, asked

    def take(self) -> list:
        self.asked -= 1
        if self.asked == 0:
            weight = self.engine.model.head.linear.weight
            with torch.no_grad():
                weight.copy_(weight.flip(0))
            self.engine.load_weights(self.engine.model.model.named_parameters, 7)
        return super().take()


def test_a_token_of_the_step_ahead_belongs_to_the_weights_that_generated_it() -> None:
    sampling = Sampling(max_tokens=12)

    def first_turn(kind: type[EagerBackend], asked: int) -> Completion:
        engine = engine_of(build("llama"), kind)
        source = Reloading(engine, asked, sampling)
        engine.run(source)
        return source.found["0", 0]

    found = first_turn(SeveralSteps, 2)
    old, new = found.versions
    # The first token comes with the prompt; one of three steps ran after the progress was read.
    assert (old.stop, old.version, new.version) == (4, 0, 7)
    expected = first_turn(EagerBackend, old.stop)  # which asks after the second token, the third...
    assert found.tokens == expected.tokens
    assert found.versions == expected.versions


@pytest.mark.parametrize(("most", "one_more", "counts"), [(3, False, [3, 1]), (9, True, [3, 1])])
def test_progress_counts_the_step_that_runs_behind_it(
    most: int, one_more: bool, counts: list[int]
) -> None:
    shape = KVShape(layers=1, heads=1, size=2, dtype=torch.float32, device=torch.device("cpu"))
    slots = Slots.make(SlotCache(2, 12, shape, shape.device), Sampling(max_tokens=10), stop_ids=[5])
    index = torch.arange(2)
    slots.open(index, torch.rand(2, 10))
    slots.cache.active[:] = True

    def step() -> None:
        index = slots.cache.active.nonzero().flatten()
        token = 5 * (index == 1)  # the second slot stops at once
        slots.write(index, token, -torch.ones(len(index)))

    progress = advance_by(step, slots, 2, steps=3, most=most)
    assert progress.one_more == one_more
    active, found = progress.read()
    assert active.tolist() == [True, False]
    assert found.tolist() == counts == slots.count.tolist()


def test_transcripts_decode_characters_that_span_two_reads(embedded: LanguageModel) -> None:
    tokens = embedded.tokenizer("a€ü", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 6  # bytes
    for cut in range(7):
        transcript = Transcript(embedded.pieces)
        for part in (tokens[:cut], tokens[cut:]):
            transcript.add(np.array(part, dtype=np.int32), np.zeros(len(part), dtype=np.float32))
        assert transcript.tokens == tokens
        assert transcript.text == "a€ü"
    assert Transcript(None).text is None


def test_completions_without_text_are_decoded(embedded: LanguageModel) -> None:
    source = Chained(ragged_prompts(2), Sampling(max_tokens=4))
    NativeEngine(embedded).run(source)
    completions = list(source.found.values())
    assert all(c.text is not None for c in completions)
    mixed = [replace(c, text=None) if n % 2 else c for n, c in enumerate(completions)]
    expected = [embedded.decode(c.tokens) for c in completions]
    assert completion_texts(embedded, mixed, "") == expected
    assert completion_texts(embedded, mixed, "<think>")[1] == "<think>" + expected[1]
