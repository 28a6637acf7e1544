"""The `games` environment: games with a hidden state, in which the policy takes one action a turn.

A game is a plain class, whose constructor takes a random number generator and a size. The public
methods of the class are the policy's tools. To add a game, write its class and add it to GAMES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

from covey.environments.environment import Start, Step, appended
from covey.environments.tool_environment import Tool, ToolEnvironment, tools_of
from covey.errors import ConfigError
from covey.tasks.task import GeneratedTask, chat_messages
from covey.types import Message, Prompt

# The `worlds` task: seeds from which environments such as `games` generate their worlds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Worlds(GeneratedTask):
    """Prompts with equal text, each with a seed for the environment in `info["world"]`.

    No held-out world is used for training. The environment adds its rules to the prompt's text.
    """

    text: str = "Let us play a game. Use the tools to act."
    system: str = ""
    name: str = "worlds"

    def _prompt(self, split: str, index: int) -> Prompt:
        return Prompt(
            id=f"{self.name}/{split}/{index}",
            task=self.name,
            messages=chat_messages(self.text, self.system),
            target="",
            info={"world": f"{split}/{index}"},
        )


Direction = Literal["north", "east", "south", "west"]
Place = tuple[int, int]
MOVES: dict[str, Place] = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
OPPOSITE = {"north": "south", "east": "west", "south": "north", "west": "east"}
SIGHT = 2
"""The number of squares that the player sees in each direction."""
PULLS = 40
"""The number of random backward moves that turn a solved Sokoban board into the start board."""
_SIGNS = {
    (False, False, False): ".", (False, False, True): "o", (False, True, False): "b",
    (False, True, True): "*", (True, False, False): "p", (True, False, True): "P",
}  # fmt: skip
"""Maps the content of a square to the character that shows it. Each key consists of three bools,
which say whether the square contains the player, a box and a goal."""


class Game(Protocol):
    """One game in progress; its public methods are the tools of the policy."""

    SIZES: ClassVar[tuple[int, int, int]]
    """The smallest, the default and the largest size of the game."""
    rules: str
    most_actions: int
    """The maximum number of actions, which is more than a good player needs."""

    def __init__(self, random: Random, size: int) -> None: ...

    @property
    def view(self) -> str:
        """The text that the policy sees at the start."""

    @property
    def state(self) -> Any:
        """JSON-compatible data that identifies the current state of the game."""

    @property
    def won(self) -> bool:
        """Whether the player has won the game."""


class GuessNumber:
    """The game: guess a number from 1 to `size`, with enough guesses for a binary search."""

    SIZES: ClassVar[tuple[int, int, int]] = (2, 100, 10**9)

    def __init__(self, random: Random, size: int) -> None:
        self._number = random.randint(1, size)
        self._low, self._high = 1, size
        self._guess = 0
        self.rules = f"Guess a whole number from 1 to {size}. I say whether it is higher or lower."
        self.most_actions = size.bit_length()
        self.view = "What is your first guess?"

    @property
    def state(self) -> Any:
        """The range of numbers that earlier guesses have not excluded."""
        return [self._low, self._high, self.won]

    @property
    def won(self) -> bool:
        return self._guess == self._number

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        self._guess = number
        if number == self._number:
            return "correct"
        if number < self._number:
            self._low = max(self._low, number + 1)
            return "higher"
        self._high = min(self._high, number - 1)
        return "lower"


def neighbour(place: Place, direction: str) -> Place:
    down, right = MOVES[direction]
    return place[0] + down, place[1] + right


def carve(random: Random, size: int) -> dict[Place, set[str]]:
    """Make a maze with exactly one path between any two rooms, and return each room's exits."""
    exits: dict[Place, set[str]] = {(r, c): set() for r in range(size) for c in range(size)}
    path, seen = [(0, 0)], {(0, 0)}
    while path:
        here = path[-1]
        ways = [d for d in MOVES if (there := neighbour(here, d)) in exits and there not in seen]
        if not ways:
            path.pop()
            continue
        way = random.choice(ways)
        there = neighbour(here, way)
        exits[here].add(way)
        exits[there].add(OPPOSITE[way])
        seen.add(there)
        path.append(there)
    return exits


