"""The native engine in a process of its own: the trainer's bits, and a process that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.config import load_config
from covey.config.resolve import resolve
from covey.config.schema import Engine
from covey.engines.native.engine import NativeCopy, NativeEngine
from covey.engines.process.engine import MOST_DEATHS, ProcessEngine
from covey.engines.process.shared_weights import SharedWeights
from covey.engines.protocol import Completion, Request, Sampling
from covey.errors import DataError, ModelError
from covey.loop import train
from covey.models.language_model import LanguageModel
from covey.policy.policy import load_model
from covey.records.folder import RunFolder
from covey.records.trackers import Tracker
from covey.rollout.episode import SingleTurnEpisodes, encode_prompts, generate
from covey.run import Run
from covey.stopping import StopSignal
from covey.tasks.arithmetic import Arithmetic
from covey.types import Group
from tests.trackers import Notes

SETTINGS = [
    "engine.kind=process", "overlap.mode=copy", "overlap.staleness=1", "train.steps=6",
    "rollout.prompts_per_step=3", "rollout.group_size=4", "rollout.max_tokens=20",
    "task.min_operations=1", "task.max_operations=2", "evaluate.every=0", "save.every=3", "train.mini_batches=1", "optimizer.learning_rate=1e-3",
]  # fmt: skip
SAMPLING = Sampling(group_size=4, max_tokens=16, max_concurrent=6, seed=3)

FORKED = pytest.mark.usefixtures("_forked_workers")
"""For all but the first tests, whose process is started as a run starts it."""


@pytest.fixture(scope="module")
def parts() -> Iterator[Run]:
    """A run whose engine has a process of its own."""
    made = Run.build(resolve(load_config("arithmetic", SETTINGS)))
    yield made
    made.engine.close()


def pid(engine: Any) -> int:
    assert isinstance(engine, ProcessEngine)
    assert engine.process is not None
    return engine.process.process.pid


def generated(engine: Any, model: LanguageModel, step: int = 1) -> list[Group]:
    prompts = encode_prompts(model, Arithmetic().train()[:5])
    return generate(prompts, engine=engine, model=model, sampling=SAMPLING, step=step)


def halved(model: LanguageModel) -> Mapping[str, torch.Tensor]:
    return {name: weight.detach() * 0.5 for name, weight in model.model.named_parameters()}


def test_a_process_generates_the_same_bits(parts: Run) -> None:
    model, engine = parts.policy.model, parts.engine
    assert not engine.info.shares_weights
    assert engine.info.loads_in_flight
    assert engine.info.exact_logp
    own = NativeCopy(load_model(parts.config))
    assert generated(engine, model) == generated(NativeEngine(model), model)
    other = halved(model)
    for each in (engine, own):
        each.load_weights(other.items, 7)
    there, here = generated(engine, model), generated(own, model)
    assert there == here
    assert {rollout.policy_version for group in there for rollout in group.rollouts} == {7}


def test_an_error_in_the_process_is_the_trainers(parts: Run) -> None:
    model = parts.policy.model
    long = replace(SAMPLING, max_tokens=model.context)
    prompts = encode_prompts(model, Arithmetic().train()[:1])
    with pytest.raises(DataError, match="the model's context of"):
        generate(prompts, engine=parts.engine, model=model, sampling=long, step=1)
    assert parts.engine.events() == []


@FORKED
def test_requests_of_a_process_that_is_killed_are_generated_again(parts: Run) -> None:
    model, engine = parts.policy.model, parts.engine
    assert isinstance(engine, ProcessEngine)
    other = halved(model)
    engine.load_weights(other.items, 9)
    expected = generated(engine, model, step=2)
    killed: list[int] = []

    class Killing(SingleTurnEpisodes):
        def done(self, completions: Sequence[Completion]) -> None:
            super().done(completions)
            if not killed:
                killed.append(pid(engine))
                os.kill(killed[0], signal.SIGKILL)

    prompts = encode_prompts(model, Arithmetic().train()[:5])
    ended: list[tuple[int, int]] = []
    source = Killing(
        prompts=prompts, model=model, sampling=SAMPLING, step=2,
        finished=lambda number, rollout: ended.append((number, rollout.sample)),
    )  # fmt: skip
    engine.run(source)
    assert killed != [pid(engine)]
    assert source.groups() == expected
    assert len(ended) == len(set(ended)) == 20  # each rollout ends once
    assert engine.events() == ["the engine's process ended by signal SIGKILL and was restarted"]
    assert engine.events() == []
    _ends_with_the_trainer(engine)


def _ends_with_the_trainer(engine: ProcessEngine) -> None:
    assert engine.process is not None
    engine.process.work.close()  # as when the trainer is killed
    engine.process.control.close()
    assert engine.process.process.wait(20) == 0
    engine.close()


@FORKED
def test_deaths_are_counted_from_the_last_success(parts: Run) -> None:
    model, engine = parts.policy.model, parts.engine
    expected = generated(engine, model)
    for _ in range(MOST_DEATHS + 1):
        os.kill(pid(engine), signal.SIGKILL)
        assert generated(engine, model) == expected
    assert len(engine.events()) == MOST_DEATHS + 1


@FORKED
def test_a_process_that_always_dies_at_the_same_completion_ends_the_run(parts: Run) -> None:
    model, engine = parts.policy.model, parts.engine

    class Killing(SingleTurnEpisodes):
        def done(self, completions: Sequence[Completion]) -> None:
            super().done(completions)
            os.kill(pid(engine), signal.SIGKILL)

    source = Killing(
        prompts=encode_prompts(model, Arithmetic().train()[:5]), model=model, sampling=SAMPLING,
        step=2, finished=lambda number, rollout: None,
    )  # fmt: skip
    with pytest.raises(ModelError, match=f"ended {MOST_DEATHS} times in a row"):
        engine.run(source)
    engine.close()
    assert len(source.rollouts) < 20
    engine.events()


@FORKED
@pytest.mark.slow
def test_a_run_goes_on_when_its_engine_is_killed(parts: Run, tmp_path: Path) -> None:
    class Killer(Tracker):
        def step(self, metrics: Mapping[str, Any]) -> None:
            if metrics["step"] == 2:
                os.kill(pid(parts.engine), signal.SIGKILL)

    first = {name: weight.clone() for name, weight in parts.policy.weights()}
    config, notes, runs = parts.config, Notes(), []
    for number, trackers in enumerate(([Killer(), notes], [])):
        fresh = parts
        if number:  # the same by an engine that cannot die
            native = config.model_copy(update={"engine": Engine()})
            fresh = replace(Run.build(native), config=config, engine=NativeCopy(load_model(config)))
        folder = RunFolder.create(tmp_path / str(number), "", {})
        train(fresh, folder, trackers, StopSignal())
        weights = dict(fresh.policy.weights())
        rows = [folder.rollouts(step) for step in range(1, 7)]
        runs.append((weights, rows, folder.steps()))
    (weights, rows, steps), (others, other_rows, quiet) = runs
    assert any(not torch.equal(first[name], weight) for name, weight in weights.items())
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
    assert rows == other_rows
    assert sum(row["engine/restarts"] for row in steps) == 1
    assert sum(row["engine/restarts"] for row in quiet) == 0
    assert sum("ended by signal SIGKILL" in note for note in notes.notes) == 1
    groups = [row["rollout/trained_groups"] for row in steps]
    assert groups == [3] * 6 == [row["rollout/trained_groups"] for row in quiet]


@FORKED
@pytest.mark.slow
def test_weights_may_change_while_completions_are_generated(parts: Run, tmp_path: Path) -> None:
    overlap = parts.config.overlap.model_copy(update={"in_flight": True, "staleness": 2})
    config = parts.config.model_copy(update={"overlap": overlap})
    folder = RunFolder.create(tmp_path / "run", "", {})
    start = parts.policy.version
    fresh = replace(parts, config=config, step=0, episode=0, tokens=0, saved=0)
    train(fresh, folder, [], StopSignal())
    rows = folder.steps()
    assert [row["rollout/trained_groups"] for row in rows] == [3] * 6
    assert [row["updates"] for row in rows] == [start + n for n in range(1, 7)]
    for row in rows:  # versions of some moment between the ticket and the training
        newest = row["updates"] - 1
        assert newest - 2 <= row["overlap/version_min"] <= row["overlap/version_max"] <= newest


@FORKED
def test_weights_in_shared_memory() -> None:
    weights = {
        "a": torch.arange(7, dtype=torch.float32), "b": torch.ones(2, 3, dtype=torch.bfloat16),
        "c": torch.tensor(2.5, dtype=torch.float64), "d": torch.arange(300) % 5,
    }  # fmt: skip
    block = SharedWeights.allocate(weights.items(), on_gpu=False)
    block.write(weights.items())
    there = dict(SharedWeights.open(block.handle).weights())
    assert all(torch.equal(there[name], weight) for name, weight in weights.items())
    weights["a"].mul_(2)
    assert there["a"].sum() == 21  # a copy
    block.write(weights.items())
    assert there["a"].sum() == 42  # seen by all who opened it


@FORKED
def test_versions_of_weights_that_change_in_between(embedded: LanguageModel) -> None:
    engine = NativeCopy(load_model(resolve(load_config("arithmetic"))))
    before = dict(embedded.model.named_parameters())
    engine.load_weights(before.items, 4)
    plain = generated(engine, embedded)

    class Changing(SingleTurnEpisodes):
        takes = 0

        def take(self) -> Sequence[Request]:
            self.takes += 1
            if self.takes == 8:
                engine.load_weights(halved(embedded).items, 5)
            return super().take()

    prompts = encode_prompts(embedded, Arithmetic().train()[:5])
    source = Changing(
        prompts=prompts, model=embedded, sampling=SAMPLING, step=1,
        finished=lambda number, rollout: None,
    )  # fmt: skip
    engine.run(source)
    changed, kinds = source.groups(), set()
    for old, new in zip(plain, changed, strict=True):
        for one, two in zip(old.rollouts, new.rollouts, strict=True):
            spans = two.segments[0].versions
            kinds.add(tuple(span.version for span in spans))
            ends = [0, *(span.stop for span in spans)]
            assert [span.start for span in spans] == ends[:-1]
            assert ends[-1] == len(two.tokens)
            same = spans[0].stop if spans[0].version == 4 else 0
            assert one.tokens[:same] == two.tokens[:same]
            assert one.sampler_logp[:same] == two.sampler_logp[:same]
    assert kinds == {(4, 5), (5,)} or kinds == {(4,), (4, 5), (5,)}
