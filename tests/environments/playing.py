"""Playing episodes of the test environments with a small random policy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import Sampling
from covey.environments.calls import CALL_FORMATS
from covey.environments.host import make_host
from covey.models.language_model import LanguageModel
from covey.rollout.episode import Interaction, encode_prompts, generate
from covey.types import Group, Prompt, Rollout


def prompts(count: int) -> list[Prompt]:
    """Return prompts, of which number 3 is the bad one."""
    return [
        Prompt(
            id=f"p{n}",
            task="t",
            target="",
            messages=({"role": "user", "content": f"hi {n}"},),
            info={"bad": n == 3},
        )
        for n in range(count)
    ]


def play(
    model: LanguageModel,
    kind: Callable[..., Any],
    *,
    count: int = 6,
    group_size: int = 2,
    timeout: float = 1.5,
    turn_tokens: int = 40,
    **limits: Any,
) -> list[Group]:
    """Return the groups of some prompts."""
    settings = {"max_turns": 8, "max_calls": 8, "max_tokens": 1024, **limits}
    with closing(make_host("test", kind, workers=2, timeout=timeout)) as host:
        interaction = Interaction(host=host, call_format=CALL_FORMATS["hermes"], **settings)
        return generate(
            encode_prompts(model, prompts(count), interaction),
            engine=NativeEngine(model),
            model=model,
            sampling=Sampling(group_size=group_size, max_tokens=turn_tokens, max_concurrent=64),
            step=1,
            interaction=interaction,
        )


def rollouts_of(groups: list[Group]) -> list[Rollout]:
    """Return all rollouts, in order."""
    return [rollout for group in groups for rollout in group.rollouts]
