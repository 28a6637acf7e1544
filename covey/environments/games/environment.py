"""The `games` environment: games in partly visible worlds, with one action per turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

from covey.environments.environment import Start, Step
from covey.environments.games.guess_number import GuessNumber
from covey.environments.games.maze import Maze
from covey.environments.games.sokoban import Sokoban
from covey.environments.tools import Tool, ToolEnvironment, tools_of
from covey.errors import ConfigError
from covey.types import Message, Prompt


class Game(Protocol):
    """One game in progress; its public methods are the tools of the policy."""

    SIZES: ClassVar[tuple[int, int, int]]
    """The smallest, the default and the largest size of the game."""
    rules: str
    most_actions: int
    """Maximum number of actions; a good player needs fewer actions."""

    def __init__(self, random: Random, size: int) -> None: ...

    @property
    def view(self) -> str:
        """The text that the policy sees at the start."""

    @property
    def state(self) -> Any:
        """JSON-compatible data that identifies the current state of the game."""

    @property
    def won(self) -> bool:
        """Whether the game is won."""


GAMES: Mapping[str, type[Game]] = MappingProxyType(
    {"guess_number": GuessNumber, "maze": Maze, "sokoban": Sokoban}
)


class Games(ToolEnvironment):
    """Plays one game per episode; `info["world"]` or the seed determines the game.

    The reward is 1 for a game that is won, and 0 otherwise. Only the first tool call of a turn has
    an effect, so the policy can win a game in one turn only by luck. The episode ends when the
    policy wins, after `actions` actions, or after a message without a tool call. With `actions` =
    0, the game's own limit on actions applies.
    """

    quick: ClassVar[bool] = True

    def __init__(
        self,
        *,
        game: Literal["guess_number", "maze", "sokoban"] = "guess_number",
        size: int = 0,
        actions: int = 0,
    ) -> None:
        least, usual, most = GAMES[game].SIZES
        if size and not least <= size <= most:
            raise ConfigError(
                f"environment: size = {size} must be from {least} to {most} for {game}"
            )
        if actions < 0:
            raise ConfigError(f"environment: actions = {actions} must not be negative")
        self._make = GAMES[game]
        self._size, self._actions = size or usual, actions
        self._game = self._make(Random(0), self._size)  # the tools are known before the game starts
        self._taken = 0

    @property
    def _most(self) -> int:
        return self._actions or self._game.most_actions

    def tools(self) -> dict[str, Tool]:
        """Return the actions of the game as tools."""
        return tools_of(self._game)

    def reset(self, prompt: Prompt, seed: int) -> Start:
        """Start the episode: make the world; show the rules and the visible part of the world."""
        self._game = self._make(Random(str(prompt.info.get("world", seed))), self._size)
        *before, last = prompt.messages
        limit = f"You have {self._most} actions, one in each turn."
        content = "\n\n".join([last["content"], self._game.rules, limit, self._game.view])
        start = super().reset(prompt, seed)
        messages = [*before, {**last, "content": content}]
        return replace(start, messages=messages, state=self._game.state)

    async def step(self, message: Message) -> Step:
        """Run the first action of a message, and reject its other actions."""
        calls = list(message.get("tool_calls", ()))
        first = await super().step({**message, "tool_calls": calls[:1]})
        self._taken += len(calls[:1])
        refusal = {"role": "tool", "content": "error: one action per turn"}
        refused = [{**refusal, "name": call["function"]["name"]} for call in calls[1:]]
        over = self._game.won or self._taken >= self._most
        return Step(
            messages=[*first.messages, *refused],
            done=first.done or over,
            state=self._game.state,
        )

    def reward(self) -> dict[str, float]:
        """Return a reward of 1 if the game is won, and 0 otherwise."""
        return {"won": float(self._game.won)}
