"""Limits the length of prompts: refuses, leaves out or truncates prompts that are too long.

Prompt lengths are checked before a run begins. A task that generates its prompts on demand may have
millions of prompts. If a task generates its prompts on demand, only the prompts of the first steps
are checked, unless `rollout.long_prompts = "skip"`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from covey.config import Config
from covey.environments.registry import NONE
from covey.errors import ConfigError, DataError
from covey.rng import prompt_indices
from covey.types import Prompt

if TYPE_CHECKING:
    from covey.models.language_model import LanguageModel

MOST_DRAWN = 2048
"""Approximate number of prompts that are checked if a task generates its prompts on demand."""


def longest_prompt(config: Config, context: int) -> int:
    """Return the maximum prompt length in tokens that leaves room for a completion."""
    room = context - config.rollout.max_tokens
    if config.environment.name != NONE:
        room = min(room, config.environment.max_tokens - config.rollout.max_tokens)
    if room < 1:
        raise ConfigError(
            f"config: with rollout.max_tokens = {config.rollout.max_tokens}, no prompt fits "
            f"into the model's context of {context} tokens; lower rollout.max_tokens"
        )
    return min(room, config.rollout.max_prompt_tokens or room)


def with_prompt_limit(config: Config, model: LanguageModel) -> LanguageModel:
    """Return a model that truncates long prompts if `rollout.long_prompts = "truncate"`."""
    if config.rollout.long_prompts != "truncate":
        return model
    return replace(model, longest_prompt=longest_prompt(config, model.context))


def fitting_prompts(
    config: Config, model: LanguageModel, prompts: Sequence[Prompt], split: str
) -> tuple[Sequence[Prompt], list[str]]:
    """Apply the setting `rollout.long_prompts`; return the prompts to use and notes for the user.

    `split` is "training" or "held-out".
    """
    choice = config.rollout.long_prompts
    if config.environment.name != NONE and choice != "skip":
        return prompts, []  # an environment makes its own messages from a prompt later
    limit = longest_prompt(config, model.context)
    checked = _checked(config, prompts, everything=split == "held-out" or choice == "skip")
    long = _too_long(model, ((index, prompts[index]) for index in checked), limit)
    if not long:
        return prompts, []
    worst = max(long, key=lambda index: long[index])
    long_prompts = (
        f"{len(long)} of {len(checked)} {split} prompts have more than {limit} tokens; the "
        f"longest, {prompts[worst].id}, has {long[worst]}"
    )
    reason = limit_reason(config, model.context)
    if choice == "truncate":
        return prompts, [f"{long_prompts}: the first tokens of these prompts are cut off"]
    if choice == "error":
        raise DataError(
            f"task: some prompts are too long: {long_prompts} ({reason}); set rollout.long_prompts "
            "= 'skip' to leave out long prompts, or 'truncate' to cut off their first tokens"
        )
    kept = [prompts[index] for index in checked if index not in long]
    if not kept:
        raise DataError(f"task: all {split} prompts are too long: {long_prompts} ({reason})")
    return kept, [f"{long_prompts}: these prompts are left out"]


def limit_reason(config: Config, context: int) -> str:
    """Return a text with the settings that determine the maximum prompt length."""
    if config.rollout.max_prompt_tokens == longest_prompt(config, context):
        return f"rollout.max_prompt_tokens = {config.rollout.max_prompt_tokens}"
    return f"the model's context is {context} and rollout.max_tokens = {config.rollout.max_tokens}"


def _checked(config: Config, prompts: Sequence[Prompt], *, everything: bool) -> Sequence[int]:
    """Return the indices of the prompts to check."""
    size, count = len(prompts), config.rollout.prompts_per_step
    if everything or isinstance(prompts, list | tuple) or size <= max(count, MOST_DRAWN):
        return range(size)
    steps = range(min(config.train.steps, max(1, MOST_DRAWN // count)))
    drawn = (prompt_indices(seed=config.seed, step=s, count=count, size=size) for s in steps)
    return sorted({index for step in drawn for index in step})


def _too_long(
    model: LanguageModel, prompts: Iterable[tuple[int, Prompt]], limit: int
) -> dict[int, int]:
    """Return the lengths of prompts with more than `limit` tokens, keyed by prompt index.

    A prompt with at most `limit` bytes is not tokenized, because a token has at least one byte.
    """
    assert model.renderer is not None
    renderer, long = model.renderer, dict[int, int]()
    around: dict[tuple[str, ...], int] = {}
    for index, prompt in prompts:
        roles = tuple(m["role"] for m in prompt.messages)
        size = sum(len(m["content"].encode()) for m in prompt.messages)
        if roles in around and size + around[roles] <= limit:
            continue
        if roles not in around:
            text = renderer.text(prompt.messages)
            around[roles] = max(0, len(text.encode()) - size) + len(roles) + 1
        tokens = len(renderer.tokens(prompt.messages))
        if tokens > limit:
            long[index] = tokens
    return long
