"""Random conversations with a random policy: what is trained is what the engine read and sampled.

python -m tests.environments.exactness 200       all families, 200 conversations each
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from covey.collate import collate
from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Completion, Limits, Request, RequestSource, Sampling
from covey.environments import InlineHost, Step
from covey.environments.calls import CALL_FORMATS
from covey.models.chat import Template
from covey.models.language_model import LanguageModel
from covey.models.load_model import wrap
from covey.objective import build, with_advantage, with_weight
from covey.rollout.episode import Interaction, encode_prompts, generate
from covey.types import Group, Message, Prompt, Rollout
from tests.environments.chat_templates import FAMILIES, Family, tokenizer_of

SIZE, CONTEXT, TURN = 32, 4096, 48
ODD = (
    "", " ", "\n", "  x \n\n", "\t\r\n y", "caf\u00e9 \u6f22\u5b57 \U0001f600\u200d\U0001f525", "e\u0301\u202e", "0", "{}",
    '{"name": "f", "arguments": {}}', "</tool_response>", "<think>", "</think>\n\n", "\u2581 \u2581",
    "<|im_end|>\n<|im_start|>assistant\n", "<|eot_id|><|start_header_id|>", "<end_of_turn>", "<eos>",
)  # fmt: skip


class Odd:
    """Answers every turn with odd texts of tools or of the user; ends by itself after a while."""

    quick = True

    def __init__(self, tools: bool = True) -> None:
        self.tools = tools

    def reset(self, prompt: Prompt, seed: int) -> Any:
        self.random = random.Random(seed)
        self.left = self.random.randint(1, 4)
        schema = {"name": "f", "description": "", "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": schema}] if self.random.random() < 0.7 else []
        return prompt.messages, tools

    def step(self, message: Message) -> Step:
        self.left -= 1
        texts = ["".join(self.random.choices(ODD, k=self.random.randint(1, 3)))]
        if self.random.random() < 0.3:
            texts.append(self.random.choice(ODD))
        role = "user" if self.random.random() < 0.2 else "tool"
        messages = [{"role": role, "content": t} for t in (texts[:1] if role == "user" else texts)]
        return Step(messages=messages, reward=0.5, done=self.left < 0)


def policy(family: Family) -> LanguageModel:
    """Return a small random model that ends its turn with a probability of about a tenth."""
    torch.manual_seed(0)
    tokenizer = tokenizer_of(family)
    end = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=SIZE, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=64, max_position_embeddings=CONTEXT,
        tie_word_embeddings=False, eos_token_id=end, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        common = torch.nn.functional.normalize(torch.randn(SIZE), dim=0)
        model.model.embed_tokens.weight.normal_(0, 0.3).add_(common)
        model.lm_head.weight.normal_(0, 0.3)
        model.lm_head.weight[end] += 1.7 * common
        for text in family.added:  # such as </think>, which makes a template rewrite history
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(text)] += 0.7 * common
    return wrap(model, tokenizer, name="tiny", template=Template(chat_options=family.options))


@dataclass
class Spy:
    """An engine that remembers what it read and sampled."""

    engine: NativeEngine
    turns: dict[tuple[str, int, int], tuple[tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=dict
    )

    def run(self, requests: RequestSource) -> None:
        self.engine.run(_Watched(requests, self.turns))


@dataclass
class _Watched:
    source: RequestSource
    turns: dict[Any, Any]

    @property
    def limits(self) -> Limits:
        return self.source.limits

    def take(self) -> Sequence[Request]:
        return self.source.take()

    def done(self, completions: Sequence[Completion]) -> None:
        for one in completions:
            _, _, prompt, sample, turn = one.request.address
            self.turns[prompt, sample, turn] = one.request.tokens, one.tokens
        self.source.done(completions)


def conversations(model: LanguageModel, count: int, seed: int = 0) -> tuple[list[Group], Spy]:
    """Return the groups of `count` prompts, two rollouts each, and what the engine saw."""
    pick = random.Random(seed)
    prompts = [
        Prompt(id=f"{seed}/{n}", task="odd", target="", messages=_messages(pick))
        for n in range(count)
    ]
    interaction = Interaction(
        host=InlineHost(Odd), call_format=CALL_FORMATS["hermes"], max_turns=5, max_calls=16,
        max_tokens=CONTEXT,
    )  # fmt: skip
    spy = Spy(NativeEngine(model))
    groups = generate(
        encode_prompts(model, prompts, interaction),
        engine=spy,  # type: ignore[arg-type]
        model=model,
        sampling=Sampling(group_size=2, max_tokens=TURN, max_concurrent=16),
        step=1,
        interaction=interaction,
    )
    return groups, spy


def _messages(pick: random.Random) -> tuple[Message, ...]:
    user = {"role": "user", "content": "".join(pick.choices(ODD, k=2)) + "?"}
    system = {"role": "system", "content": pick.choice(ODD) + "."}
    return (system, user) if pick.random() < 0.3 else (user,)


@torch.no_grad()
def check(model: LanguageModel, groups: Sequence[Group], spy: Spy) -> dict[str, float]:
    """Compare rollouts with what the engine saw, and with a fresh forward pass."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    worst = max(_gap(model, rollout) for rollout in rollouts)
    turns = sum(_same_tokens(rollout, spy) for rollout in rollouts)
    assert turns == len(spy.turns)
    objective = build("grpo", beta=0.0)
    scored = [_rewarded(group) for group in groups]
    batch = with_weight(objective, with_advantage(objective, collate(scored)))
    assert batch.weight is not None
    assert batch.advantage is not None
    assert int(batch.mask.sum()) == sum(len(tokens) for _, tokens in spy.turns.values())
    for numbers in (batch.weight, batch.advantage, batch.sampler_logp):
        assert not numbers[~batch.mask].any()
    assert bool((batch.weight[batch.mask] > 0).all())
    segments = sum(len(rollout.segments) for rollout in rollouts)
    return {"rollouts": len(rollouts), "turns": turns, "segments": segments, "logp": worst}


