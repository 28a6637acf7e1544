"""The episode of a multi-turn rollout: what rewards may read beside its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Finish = Literal["stop", "length", "turn_limit", "tool_limit", "token_limit", "error"]
"""Why a rollout ended: by itself; a completion reached its limit of tokens; the episode reached its
limit of turns, of tool calls or of tokens; the environment failed."""
TRUNCATED: frozenset[Finish] = frozenset({"length", "token_limit"})
"""Cut off for being too long."""
Message = Mapping[str, Any]
"""`role` and `content`; an assistant's message may have `tool_calls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A conversation between the policy and an environment. The rollout package fills it."""

    messages: tuple[Message, ...]
    """The whole conversation, from the prompt on."""
    turn_rewards: tuple[float | None, ...]
    """Of each turn of the policy."""
    outcome: Mapping[str, float] | None
    """What the environment's own `reward` returned, part by part. None: it has none."""
    finish: Finish
    error: str = ""
    """What went wrong in the environment."""

    @property
    def tool_calls(self) -> list[Mapping[str, object]]:
        """The calls of tools, in order."""
        return [call for message in self.messages for call in message.get("tool_calls", ())]

    @property
    def reply(self) -> tuple[Message, ...]:
        """The messages from the policy's first turn on."""
        roles = [message["role"] for message in self.messages]
        return self.messages[roles.index("assistant") :] if "assistant" in roles else ()


class EpisodeText(str):
    """The text of a multi-turn rollout, its last turn, which carries the episode to rewards.

    So a reward that reads text works unchanged, and one that wants more asks `episode_of(text)`.
    """

    episode: Episode

    @staticmethod
    def of(text: str, episode: Episode) -> EpisodeText:
        """Return a text with its episode."""
        whole = EpisodeText(text)
        whole.episode = episode
        return whole


def episode_of(text: str) -> Episode | None:
    """Return the episode of a rollout's text. None: it had a single turn, without environment."""
    return getattr(text, "episode", None)
