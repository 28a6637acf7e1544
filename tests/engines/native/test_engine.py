from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from covey.collate import collate
from covey.engines.draw import Distribution
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Completion, Limits, Request, Sampling
from covey.errors import DataError, ModelError
from covey.models.language_model import LanguageModel
from covey.models.logp import batch_logp
from covey.rng import Address
from covey.rollout.episode import EncodedPrompt, encode_prompts, generate
from covey.tasks.arithmetic import Arithmetic
from covey.types import Group, Prompt, Rollout, Turn, VersionSpan
from tests.conftest import ARCHITECTURES, build, rollouts_of

GREEDY = Distribution(temperature=0.0)


def ragged_prompts(count: int) -> list[EncodedPrompt]:
    """Return prompts of different lengths in the bytes of the embedded tokenizer."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + (7 * i) % 13 for i in range(count)]
    return [
        EncodedPrompt(
            prompt=Prompt(id=f"q{i}", task="test", messages=(), target=""),
            tokens=tuple(torch.randint(6, 262, (n,), generator=generator).tolist()),
        )
        for i, n in enumerate(lengths)
    ]


def sums(model: LanguageModel, count: int) -> list[EncodedPrompt]:
    return encode_prompts(model, Arithmetic(min_operations=1, max_operations=4).train()[:count])


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("slots", [2, 64])
def test_greedy_equals_generate_token_for_token(architecture: str, slots: int) -> None:
    model = build(architecture)
    prompts = ragged_prompts(9)
    sampling = Sampling(max_tokens=24, distribution=GREEDY, max_concurrent=slots)
    ours = rollouts_of(NativeEngine(model), prompts, step=0, sampling=sampling)
    for prompt, (rollout,) in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt.tokens])
        theirs = model.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        assert list(rollout.tokens) == theirs[0, ids.shape[1] :].tolist()


def test_a_rollout_is_the_same_in_any_batch_and_slot_order(embedded: LanguageModel) -> None:
    prompts = sums(embedded, 12)
    engine = NativeEngine(embedded)

    def tokens(prompts: list[EncodedPrompt], slots: int) -> dict[tuple[str, int], tuple[int, ...]]:
        sampling = Sampling(group_size=5, max_tokens=40, max_concurrent=slots, seed=3)
        groups = rollouts_of(engine, prompts, step=7, sampling=sampling)
        return {(r.prompt_id, r.sample): r.tokens for group in groups for r in group}

    expected = tokens(prompts, 64)
    assert len(expected) == 60
    assert len(set(expected.values())) > 40
    for slots in (1, 3, 17):
        assert tokens(prompts, slots) == expected
    assert tokens(prompts[::-1], 16) == expected


@pytest.mark.parametrize("change", [{"seed": 4}, {"step": 8}], ids=["another seed", "another step"])
def test_another_address_gives_another_rollout(
    embedded: LanguageModel, change: dict[str, int]
) -> None:
    prompts = sums(embedded, 8)
    engine = NativeEngine(embedded)
    address = {"seed": 3, "step": 7}

    def texts(seed: int, step: int) -> list[str]:
        sampling = Sampling(group_size=4, max_tokens=40, seed=seed)
        return [
            r.text for g in rollouts_of(engine, prompts, step=step, sampling=sampling) for r in g
        ]

    assert texts(**address) == texts(**address)
    assert texts(**address) != texts(**{**address, **change})


def as_groups(prompts: list[EncodedPrompt], rollouts: list[list[Rollout]]) -> list[Group]:
    return [
        Group(prompt=q.prompt, rollouts=tuple(replace(r, reward=0.0) for r in rs))
        for q, rs in zip(prompts, rollouts, strict=True)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_logp_is_the_policys_logp(embedded: LanguageModel, temperature: float) -> None:
    prompts = sums(embedded, 16)
    sampling = Sampling(
        group_size=8,
        max_tokens=48,
        max_concurrent=50,
        distribution=Distribution(temperature=temperature),
    )
    rollouts = rollouts_of(NativeEngine(embedded), prompts, step=1, sampling=sampling)
    batch = collate(as_groups(prompts, rollouts))
    with torch.no_grad():
        logp = batch_logp(embedded, batch, temperature=temperature).logp
    assert batch.mask.sum() > 2000
    # A low temperature magnifies the rounding of the logits.
    gap = float((logp - batch.sampler_logp)[batch.mask].abs().max())
    assert gap < 1e-5 / temperature


def test_sampler_logp_is_of_the_truncated_distribution(embedded: LanguageModel) -> None:
    prompts = sums(embedded, 8)
    sampling = Sampling(group_size=8, max_tokens=48, distribution=Distribution(top_p=0.7))
    rollouts = rollouts_of(NativeEngine(embedded), prompts, step=1, sampling=sampling)
    batch = collate(as_groups(prompts, rollouts))
    with torch.no_grad():
        logp = batch_logp(embedded, batch).logp
    gap = (batch.sampler_logp - logp)[batch.mask]
    assert (gap > -1e-5).all()
    assert float(gap.max()) > 0.1
    # What is kept has at least mass 0.7, so no probability grows by more than 1 / 0.7.
    assert float(gap.exp().max()) < 1 / 0.7 + 1e-4


def test_a_completion_ends_at_the_limit_at_its_end_token_or_at_a_stop_string(
    embedded: LanguageModel,
) -> None:
    prompts = sums(embedded, 16)
    engine = NativeEngine(embedded)
    plain = Sampling(group_size=4, max_tokens=20, seed=1)
    rollouts = [r for g in rollouts_of(engine, prompts, step=1, sampling=plain) for r in g]
    assert {r.finish for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert (rollout.finish == "stop") == (rollout.tokens[-1] in embedded.stop_ids)
        assert rollout.finish == "stop" or len(rollout.tokens) == 20
        assert not set(rollout.tokens[:-1]) & set(embedded.stop_ids)

    early = replace(plain, stop_strings=("=5", "</think>"))
    stopped = [r for g in rollouts_of(engine, prompts, step=1, sampling=early) for r in g]
    for before, after in zip(rollouts, stopped, strict=True):
        cuts = [before.text.find(s) + len(s) for s in early.stop_strings if s in before.text]
        expected = before.text[: min(cuts)] if cuts else before.text
        assert after.text == expected
        if cuts:
            assert after.finish == "stop"


def test_the_text_of_a_special_token_ends_a_completion_at_that_token() -> None:
    model = build("llama")
    assert model.tokenizer.convert_ids_to_tokens(0) == "<pad>"
    assert model.decode([0]) == ""
    prompts, engine = ragged_prompts(8), NativeEngine(model)
    plain = Sampling(group_size=16, max_tokens=60, seed=1)
    before = [r for g in rollouts_of(engine, prompts, step=1, sampling=plain) for r in g]
    early = replace(plain, stop_strings=("never", "<pad>"))
    after = [r for g in rollouts_of(engine, prompts, step=1, sampling=early) for r in g]
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
def test_logits_that_are_not_finite_are_an_error(temperature: float) -> None:
    model = build("llama")
    with torch.no_grad():
        model.head.linear.weight[17] = torch.nan
    sampling = Sampling(max_tokens=4, distribution=Distribution(temperature=temperature))
    with pytest.raises(ModelError, match=r"token 1 .* prompt q0"):
        rollouts_of(NativeEngine(model), ragged_prompts(1), step=0, sampling=sampling)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_weights_that_were_not_finite_leave_nothing_to_the_next_run(architecture: str) -> None:
    model = build(architecture)
    prompts, engine = ragged_prompts(3), NativeEngine(model)
    sampling = Sampling(group_size=2, max_tokens=6, max_concurrent=4)
    expected = rollouts_of(engine, prompts, step=0, sampling=sampling)
    weight = model.model.get_input_embeddings().weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        with pytest.raises(ModelError, match="not finite"):
            # The longest prompt in the slots that have the shortest afterwards.
            rollouts_of(engine, prompts[1:], step=0, sampling=sampling)
        weight.copy_(before)
    assert rollouts_of(engine, prompts, step=0, sampling=sampling) == expected


def test_trainer_and_engine_share_their_weights() -> None:
    model = build("llama")
    engine = NativeEngine(model)
    sampling = Sampling(max_tokens=8, distribution=GREEDY)
    before = rollouts_of(engine, ragged_prompts(3), step=0, sampling=sampling)
    with torch.no_grad():
        model.head.linear.weight.copy_(model.head.linear.weight.flip(0))
    after = rollouts_of(engine, ragged_prompts(3), step=0, sampling=sampling)
    assert [r.tokens for (r,) in before] != [r.tokens for (r,) in after]


def test_a_run_is_in_evaluation_mode_and_restores_every_module() -> None:
    model = build("llama")
    engine = NativeEngine(model)
    model.model.train()
    seen: list[bool] = []
    generate(
        ragged_prompts(1), engine=engine, model=model, sampling=Sampling(max_tokens=2), step=0,
        finished=lambda *_: seen.extend(module.training for module in model.model.modules()),
    )  # fmt: skip
    assert seen
    assert not any(seen)
    assert all(module.training for module in model.model.modules())


def test_a_prompt_longer_than_the_context_is_named(embedded: LanguageModel) -> None:
    long = EncodedPrompt(
        prompt=Prompt(id="long", task="test", messages=(), target=""), tokens=(7,) * 500
    )
    with pytest.raises(DataError, match=r"500 tokens.*max_tokens = 48.*512"):
        rollouts_of(NativeEngine(embedded), [long], step=0, sampling=Sampling(max_tokens=48))


def test_the_engine_declares_what_it_is(embedded: LanguageModel) -> None:
    info = NativeEngine(embedded).info
    assert (info.exact_logp, info.shares_weights) == (True, True)
    assert info.backend
    half = build("llama")
    half.model.to(torch.bfloat16)
    assert not NativeEngine(half).info.exact_logp


def test_completions_carry_the_version_of_the_weights(embedded: LanguageModel) -> None:
    engine, sampling = NativeEngine(embedded), Sampling(max_tokens=8)
    engine.load_weights(embedded.model.named_parameters, 5)
    ((rollout,),) = rollouts_of(engine, sums(embedded, 1), step=0, sampling=sampling)
    size = len(rollout.tokens)
    assert rollout.segments[0].versions == (VersionSpan(0, size, 5),)
    assert rollout.turns == (Turn(role="assistant", start=0, stop=size),)
    assert rollout.policy_version == 5


class Chained:
    """A source that hands out a second turn when the first has ended."""

    def __init__(self, prompts: list[EncodedPrompt], sampling: Sampling) -> None:
        self.limits = Limits(sampling=sampling, requests=len(prompts), prompts=2 * len(prompts),
                             prompt_tokens=64)  # fmt: skip
        self.ready = [self._request(n, 0, p.tokens) for n, p in enumerate(prompts)]
        self.found: dict[tuple[str, int], Completion] = {}

    def _request(self, number: int, turn: int, tokens: tuple[int, ...]) -> Request:
        address = Address(0, 0, str(number % 100), 0, turn)
        return Request(number=number, prompt=number, tokens=tokens, address=address)

    def take(self) -> list[Request]:
        ready, self.ready = self.ready, []
        return ready

    def done(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            request = completion.request
            self.found[request.address.prompt, request.address.turn] = completion
            if request.address.turn == 0:
                tokens = (*request.tokens, *completion.tokens)
                self.ready.append(self._request(request.number + 100, 1, tokens))


@pytest.mark.parametrize("max_concurrent", [1, 3, 64])
def test_a_source_may_hand_out_requests_while_the_engine_runs(max_concurrent: int) -> None:
    model = build("llama")
    prompts = ragged_prompts(5)
    sampling = Sampling(max_tokens=6, max_concurrent=max_concurrent)
    source = Chained(prompts, sampling)
    NativeEngine(model).run(source)
    assert len(source.found) == 10
    for number in range(5):
        second = source.found[str(number), 1].request
        alone = Chained([], replace(sampling, max_concurrent=1))
        alone.limits = replace(alone.limits, requests=1, prompts=1)
        alone.ready = [second]
        NativeEngine(model).run(alone)
        assert alone.found[str(number), 1].tokens == source.found[str(number), 1].tokens
