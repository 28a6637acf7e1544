"""End of sequence: where a completion ends, and that its last token is trained."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
import transformers

from covey.collate import collate
from covey.embedded import CHECKPOINT
from covey.engines.draw import Distribution
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.models.language_model import LanguageModel
from covey.models.load_model import wrap
from covey.models.logp import batch_logp
from covey.rollout.episode import EncodedPrompt
from covey.types import Group, Prompt, Rollout
from tests.conftest import ARCHITECTURES, build, rollouts_of

END = 1
PROMPT = Prompt(id="p", task="t", target="", messages=({"role": "user", "content": "?"},))


def answered(tokens: list[int], prompt: list[int]) -> Rollout:
    return Rollout.single_turn(
        prompt_id="p", sample=0, prompt_tokens=tuple(prompt), tokens=tuple(tokens),
        trained=(True,) * len(tokens), sampler_logp=(-1.0,) * len(tokens), text="", finish="stop",
        policy_version=0, reward=1.0, success=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def same_pad() -> LanguageModel:
    """A model that uses EOS as its padding token, as many do."""
    model = build("llama")
    model.tokenizer.pad_token = model.tokenizer.eos_token
    model.model.config.pad_token_id = model.model.generation_config.pad_token_id = END
    return wrap(model.model, model.tokenizer)


@pytest.mark.parametrize("packs", [True, False])
def test_eos_is_trained_even_if_it_is_the_padding_token(
    same_pad: LanguageModel, packs: bool
) -> None:
    assert same_pad.tokenizer.pad_token_id == END
    # EOS, padding and zeros also occur inside a completion and at the start of a prompt.
    answers = [([9, 8, END], [7, 9]), ([END], [END, END, 5]), ([6, END, 0, 5, END], [4])]
    rollouts = tuple(answered(tokens, prompt) for tokens, prompt in answers)
    batch = collate([Group(prompt=PROMPT, rollouts=rollouts)])
    assert batch.mask.sum(dim=1).tolist() == [3, 1, 5]
    found = batch_logp(replace(same_pad, packs=packs), batch).logp
    for row, (tokens, prompt) in enumerate(answers):
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            whole = same_pad.model(ids).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        expected = whole[places, torch.tensor(tokens)]
        torch.testing.assert_close(found[row, : len(tokens)], expected, atol=1e-4, rtol=1e-4)
        assert expected[-1] < -1e-3  # so that a masked EOS, which gives 0, would be seen


def test_eos_has_a_gradient_and_padding_none(same_pad: LanguageModel) -> None:
    batch = collate([Group(prompt=PROMPT, rollouts=(answered([9, END], [7, 9]),))])
    same_pad.model.zero_grad()
    batch_logp(same_pad, batch).logp[0, 1].backward()
    assert float(same_pad.head.linear.weight.grad.abs().sum()) > 1e-3
    same_pad.model.zero_grad()


def test_all_stop_tokens_of_a_model_end_completions() -> None:
    torch.manual_seed(0)
    model = ARCHITECTURES["llama"]()
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    model.config.eos_token_id = 40
    model.generation_config.eos_token_id = [50, 40, 60]
    tokenizer.chat_template = "{{ messages[-1]['content'] }}<pad>"
    wrapped = wrap(model.eval(), tokenizer)
    # From the tokenizer, the configuration, the generation configuration and the chat template.
    assert wrapped.stop_ids == (0, 1, 40, 50, 60)
    question = EncodedPrompt(prompt=PROMPT, tokens=(7, 8, 9))
    sampling = Sampling(max_tokens=200, group_size=32)
    (rollouts,) = rollouts_of(NativeEngine(wrapped), [question], step=0, sampling=sampling)
    stopped = [r for r in rollouts if r.finish == "stop"]
    assert {r.tokens[-1] for r in stopped} == set(wrapped.stop_ids)
    for rollout in stopped:
        assert not set(rollout.tokens[:-1]) & set(wrapped.stop_ids)
        assert rollout.trained[-1]


def test_the_tokenizers_padding_side_does_not_matter(embedded: LanguageModel) -> None:
    messages = ({"role": "user", "content": "47+8?"},)
    results = []
    for side in ("left", "right"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT, padding_side=side)
        model = replace(
            embedded, tokenizer=tokenizer, renderer=replace(embedded.renderer, tokenizer=tokenizer)
        )
        questions = [
            EncodedPrompt(prompt=replace(PROMPT, id=str(n)), tokens=model.encode(messages)[n:])
            for n in range(3)
        ]
        sampling = Sampling(max_tokens=12, distribution=Distribution(temperature=1.0))
        results.append(rollouts_of(NativeEngine(model), questions, step=0, sampling=sampling))
    assert results[0] == results[1]


def test_an_attention_soft_cap_is_applied() -> None:
    torch.manual_seed(0)
    model = ARCHITECTURES["gemma2"]().eval()
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 2.0
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            part.weight.data *= 20.0
    ids = torch.arange(6, 30)[None]
    with torch.no_grad():
        expected = model(ids).logits
        with contextlib.suppress(ValueError):  # transformers 5.23 refuses; before, it drops the cap
            model.set_attn_implementation("sdpa")
            assert float((model(ids).logits - expected).abs().max()) > 0.1
        wrapped = wrap(model, transformers.AutoTokenizer.from_pretrained(CHECKPOINT))
        assert wrapped.packs
        torch.testing.assert_close(wrapped.model(ids).logits, expected, atol=2e-5, rtol=0)
