from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.errors import ConfigError
from covey.tasks.arithmetic import DIGITS, Arithmetic, Sum, chain, prompt_text
from covey.tasks.registry import TASKS
from covey.tasks.task import Generated
from covey.types import Prompt
from tests.tasks.sums import parse_prompt

ALL_SUMS = [
    s
    for left in range(100)
    for operator in "+-"
    for right in DIGITS
    for s in [Sum(left, operator, right)]
    if 0 <= s.result < 100
]


def made(split: str, size: int, operations: tuple[int, int]) -> Sequence[Prompt]:
    low, high = operations
    task = Arithmetic(min_operations=low, max_operations=high, train_size=size, held_out_size=size)
    return task.train() if split == "train" else task.held_out()


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"[+-]?\d+", text.rstrip("?"))]


def problems(split: str, count: int, operations: tuple[int, int]) -> list[Prompt]:
    return list(made(split, count, operations))


@pytest.mark.parametrize("operations", [(1, 1), (2, 4), (1, 12)])
def test_no_training_problem_holds_a_held_out_sum_at_any_step(operations: tuple[int, int]) -> None:
    sums = [s for p in problems("train", 3000, operations) for s in parse_prompt(p.text)]
    assert len(sums) >= 3000
    assert [s for s in sums if s.held_out] == []


@pytest.mark.parametrize("operations", [(1, 1), (2, 4), (1, 12)])
def test_held_out_problems_consist_of_held_out_sums_only(operations: tuple[int, int]) -> None:
    sums = [s for p in problems("held_out", 3000, operations) for s in parse_prompt(p.text)]
    assert len(sums) >= 3000
    assert [s for s in sums if not s.held_out] == []


def test_the_held_out_sums_are_fixed_for_ever() -> None:
    held_out = [f"{s.left}{s.operator}{s.right}" for s in ALL_SUMS if s.held_out]
    assert (len(held_out), len(ALL_SUMS)) == (209, 1316)
    digest = hashlib.sha256(" ".join(held_out).encode()).hexdigest()
    assert digest.startswith("558b8fcedb070f29")


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_every_partial_result_lies_between_0_and_99(split: str) -> None:
    for prompt in problems(split, 2000, (1, 12)):
        assert all(0 <= partial <= 99 for partial in accumulate(numbers(prompt.text)))


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_answers_are_the_two_digit_value_of_the_question(split: str) -> None:
    for prompt in problems(split, 2000, (1, 12)):
        assert prompt.target == f"{sum(numbers(prompt.text)):02d}"


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_questions_are_a_two_digit_number_and_digits_from_3_to_9(split: str) -> None:
    for prompt in problems(split, 2000, (2, 4)):
        assert re.fullmatch(r"\d\d([+-][3-9]){2,4}\?", prompt.text)