class Maze:
    """A maze of `size` x `size` rooms, with the treasure in the room farthest from the start."""

    SIZES: ClassVar[tuple[int, int, int]] = (2, 4, 50)

    def __init__(self, random: Random, size: int) -> None:
        self._exits = carve(random, size)
        self._place: Place = (random.randrange(size), random.randrange(size))
        reached = [self._place]  # in order of distance
        for here in reached:
            ways = (neighbour(here, d) for d in sorted(self._exits[here]))
            reached += [there for there in ways if there not in reached]
        self._treasure = reached[-1]
        self.rules = "You are in a maze. Find the room with the treasure."
        # Walking along one wall passes each of the size² - 1 doors at most twice.
        self.most_actions = 2 * (size * size - 1)

    @property
    def view(self) -> str:
        if self.won:
            return "You have found the treasure."
        ways = ", ".join(d for d in MOVES if d in self._exits[self._place])
        return f"You are in a room. Exits: {ways}."

    @property
    def state(self) -> Any:
        return self._place

    @property
    def won(self) -> bool:
        return self._place == self._treasure

    def move(self, direction: Direction) -> str:
        """Walk to the next room.

        Args:
            direction: Where to.
        """
        if direction not in self._exits[self._place]:
            return f"There is a wall. {self.view}"
        self._place = neighbour(self._place, direction)
        return self.view


class Sokoban:
    """A board of `size` x `size` squares with some walls and one box per 16 squares.

    The constructor generates the board backwards: it pulls boxes away from their goals. The player
    can therefore solve the board in at most `PULLS` moves.
    """

    SIZES: ClassVar[tuple[int, int, int]] = (4, 5, 20)

    def __init__(self, random: Random, size: int) -> None:
        squares = [(r, c) for r in range(size) for c in range(size)]
        boxes = size * size // 16
        self.most_actions = 2 * PULLS  # extra actions for exploring unseen squares
        self.rules = (
            "Push every box onto a goal by walking into it. You cannot pull a box, and not push "
            f"two. You see {SIGHT} squares far: p is you (P on a goal), b a box (* on a goal), o a "
            "goal, . free, # a wall."
        )
        while True:
            chosen = random.sample(squares, boxes + 1 + size * size // 8)
            self._goals = frozenset(chosen[:boxes])
            self._boxes, self._player = set(self._goals), chosen[boxes]
            self._free = frozenset(squares) - frozenset(chosen[boxes + 1 :])
            for _ in range(PULLS):
                self._back(random)
            if not self._boxes & self._goals:
                return

    def _back(self, random: Random) -> None:
        """Make a random backward move, which may pull a box along."""
        direction = random.choice(list(MOVES))
        to = neighbour(self._player, direction)
        if to not in self._free or to in self._boxes:
            return
        pulled = neighbour(self._player, OPPOSITE[direction])
        if pulled in self._boxes and random.random() < 0.8:
            self._boxes.remove(pulled)
            self._boxes.add(self._player)
        self._player = to

    @property
    def view(self) -> str:
        """The squares near the player as text, with the northernmost row first."""
        row, column = self._player
        near = range(-SIGHT, SIGHT + 1)
        return "\n".join("".join(self._sign((row + r, column + c)) for c in near) for r in near)

    def _sign(self, place: Place) -> str:
        if place not in self._free:
            return "#"
        return _SIGNS[place == self._player, place in self._boxes, place in self._goals]

    @property
    def state(self) -> Any:
        return [self._player, sorted(self._boxes)]

    @property
    def won(self) -> bool:
        return self._boxes == self._goals

    def move(self, direction: Direction) -> str:
        """Walk one square, and push the box that is there.

        Args:
            direction: Where to.
        """
        to = neighbour(self._player, direction)
        beyond = neighbour(to, direction)
        if to not in self._free:
            return f"There is a wall.\n{self.view}"
        if to in self._boxes:
            if beyond not in self._free or beyond in self._boxes:
                return f"The box does not move.\n{self.view}"
            self._boxes.remove(to)
            self._boxes.add(beyond)
        self._player = to
        return f"All boxes are on goals.\n{self.view}" if self.won else self.view


GAMES: Mapping[str, type[Game]] = MappingProxyType(
    {"guess_number": GuessNumber, "maze": Maze, "sokoban": Sokoban}
)


class Games(ToolEnvironment):
    """Plays one game per episode; `info["world"]` or the seed determines the game.

    The reward is 1 if the policy wins the game, and 0 otherwise. Only the first tool call of a turn
    has an effect, so the policy can win a game in one turn only by luck. The episode ends when the
    policy wins, after `actions` actions, or after a message without a tool call. If `actions` is 0,
    the game's own limit on actions applies.
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
        return tools_of(self._game)

    def reset(self, prompt: Prompt, seed: int) -> Start:
        """Start the episode: make the game, and show the rules and the visible part of the game."""
        self._game = self._make(Random(str(prompt.info.get("world", seed))), self._size)
        limit = f"You have {self._most} actions, one in each turn."
        shown = "\n\n".join(["", self._game.rules, limit, self._game.view])
        start, messages = super().reset(prompt, seed), appended(prompt.messages, shown)
        return replace(start, messages=messages, state=self._game.state)

    async def step(self, message: Message) -> Step:
        """Run the first action of a message, and reject all further actions."""
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
        return {"won": float(self._game.won)}
