"""Sokoban with a limited view: push boxes onto goals, but see only nearby squares."""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

from covey.environments.games.maze import MOVES, Direction, Place, neighbour

SIGHT = 2
"""The number of squares that the player sees in each direction."""
PULLS = 40
"""The number of random backward moves that turn the solved board into the start board."""
_SIGNS = {
    (False, False, False): ".", (False, False, True): "o", (False, True, False): "b",
    (False, True, True): "*", (True, False, False): "p", (True, False, True): "P",
}  # fmt: skip
"""The character of a square; the key says whether player, box and goal are on the square."""


class Sokoban:
    """A board of `size` x `size` squares with some walls and one box per 16 squares.

    The board is generated backwards, by pulling boxes away from their goals. The player can solve
    every board in at most `PULLS` moves.
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
        opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}[direction]
        pulled = neighbour(self._player, opposite)
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
        """The positions of the player and the boxes."""
        return [self._player, sorted(self._boxes)]

    @property
    def won(self) -> bool:
        """Whether every box is on a goal."""
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
