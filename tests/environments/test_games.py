"""Games: their rules, hidden states, limits and rewards."""

from __future__ import annotations

import re
from collections import deque
from random import Random

import pytest

from covey.environments import call
from covey.errors import ConfigError
from covey.recipes.games.environment import MOVES, PULLS, SIGHT, GuessNumber, Maze, Sokoban, Worlds
from tests.environments.scripted import Hand, rollouts, trained_text

WORLDS = Worlds(held_out_size=4).held_out()


@pytest.mark.parametrize("size", [2, 3, 100])
def test_halving_the_range_always_finds_the_number(size: int) -> None:
    found = set()
    for seed in range(4 * size):
        game = GuessNumber(Random(seed), size)
        low, high, guesses = 1, size, 0
        while not game.won:
            middle = (low + high) // 2
            answer = game.guess(middle)
            low, high = (middle + 1, high) if answer == "higher" else (low, middle - 1)
            guesses += 1
        found.add(middle)
        assert guesses <= game.most_actions
    assert len(found) > size / 2
    assert GuessNumber(Random(0), 100).most_actions == 7


def test_a_maze_has_one_path_and_its_walls_hold() -> None:
    for seed in range(20):
        maze = Maze(Random(seed), 5)
        assert sum(map(len, maze._exits.values())) == 2 * (25 - 1)
        assert not maze.won
        for way in set(MOVES) - maze._exits[maze._place]:
            before = maze.state
            assert maze.move(way).startswith("There is a wall. You are in a room. Exits: ")
            assert maze.state == before


def test_following_a_wall_always_finds_the_treasure() -> None:
    ways = list(MOVES)
    for seed in range(20):
        maze = Maze(Random(seed), 4)
        heading, taken, view = 0, 0, maze.view
        while not maze.won:
            exits = re.findall("|".join(MOVES), view)
            turns = ((heading + turn) % 4 for turn in (1, 0, 3, 2))  # right, ahead, left, back
            heading = next(turn for turn in turns if ways[turn] in exits)
            view = maze.move(ways[heading])
            taken += 1
        assert 1 < taken <= maze.most_actions
        assert view == "You have found the treasure."


def solution(game: Sokoban) -> list[str]:
    """Return a shortest solution of a board, by breadth-first search over its states."""
    start = (game._player, frozenset(game._boxes))
    paths = {start: ()}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for way in MOVES:
            game._player, game._boxes = state[0], set(state[1])
            game.move(way)
            after = (game._player, frozenset(game._boxes))
            if after not in paths:
                paths[after] = (*paths[state], way)
                queue.append(after)
            if game.won:
                game._player, game._boxes = start[0], set(start[1])
                return list(paths[after])
    raise AssertionError("the board cannot be solved")


def test_every_board_can_be_solved() -> None:
    lengths = []
    for seed in range(30):
        game = Sokoban(Random(seed), 5)
        assert not game.won
        lengths.append(len(solution(game)))
    assert max(lengths) <= PULLS
    assert sum(length > 1 for length in lengths) > 15


def board(*rows: str) -> Sokoban:
    """Return a game with this board."""
    game = Sokoban(Random(0), 4)
    signs = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
    game._free = frozenset(place for place, sign in signs.items() if sign != "#")
    game._goals = frozenset(place for place, sign in signs.items() if sign in "oP*")
    game._boxes = {place for place, sign in signs.items() if sign in "b*"}
    [game._player] = [place for place, sign in signs.items() if sign in "pP"]
    return game


def test_sokoban_is_played_by_its_rules() -> None:
    game = board("pb.o#", ".bb..", ".....")
    assert "does not move" not in game.move("east")
    assert (game._player, game._boxes) == ((0, 1), {(0, 2), (1, 1), (1, 2)})
    assert game.move("north").startswith("There is a wall.")
    assert "does not move" not in game.move("south")  # pushes (1, 1) to (2, 1)
    assert game.move("south").startswith("The box does not move.")  # a wall is behind it
    assert game.move("east") == game.view  # pushes (1, 2) to (1, 3)
    assert board("pbb.").move("east").startswith("The box does not move.")
    won = board("pbo")
    assert won.move("east").startswith("All boxes are on goals.")
    assert won.won


def test_only_what_is_near_is_seen() -> None:
    game = board("p...b", ".....", "....o")
    rows = game.view.split("\n")
    assert [len(row) for row in rows] == [2 * SIGHT + 1] * 5
    assert "b" not in game.view
    assert "o" not in game.view
    assert rows[SIGHT] == "##p.."


def test_one_action_per_turn_and_a_limit_of_them() -> None:
    hand = Hand("games", WORLDS[0], game="guess_number", size=10**9, actions=3)
    assert "You have 3 actions" in hand.first.messages[-1]["content"]
    reply = hand.say(call("guess", number=1) * 2)
    assert [m["content"] for m in reply.messages] == ["higher", "error: one action per turn"]
    assert hand.use("guess", number="many").startswith("error: guess: number: ")
    assert not hand.last.done
    hand.use("guess", number=2)
    assert hand.last.done
    assert hand.outcome() == {"won": 0.0}


def test_a_message_without_a_call_ends_the_game() -> None:
    hand = Hand("games", WORLDS[0], game="maze")
    assert hand.say("I give up.").done
    assert hand.outcome() == {"won": 0.0}


def test_a_world_is_the_same_for_all_runs_and_equal_states_have_equal_names() -> None:
    def start(number: int, seed: int) -> Hand:
        return Hand("games", WORLDS[number], seed, game="maze")

    one, same, other = start(0, 1), start(0, 2), start(1, 1)
    assert one.first == same.first
    assert one.driver.environment._game._exits != other.driver.environment._game._exits
    there = next(iter(one.driver.environment._game._exits[one.driver.environment._game._place]))
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}[there]
    away = one.say(call("move", direction=there)).state
    home = one.say(call("move", direction=back)).state
    assert home == one.first.state != away


@pytest.mark.parametrize(("option", "value"), [("size", 1), ("size", 10**10), ("actions", -1)])
def test_options_that_make_no_sense_are_refused(option: str, value: int) -> None:
    with pytest.raises(ConfigError, match=option):
        Hand("games", WORLDS[0], **{option: value})


def test_rollouts_find_numbers_by_halving_and_not_in_one_turn() -> None:
    def halving(text: str, turn: int) -> str:
        guesses = [int(n) for n in re.findall(r'"number": (\d+)', text.partition("assistant")[2])]
        answers = re.findall(r"<tool_response>\n(higher|lower)", text)
        low, high = 1, 100
        for guess, answer in zip(guesses, answers, strict=True):
            low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
        return call("guess", number=(low + high) // 2)

    groups = rollouts("games", WORLDS, halving, game="guess_number").groups
    played = [group.rollouts[0] for group in groups]
    assert [(r.reward, r.success, r.finish) for r in played] == [(1.0, True, "stop")] * 4
    assert "higher" not in "".join(map(trained_text, played))
    everything = "".join(call("guess", number=n) for n in range(1, 31))
    hasty = rollouts("games", WORLDS, lambda text, turn: everything, max_turns=1).groups
    assert [group.rollouts[0].reward for group in hasty] == [0.0] * 4
