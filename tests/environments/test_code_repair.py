"""The code_repair environment: a wrong program, its tests, edits and rounds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from covey.environments import call
from covey.errors import ConfigError
from covey.recipes.code_repair.environment import mutants
from covey.tasks.code import Code
from covey.types import Prompt
from tests.environments.scripted import Hand, rollouts, trained_text

RIGHT = "def double(x):\n    return 2 * x\n"
WRONG = "def double(x):\n    return 2 + x\n"
TESTS = [
    {"call": "double(2)", "expected": "4"},
    {"call": "double(3)", "expected": "6"},
    {"call": "double(0)", "expected": "0"},
    {"call": "double(-5)", "expected": "-10"},
]


def prompt(**info: object) -> Prompt:
    return Prompt(
        id="p", task="code", target="", messages=({"role": "user", "content": "Double a number."},),
        info={"tests": TESTS, "broken": WRONG, **info},
    )  # fmt: skip


def test_tests_that_fail_are_shown_and_hidden_ones_are_not() -> None:
    hand = Hand("code_repair", prompt())
    shown = hand.first.messages[-1]["content"]
    assert WRONG in shown
    assert hand.use("run_tests") == ("1 of 2 tests pass.\n\ndouble(3) should return 6\nIt gave:\n5")
    assert "double(0)" not in shown
    assert hand.outcome() == {"tests": 0.75 / 4, "edits": 0.0, "rounds": 0.0}


@pytest.mark.parametrize(
    ("rounds", "edits", "outcome"),
    [
        (0, 1, (0.75, 0.125, 0.125)),
        (1, 1, (0.75, 0.125, 0.125)),
        (3, 3, (0.75, 0.125, 0.125 * 0.6)),
        (5, 4, (0.75, 0.125 * 2 / 3, 0.125 * 0.2)),
        (1, 7, (0.75, 0.0, 0.125)),
    ],
)
def test_a_repair_counts_more_with_few_edits_and_rounds(
    rounds: int, edits: int, outcome: tuple[float, float, float]
) -> None:
    hand = Hand("code_repair", prompt())
    for number in range(edits):
        assert (
            hand.use("rewrite", program=f"# {number}\n{RIGHT}") == "The program has been changed."
        )
    for number in range(rounds):
        assert hand.use("run_tests") == "2 of 2 tests pass."
        assert hand.last.done == (number == 4)
    assert list(hand.outcome().values()) == pytest.approx(outcome)


def test_an_edit_replaces_a_text_that_occurs_once() -> None:
    hand = Hand("code_repair", prompt())
    error = "error: the program has {} places with this text, not one"
    assert hand.use("edit", old="x", new="y") == error.format(2)
    assert hand.use("edit", old="", new="y") == error.format(0)
    assert hand.use("edit", old="absent", new="y") == error.format(0)
    hand.use("edit", old="2 + x", new="2 * x")
    assert hand.say("It is correct now.").done
    assert sum(hand.outcome().values()) == 1.0


def test_a_program_that_passes_only_what_it_sees_is_not_a_repair() -> None:
    hand = Hand("code_repair", prompt())
    hand.use("rewrite", program="def double(x):\n    return {2: 4, 3: 6}[x]\n")
    assert hand.use("run_tests") == "2 of 2 tests pass."
    assert hand.outcome() == {"tests": 0.375, "edits": 0.0, "rounds": 0.0}


def test_a_failure_shows_what_the_program_printed_and_raised() -> None:
    hand = Hand("code_repair", prompt())
    hand.use("rewrite", program="def double(x):\n    print('seen', x)\n    return None.x\n")
    answer = hand.use("run_tests")
    assert "double(2) should return 4\nIt gave:\nseen 2\nTraceback" in answer
    assert "AttributeError: 'NoneType' object has no attribute 'x'" in answer
    assert "harness" not in answer


def test_mutants_differ_in_one_place() -> None:
    found = set(mutants("def f(a, b):\n    return a <= 1 and max(a, b) == 'no'\n", Random(0)))
    body = "def f(a, b):\n    return {}\n"
    assert found == {
        body.format(line)
        for line in (
            "a < 1 and max(a, b) == 'no'",
            "a <= 2 and max(a, b) == 'no'",
            "a <= 1 or max(a, b) == 'no'",
            "a <= 1 and min(a, b) == 'no'",
            "a <= 1 and max(b, a) == 'no'",
            "a <= 1 and max(a, b) != 'no'",
            "a <= 1 and max(a, b) == 'n'",
        )
    }


def test_the_error_is_the_same_for_a_group_and_another_for_another_seed() -> None:
    problem = Code(instruction="").train()[5]
    shown = [Hand("code_repair", problem, seed).first.messages[-1]["content"] for seed in (1, 1, 2)]
    assert shown[0] == shown[1] != shown[2]
    assert problem.messages[-1]["content"] in shown[0]


@pytest.mark.parametrize("option", [{"max_rounds": 0}, {"expected_edits": 0}, {"hidden_tests": -1}])
def test_options_that_make_no_sense_are_refused(option: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        Hand("code_repair", prompt(), **option)


def test_rollouts_repair_programs() -> None:
    def policy(text: str, turn: int) -> str:
        if "Double a number." not in text:
            return "It looks fine."
        fix = call("edit", old="2 + x", new="2 * x")
        return [call("run_tests"), fix, call("run_tests"), "Done."][turn]

    lazy = replace(prompt(), id="q", messages=({"role": "user", "content": "Double."},))
    groups = rollouts("code_repair", [prompt(), lazy], policy, success_at=0.75).groups
    [repaired], [left] = (group.rollouts for group in groups)
    assert (repaired.success, repaired.finish) == (True, "stop")
    assert repaired.reward == pytest.approx(0.75 + 0.125 + 0.1)
    assert trained_text(repaired).count("<|im_end|>") == 4
    assert "should return" not in trained_text(repaired)
    assert (left.success, left.reward) == (False, 0.75 / 4)
