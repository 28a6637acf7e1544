from dataclasses import replace

import pytest
import torch

from covey.engines.draw import Distribution
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Question, Sampling
from covey.errors import DataError, ModelError
from covey.models.language_model import LanguageModel
from covey.models.logp import batch_logp
from covey.rollout.collect import ask
from covey.tasks import Arithmetic
from covey.training.collate import collate
from covey.types import Group, Prompt, Rollout
from tests.conftest import ARCHITECTURES, build

GREEDY = Distribution(temperature=0.0)


def ragged_questions(count: int) -> list[Question]:
    """Return questions of different lengths over the bytes of the embedded tokenizer."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + (7 * i) % 13 for i in range(count)]
    return [
        Question(
            prompt=Prompt(id=f"q{i}", task="test", messages=(), target=""),
            tokens=tuple(torch.randint(6, 262, (n,), generator=generator).tolist()),
        )
        for i, n in enumerate(lengths)
    ]


def sums(model: LanguageModel, count: int) -> list[Question]:
    return ask(model, Arithmetic(min_operations=1, max_operations=4).train()[:count])


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("slots", [2, 64])
def test_greedy_equals_generate_token_for_token(architecture: str, slots: int) -> None:
    model = build(architecture)
    questions = ragged_questions(9)
    sampling = Sampling(max_tokens=24, distribution=GREEDY, slots=slots)
    ours = NativeEngine(model).generate(questions, step=0, sampling=sampling)
    for question, (rollout,) in zip(questions, ours, strict=True):
        ids = torch.tensor([question.tokens])
        theirs = model.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        assert list(rollout.tokens) == theirs[0, ids.shape[1] :].tolist()


def test_a_rollout_is_the_same_in_any_batch_and_slot_order(embedded: LanguageModel) -> None:
    questions = sums(embedded, 12)
    sampler = NativeEngine(embedded)

    def tokens(questions: list[Question], slots: int) -> dict[tuple[str, int], tuple[int, ...]]:
        sampling = Sampling(samples=5, max_tokens=40, slots=slots, seed=3)
        groups = sampler.generate(questions, step=7, sampling=sampling)
        return {(r.prompt_id, r.sample): r.tokens for group in groups for r in group}

    expected = tokens(questions, 64)
    assert len(expected) == 60
    assert len(set(expected.values())) > 40
    for slots in (1, 3, 17):
        assert tokens(questions, slots) == expected
    assert tokens(questions[::-1], 16) == expected


@pytest.mark.parametrize("change", [{"seed": 4}, {"step": 8}], ids=["another seed", "another step"])
def test_another_address_gives_another_rollout(
    embedded: LanguageModel, change: dict[str, int]
) -> None:
    questions = sums(embedded, 8)
    sampler = NativeEngine(embedded)
    address = {"seed": 3, "step": 7}

    def texts(seed: int, step: int) -> list[str]:
        sampling = Sampling(samples=4, max_tokens=40, seed=seed)
        return [
            r.text for g in sampler.generate(questions, step=step, sampling=sampling) for r in g
        ]

    assert texts(**address) == texts(**address)
    assert texts(**address) != texts(**{**address, **change})


def as_groups(questions: list[Question], rollouts: list[list[Rollout]]) -> list[Group]:
    return [
        Group(prompt=q.prompt, rollouts=tuple(replace(r, reward=0.0) for r in rs))
        for q, rs in zip(questions, rollouts, strict=True)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_logp_is_the_policys_logp(embedded: LanguageModel, temperature: float) -> None:
    questions = sums(embedded, 16)
    sampling = Sampling(
        samples=8, max_tokens=48, slots=50, distribution=Distribution(temperature=temperature)
    )
    rollouts = NativeEngine(embedded).generate(questions, step=1, sampling=sampling)
    batch = collate(as_groups(questions, rollouts))
    with torch.no_grad():
        logp = batch_logp(embedded, batch, temperature=temperature).logp
    assert batch.mask.sum() > 2000
    # A low temperature magnifies the rounding of the logits.
    gap = float((logp - batch.sampler_logp)[batch.mask].abs().max())
    assert gap < 1e-5 / temperature


def test_sampler_logp_is_of_the_truncated_distribution(embedded: LanguageModel) -> None:
    questions = sums(embedded, 8)
    sampling = Sampling(samples=8, max_tokens=48, distribution=Distribution(top_p=0.7))
    rollouts = NativeEngine(embedded).generate(questions, step=1, sampling=sampling)
    batch = collate(as_groups(questions, rollouts))
    with torch.no_grad():
        logp = batch_logp(embedded, batch).logp
    gap = (batch.sampler_logp - logp)[batch.mask]
    assert (gap > -1e-5).all()
    assert float(gap.max()) > 0.1
    # What is kept has at least mass 0.7, so no probability grows by more than 1 / 0.7.
    assert float(gap.exp().max()) < 1 / 0.7 + 1e-4


def test_an_answer_ends_at_the_limit_at_its_end_token_or_at_a_stop_string(
    embedded: LanguageModel,
) -> None:
    questions = sums(embedded, 16)
    sampler = NativeEngine(embedded)
    plain = Sampling(samples=4, max_tokens=20, seed=1)
    rollouts = [r for g in sampler.generate(questions, step=1, sampling=plain) for r in g]
    assert {r.finish for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert (rollout.finish == "stop") == (rollout.tokens[-1] in embedded.stop_ids)
        assert rollout.finish == "stop" or len(rollout.tokens) == 20
        assert not set(rollout.tokens[:-1]) & set(embedded.stop_ids)

    early = replace(plain, stop_strings=("=5", "</think>"))
    stopped = [r for g in sampler.generate(questions, step=1, sampling=early) for r in g]
    for before, after in zip(rollouts, stopped, strict=True):
        cuts = [before.text.find(s) + len(s) for s in early.stop_strings if s in before.text]
        expected = before.text[: min(cuts)] if cuts else before.text
        assert after.text == expected
        if cuts:
            assert after.finish == "stop"


def test_the_text_of_a_special_token_ends_an_answer_at_that_token() -> None:
    model = build("llama")
    assert model.tokenizer.convert_ids_to_tokens(0) == "<pad>"
    assert model.decode([0]) == ""
    questions, sampler = ragged_questions(8), NativeEngine(model)
    plain = Sampling(samples=16, max_tokens=60, seed=1)
    before = [r for g in sampler.generate(questions, step=1, sampling=plain) for r in g]
    early = replace(plain, stop_strings=("never", "<pad>"))
    after = [r for g in sampler.generate(questions, step=1, sampling=early) for r in g]
    cut = 0
    for whole, rollout in zip(before, after, strict=True):
        if 0 in whole.tokens:
            cut += 1
            assert rollout.tokens == whole.tokens[: whole.tokens.index(0) + 1]
            assert rollout.finish == "stop"
        else:
            assert rollout == whole
    assert 10 < cut < len(before) - 10


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_logits_that_are_not_numbers_are_an_error(temperature: float) -> None:
    model = build("llama")
    with torch.no_grad():
        model.head.linear.weight[17] = torch.nan
    sampling = Sampling(max_tokens=4, distribution=Distribution(temperature=temperature))
    with pytest.raises(ModelError, match=r"logits are not finite, from token 1 .* prompt q0"):
        NativeEngine(model).generate(ragged_questions(1), step=0, sampling=sampling)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_weights_that_were_no_numbers_leave_nothing_to_the_next_call(architecture: str) -> None:
    model = build(architecture)
    questions, sampler = ragged_questions(3), NativeEngine(model)
    sampling = Sampling(samples=2, max_tokens=6, slots=4)
    expected = sampler.generate(questions, step=0, sampling=sampling)
    weight = model.model.get_input_embeddings().weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        with pytest.raises(ModelError, match="not finite"):
            # The longest prompt in the slots that have the shortest afterwards.
            sampler.generate(questions[1:], step=0, sampling=sampling)
        weight.copy_(before)
    assert sampler.generate(questions, step=0, sampling=sampling) == expected


def test_trainer_and_sampler_share_their_weights() -> None:
    model = build("llama")
    sampler = NativeEngine(model)
    sampling = Sampling(max_tokens=8, distribution=GREEDY)
    before = sampler.generate(ragged_questions(3), step=0, sampling=sampling)
    with torch.no_grad():
        model.head.linear.weight.copy_(model.head.linear.weight.flip(0))
    after = sampler.generate(ragged_questions(3), step=0, sampling=sampling)
    assert [r.tokens for (r,) in before] != [r.tokens for (r,) in after]


def test_a_prompt_longer_than_the_context_is_named(embedded: LanguageModel) -> None:
    long = Question(
        prompt=Prompt(id="long", task="test", messages=(), target=""), tokens=(7,) * 500
    )
    with pytest.raises(DataError, match=r"long has 500 tokens.*548.*context is 512"):
        NativeEngine(embedded).generate([long], step=0, sampling=Sampling(max_tokens=48))