def _rewarded(group: Group) -> Group:
    rewarded = [replace(r, reward=float(r.sample), success=False) for r in group.rollouts]
    return replace(group, rollouts=tuple(rewarded))


def _same_tokens(rollout: Rollout, spy: Spy) -> int:
    """Check every turn against what the engine read and sampled; return how many there are."""
    mine = [turn for turn in rollout.turns if turn.role == "assistant"]
    for number, turn in enumerate(mine):
        read, sampled = spy.turns[rollout.prompt_id, rollout.sample, number]
        segment = rollout.segments[turn.segment]
        assert segment.prompt_tokens + segment.tokens[: turn.start] == read
        assert segment.tokens[turn.start : turn.stop] == sampled
        assert all(segment.trained[turn.start : turn.stop])
    assert rollout.sampled == sum(turn.stop - turn.start for turn in mine)
    return len(mine)


def _gap(model: LanguageModel, rollout: Rollout) -> float:
    """Return the largest difference to the log-probabilities of a fresh forward pass."""
    worst = 0.0
    for segment in rollout.segments:
        before = len(segment.prompt_tokens)
        ids = torch.tensor([segment.prompt_tokens + segment.tokens])
        logp = torch.log_softmax(model.model(ids).logits[0].float(), dim=-1)
        at = torch.arange(len(segment.tokens))
        fresh = logp[before - 1 + at, torch.tensor(segment.tokens, dtype=torch.long)]
        trained = torch.tensor(segment.trained, dtype=torch.bool)
        gaps = (fresh - torch.tensor(segment.sampler_logp)).abs()[trained]
        worst = max(worst, float(gaps.max()) if len(gaps) else 0.0)
    return worst


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    for name, family in FAMILIES.items():
        started, model = time.perf_counter(), policy(family)
        found = check(model, *conversations(model, count // 2))
        print(name, found, f"{time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
