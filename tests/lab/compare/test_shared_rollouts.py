from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.engines.draw import Distribution
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import RequestSource, Sampling
from covey.environments import InlineHost, Step
from covey.environments.calls import CALL_FORMATS
from covey.evaluation.evaluate import EVALUATION_STEP
from covey.lab.compare.shared_rollouts import SharedEngine
from covey.models.language_model import LanguageModel
from covey.rollout.episode import EncodedPrompt, Interaction, encode_prompts, generate
from covey.tasks.arithmetic import Arithmetic
from covey.types import Group, Message, Prompt, Rollout
from tests.environments.chat_templates import FAMILIES
from tests.environments.exactness import Odd, policy

SAMPLING = Sampling(group_size=3, max_tokens=12, seed=4)
Generate = Callable[..., list[Group]]


class Counting(NativeEngine):
    """An engine that counts its runs."""

    runs = 0

    def run(self, requests: RequestSource) -> None:
        self.runs += 1
        NativeEngine.run(self, requests)


@pytest.fixture
def counting(embedded: LanguageModel) -> Counting:
    return Counting(embedded)


@pytest.fixture
def prompts(embedded: LanguageModel) -> list[EncodedPrompt]:
    return encode_prompts(embedded, Arithmetic().train()[:2])


@pytest.fixture
def shared(counting: Counting, tmp_path: Path) -> Callable[..., SharedEngine]:
    def make(start: str = "weights", names_file: str = "names") -> SharedEngine:
        return SharedEngine(
            engine=counting,
            folder=tmp_path / "shared",
            start=start,
            names_file=tmp_path / names_file,
        )

    return make


@pytest.mark.parametrize(
    "sampling",
    [SAMPLING, replace(SAMPLING, distribution=Distribution(top_k=3), mask_replay=True)],
    ids=["plain", "with kept sets"],
)
def test_the_second_run_reads_what_the_first_has_generated(
    sampling: Sampling,
    shared: Callable[..., SharedEngine],
    counting: Counting,
    prompts: list[EncodedPrompt],
    tmp_path: Path,
) -> None:
    seen: list[tuple[int, Rollout]] = []
    usual: dict[str, Any] = {"model": counting.model, "step": 1}
    first = generate(prompts, engine=shared(), sampling=sampling, **usual)
    second = generate(
        prompts,
        engine=shared(names_file="second"),
        sampling=replace(sampling, max_concurrent=2, cache_gigabytes=1.0),  # change no completion
        finished=lambda number, rollout: seen.append((number, rollout)),
        **usual,
    )
    assert second == first  # every field of every rollout, log-probabilities to the last bit
    assert counting.runs == 1
    assert seen == [(number, r) for number, group in enumerate(first) for r in group.rollouts]
    assert (tmp_path / "names").read_text() == (tmp_path / "second").read_text()
    (file,) = (tmp_path / "shared").glob("*.jsonl")
    assert file.name.startswith("step-1-seed-4-")


def test_a_change_of_anything_that_decides_completions_generates_anew(
    shared: Callable[..., SharedEngine],
    counting: Counting,
    prompts: list[EncodedPrompt],
    tmp_path: Path,
) -> None:
    usual: dict[str, Any] = {"prompts": prompts, "step": 1, "sampling": SAMPLING}
    others: list[dict[str, Any]] = [
        {},
        {"prompts": prompts[:1]},
        {"step": 2},
        {"sampling": replace(SAMPLING, seed=5)},
        {"sampling": replace(SAMPLING, group_size=2)},
        {"sampling": replace(SAMPLING, max_tokens=11)},
        {"sampling": replace(SAMPLING, stop_strings=("9",))},
        {"sampling": replace(SAMPLING, distribution=Distribution(temperature=0.5))},
    ]
    for change in others:
        generate(engine=shared(), model=counting.model, **{**usual, **change})
    generate(engine=shared(start="other weights"), model=counting.model, **usual)
    assert counting.runs == len(others) + 1 == len(list((tmp_path / "shared").glob("*.jsonl")))


def test_nothing_is_shared_after_the_first_optimizer_step(
    shared: Callable[..., SharedEngine],
    counting: Counting,
    prompts: list[EncodedPrompt],
    tmp_path: Path,
) -> None:
    greedy = replace(SAMPLING, group_size=1, distribution=Distribution(temperature=0.0))
    engine, model = shared(), counting.model

    def evaluate(sampling: Sampling) -> Group:
        return generate(
            prompts, engine=engine, model=model, step=EVALUATION_STEP, sampling=sampling
        )[0]

    evaluate(greedy)
    evaluate(replace(greedy, seed=99))  # greedy completions draw nothing, so seeds do not matter
    assert counting.runs == 1
    engine.load_weights(model.model.named_parameters, 1)
    assert evaluate(greedy).rollouts[0].policy_version == 1
    assert counting.runs == 2
    assert not (tmp_path / "names").exists()  # evaluations are no first rollouts


class OtherReplies(Odd):
    """An environment whose replies differ from those of `Odd` after the first turn."""

    def step(self, message: Message) -> Step:
        first = self.left
        step = Odd.step(self, message)
        changed = [{**each, "content": f"again {first}"} for each in step.messages]
        return replace(step, messages=changed)


def test_the_turns_of_episodes_are_stored_by_their_requests(
    tmp_path: Path,
) -> None:
    model = policy(FAMILIES["qwen2.5"])
    counting = Counting(model)
    prompts = [
        Prompt(id=f"p/{n}", task="odd", target="", messages=({"role": "user", "content": f"{n}?"},))
        for n in range(3)
    ]

    def rollouts(name: str, world: type[Odd], most: int = 3) -> list[Group]:
        interaction = Interaction(
            host=InlineHost(world), call_format=CALL_FORMATS["hermes"], max_turns=5, max_calls=16,
            max_tokens=4096,
        )  # fmt: skip
        engine = SharedEngine(
            engine=counting, folder=tmp_path / "shared", start="weights", names_file=tmp_path / name
        )
        return generate(
            encode_prompts(model, prompts[:most], interaction),
            engine=engine, model=model, sampling=replace(SAMPLING, max_tokens=24), step=1,
            interaction=interaction,
        )  # fmt: skip

    few = rollouts("few", Odd, most=2)
    first, second = rollouts("first", Odd), rollouts("second", Odd)
    assert max(len(r.turns) for group in first for r in group.rollouts) > 2
    assert first[:2] == few
    assert second == first  # every field of every rollout
    assert counting.runs == 2  # the third prompt was generated, and no other
    other = rollouts("other", OtherReplies)
    assert counting.runs == 3
    for one, another in zip(first, other, strict=True):
        for a, b in zip(one.rollouts, another.rollouts, strict=True):
            assert a.turns[0] == b.turns[0]  # the first turns have read the same
    assert other != first
    assert rollouts("again", OtherReplies) == other
    assert counting.runs == 3
    names = {name: (tmp_path / name).read_text() for name in ("few", "first", "second", "other")}
    assert names["first"] == names["second"]
    assert len(set(names.values())) == 3  # rollouts that differ have other names
    assert len(list((tmp_path / "shared").glob("*.jsonl"))) == 1
