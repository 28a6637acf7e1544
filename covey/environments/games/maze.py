"""A maze in which only the exits of the current room are visible."""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar, Literal

Direction = Literal["north", "east", "south", "west"]
Place = tuple[int, int]
MOVES: dict[str, Place] = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}


def neighbour(place: Place, direction: str) -> Place:
    """Return the row and column of the next room in a direction."""
    down, right = MOVES[direction]
    return place[0] + down, place[1] + right


def carve(random: Random, size: int) -> dict[Place, set[str]]:
    """Make a maze with exactly one path between any two rooms; return each room's exits."""
    exits: dict[Place, set[str]] = {(r, c): set() for r in range(size) for c in range(size)}
    opposite = dict(zip(MOVES, ["south", "west", "north", "east"], strict=True))
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
        exits[there].add(opposite[way])
        seen.add(there)
        path.append(there)
    return exits


class Maze:
    """A maze of `size` x `size` rooms, with the treasure in the room farthest from the start."""

    SIZES: ClassVar[tuple[int, int, int]] = (2, 4, 50)

    def __init__(self, random: Random, size: int) -> None:
        self._exits = carve(random, size)
        self._place: Place = (random.randrange(size), random.randrange(size))
        self._treasure = self._farthest()
        self.rules = "You are in a maze. Find the room with the treasure."
        # Walking along one wall passes each of the size² - 1 doors at most twice.
        self.most_actions = 2 * (size * size - 1)

    def _farthest(self) -> Place:
        reached = [self._place]  # in order of distance
        for here in reached:
            ways = (neighbour(here, d) for d in sorted(self._exits[here]))
            reached += [there for there in ways if there not in reached]
        return reached[-1]

    @property
    def view(self) -> str:
        """A text that lists the exits of the current room."""
        if self.won:
            return "You have found the treasure."
        ways = ", ".join(d for d in MOVES if d in self._exits[self._place])
        return f"You are in a room. Exits: {ways}."

    @property
    def state(self) -> Any:
        """The row and column of the player's room."""
        return self._place

    @property
    def won(self) -> bool:
        """Whether the treasure is found."""
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