def test_info_counts_the_operations_and_the_sums_whose_tens_change() -> None:
    for prompt in problems("train", 2000, (1, 6)):
        partials = list(accumulate(numbers(prompt.text)))
        tens = [partial // 10 for partial in partials]
        changes = sum(a != b for a, b in pairwise(tens))
        counted = {"operations": len(partials) - 1, "carries": changes}
        assert {k: v for k, v in prompt.info.items() if k != "worked"} == counted


def test_the_worked_solution_goes_from_one_partial_result_to_the_next() -> None:
    for prompt in problems("held_out", 500, (1, 6)):
        partials = list(accumulate(numbers(prompt.text)))
        sums = [step.split("=") for step in prompt.info["worked"].split(";")]
        assert [eval(left.lstrip("0")) for left, _ in sums] == partials[1:]
        assert [int(result) for _, result in sums] == partials[1:]
        assert [int(left[:2]) for left, _ in sums] == partials[:-1]


def test_a_sum_carries_when_its_tens_change() -> None:
    assert [s for s in ALL_SUMS if s.carries != (s.left // 10 != s.result // 10)] == []


@pytest.mark.parametrize(
    ("left", "operator", "right", "result", "carries"),
    [
        (47, "+", 8, 55, True),
        (47, "+", 3, 50, True),
        (46, "+", 3, 49, False),
        (55, "-", 6, 49, True),
        (55, "-", 5, 50, False),
    ],
)
def test_worked_sums(left: int, operator: str, right: int, result: int, carries: bool) -> None:
    s = Sum(left, operator, right)
    assert (s.result, s.carries) == (result, carries)


@given(seed=st.integers(0, 10**6), operations=st.integers(1, 12), held_out=st.booleans())
@settings(deadline=None)
def test_parse_prompt_inverts_prompt_text(seed: int, operations: int, held_out: bool) -> None:
    sums = chain(random.Random(seed), operations, held_out)
    assert len(sums) == operations
    assert parse_prompt(prompt_text(sums)) == sums


def test_each_sum_of_a_prompt_starts_from_the_previous_result() -> None:
    assert [s.result for s in parse_prompt("47+8-6?")] == [55, 49]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_problem_depends_on_split_index_and_range_only(split: str) -> None:
    few, many = made(split, 50, (2, 4)), made(split, 5000, (2, 4))
    in_order = list(few)
    shuffled = list(range(50))
    random.Random(0).shuffle(shuffled)
    assert {i: many[i] for i in shuffled} == dict(enumerate(in_order))
    assert many[10:40:3] == in_order[10:40:3]
    assert few[-1] == in_order[49]
    assert few[::-1] == in_order[::-1]


def test_another_split_or_range_asks_other_problems() -> None:
    def texts(split: str, operations: tuple[int, int]) -> list[str]:
        return [prompt.text for prompt in made(split, 100, operations)]

    base = texts("train", (2, 2))
    assert sum(a == b for a, b in zip(base, texts("held_out", (2, 2)), strict=True)) < 5
    assert sum(a == b for a, b in zip(base, texts("train", (2, 3)), strict=True)) < 5


def test_the_problems_of_every_installation_are_these() -> None:
    task = Arithmetic()
    assert [p.text for p in task.train()[:3]] == ["65-6-8+8?", "48-8-3?", "60+6+6+5?"]
    assert [p.text for p in task.held_out()[:2]] == ["81+3+6-8?", "54+3-6+4-7?"]
    assert task.train()[0].id == "arithmetic/train/2-4/0"
    assert (len(task.train()), len(task.held_out())) == (100_000, 256)


def test_ids_are_unique_across_both_splits() -> None:
    task = Arithmetic(train_size=500, held_out_size=500)
    assert len({p.id for p in [*task.train(), *task.held_out()]}) == 1000


def test_every_number_of_operations_in_the_range_is_about_equally_frequent() -> None:
    counts = [p.info["operations"] for p in problems("train", 3000, (2, 4))]
    assert set(counts) == {2, 3, 4}
    assert all(900 < counts.count(n) < 1100 for n in (2, 3, 4))


@pytest.mark.parametrize("index", [10, -11, 10**9])
def test_an_index_outside_the_split_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError):
        made("train", 10, (2, 4))[index]


def test_an_empty_split_holds_nothing() -> None:
    empty = Generated(0, Arithmetic().train().__getitem__)
    assert list(empty) == []
    with pytest.raises(IndexError):
        empty[0]


@pytest.mark.parametrize(
    "options",
    [
        {"min_operations": 0},
        {"min_operations": 5, "max_operations": 4},
        {"max_operations": 13},
        {"min_operations": -1, "max_operations": -1},
        {"train_size": -1},
        {"held_out_size": -1},
    ],
    ids=str,
)
def test_options_out_of_range_are_config_errors_of_one_line(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as raised:
        TASKS["arithmetic"](**options)
    assert str(raised.value).startswith("task: ")
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("operations", [1, 12])
def test_the_extremes_of_the_range_of_operations_are_allowed(operations: int) -> None:
    task = Arithmetic(min_operations=operations, max_operations=operations)
    assert {p.info["operations"] for p in task.held_out()} == {operations}
