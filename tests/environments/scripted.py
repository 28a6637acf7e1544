"""Policies that follow a script: in one episode by hand, or in whole rollouts through an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from covey.engines.protocol import Completion, EngineInfo, Request, RequestSource, Sampling
from covey.environments import call
from covey.environments.calls import CALL_FORMATS, assistant_message
from covey.environments.host import Driver, Reply, make_host
from covey.environments.registry import make_factory
from covey.models.language_model import LanguageModel
from covey.models.load_model import wrap
from covey.rewards.environment import EnvironmentReward
from covey.rollout.collect import Collected, Collector
from covey.rollout.episode import Interaction, encode_prompts
from covey.scoring import make_scorer
from covey.types import Message, Prompt, VersionSpan
from tests.environments.chat_templates import FAMILIES, tokenizer_of

Policy = Callable[[str, int], str]
"""From all that it has read, and the number of its turn, to what it writes."""


def message(text: str) -> Message:
    """Return a message of the policy."""
    return assistant_message(text, CALL_FORMATS["hermes"], {})


class Hand:
    """One episode of a shipped environment, played by hand."""

    def __init__(self, name: str, prompt: Prompt, seed: int = 0, **options: Any) -> None:
        self.driver = Driver(make_factory(name, options))
        self.first = self.driver.start(prompt, seed)
        assert not self.first.error, self.first.error
        self.last = self.first

    def say(self, text: str) -> Reply:
        """Take a turn."""
        self.last = self.driver.step(message(text))
        assert not self.last.error, self.last.error
        return self.last

    def use(self, name: str, **arguments: Any) -> str:
        """Take a turn with one call, and return what the tool answers."""
        return self.say(call(name, **arguments)).messages[0]["content"]

    def outcome(self) -> dict[str, float]:
        """Return the parts of the reward."""
        reply = self.last if self.last.done else self.driver.end()
        assert reply.outcome is not None, reply.error
        return dict(reply.outcome)


@cache
def reader() -> LanguageModel:
    """Return a model with a chat template and room for long conversations; it never runs."""
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=8, max_position_embeddings=16384,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    return wrap(LlamaForCausalLM(config), tokenizer, name="reader")


@dataclass
class ScriptedEngine:
    """An engine whose completions a script writes."""

    policy: Policy
    preemptions: int = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(backend="script", exact_logp=True, shares_weights=True)

    def run(self, requests: RequestSource) -> None:
        while taken := requests.take():
            requests.done([self._completion(request) for request in taken])

    def _completion(self, request: Request) -> Completion:
        model = reader()
        text = self.policy(model.tokenizer.decode(request.tokens), request.address.turn)
        tokens = model.tokenizer.encode(text, add_special_tokens=False)
        tokens = (*tokens, model.tokenizer.eos_token_id)
        return Completion(
            request=request,
            tokens=tokens,
            logp=(-1.0,) * len(tokens),
            finish="stop",
            versions=(VersionSpan(0, len(tokens), 0),),
        )

    def load_weights(self, weights: Any, version: int) -> None: ...
    def close(self) -> None: ...


def rollouts(
    name: str, prompts: Sequence[Prompt], policy: Policy, *, success_at: float = 1.0,
    max_turns: int = 8, **options: Any,
) -> Collected:  # fmt: skip
    """Return scored rollouts: the real host, chat template, calls, masks and reward."""
    factory = make_factory(name, options)
    with closing(make_host(name, factory, workers=1, timeout=60.0)) as host:
        interaction = Interaction(
            host=host, call_format=CALL_FORMATS["hermes"], max_turns=max_turns, max_calls=32,
            max_tokens=16384,
        )  # fmt: skip
        reward = EnvironmentReward(success_at=success_at)
        collector = Collector(
            engine=ScriptedEngine(policy), model=reader(), scorer=make_scorer("environment", reward),
            interaction=interaction,
        )  # fmt: skip
        sampling = Sampling(max_tokens=2048)
        encoded = encode_prompts(reader(), prompts, interaction)
        return collector.collect(encoded, sampling=sampling, step=1)


def trained_text(rollout: Any) -> str:
    """Return what is trained of a rollout, as text."""
    kept = [t for t, own in zip(rollout.tokens, rollout.trained, strict=True) if own]
    return reader().tokenizer.decode(kept)
