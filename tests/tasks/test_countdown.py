from __future__ import annotations

import ast
import random
import re
from fractions import Fraction

import pytest

from covey.errors import ConfigError
from covey.tasks.countdown import Countdown, Term, is_held_out, join, prompt_text
from covey.types import Prompt

OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}
SHAPES = [
    {},
    {"min_numbers": 6, "max_numbers": 6},
    {"min_numbers": 3, "max_numbers": 6, "max_number": 10, "max_target": 20},
]


def value(node: ast.expr, partial: list[Fraction]) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    assert isinstance(node, ast.BinOp)
    operation = OPERATIONS[type(node.op)]
    partial.append(operation(value(node.left, partial), value(node.right, partial)))
    return partial[-1]


def prompts(split: str, count: int, **options: int) -> list[Prompt]:
    task = Countdown(train_size=count, held_out_size=count, **options)
    return list(task.train() if split == "train" else task.held_out())


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_solution_uses_each_number_once_and_makes_the_target(
    split: str, shape: dict[str, int]
) -> None:
    for prompt in prompts(split, 400, **shape):
        numbers, target = prompt.info["numbers"], prompt.info["target"]
        partial: list[Fraction] = []
        result = value(ast.parse(prompt.info["solution"], mode="eval").body, partial)
        assert result == target == int(prompt.target)
        assert all(p > 0 and p.denominator == 1 for p in partial)
        used = sorted(map(int, re.findall(r"\d+", prompt.info["solution"])))
        assert used == sorted(numbers)
        assert target not in numbers


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_and_target_stay_within_the_options(shape: dict[str, int]) -> None:
    task = Countdown(**shape)
    counts = set()
    for prompt in task.train()[:400]:
        counts.add(len(prompt.info["numbers"]))
        assert all(1 <= n <= task.max_number for n in prompt.info["numbers"])
        assert 1 <= prompt.info["target"] <= task.max_target
    assert counts == set(range(task.min_numbers, task.max_numbers + 1))


def pairs(split: str, **options: int) -> set[tuple[tuple[int, ...], int]]:
    return {
        (tuple(sorted(p.info["numbers"])), p.info["target"])
        for p in prompts(split, 2000, **options)
    }


@pytest.mark.parametrize("shape", [{}, {"max_number": 10, "max_target": 20}], ids=str)
def test_train_and_held_out_never_share_numbers_and_target(shape: dict[str, int]) -> None:
    train, held_out = pairs("train", **shape), pairs("held_out", **shape)
    assert min(len(train), len(held_out)) > 100
    assert train & held_out == set()


def test_the_order_of_the_numbers_does_not_change_the_side() -> None:
    assert {is_held_out(n, 10) for n in ([1, 2, 7], [7, 1, 2], [2, 7, 1])} == {
        is_held_out([1, 2, 7], 10)
    }
    sides = [is_held_out([1, 2, n], 50) for n in range(1000)]
    assert 150 < sum(sides) < 250


def test_a_problem_depends_on_its_index_alone() -> None:
    few, many = Countdown(train_size=20).train(), Countdown(train_size=5000).train()
    order = list(range(20))
    random.Random(0).shuffle(order)
    assert {i: many[i] for i in order} == dict(enumerate(few))
    assert few[-1] == many[19]
    assert few[3:9:2] == [many[3], many[5], many[7]]
    with pytest.raises(IndexError):
        few[20]


def test_the_problems_of_every_installation_are_these() -> None:
    first = Countdown().train()[0]
    assert first.id == "countdown/train/3-4/99/999/0"
    assert first.info == {
        "numbers": [22, 93, 91, 34],
        "target": 172,
        "solution": "22 + 93 + 91 - 34",
    }


def test_ids_differ_between_splits_and_ranges() -> None:
    tasks = [Countdown(train_size=50, held_out_size=50), Countdown(max_numbers=5, train_size=50)]
    ids = [p.id for task in tasks for p in task.train()] + [p.id for p in tasks[0].held_out()]
    assert len(set(ids)) == 150


def test_every_operator_is_used_often() -> None:
    solutions = [p.info["solution"] for p in prompts("train", 1000)]
    for operator, least in (("+", 300), ("-", 300), ("*", 100), ("/", 30), ("(", 100)):
        assert sum(operator in s for s in solutions) >= least


def test_the_question_says_all_the_rules() -> None:
    text = prompt_text([3, 5, 12], 27)
    for part in ("27", "3, 5 and 12", "exactly once", "<think>", "<answer>(1 + 2) / 3</answer>"):
        assert part in text
    prompt = Countdown().train()[0]
    assert prompt.text == prompt_text(prompt.info["numbers"], prompt.info["target"])


SUM, PRODUCT = Term(8, "3 + 5", "+"), Term(8, "2 * 4", "*")


@pytest.mark.parametrize(
    ("left", "right", "operator", "text"),
    [
        (Term(9, "9"), SUM, "-", "9 - (3 + 5)"),
        (SUM, Term(2, "2"), "-", "3 + 5 - 2"),
        (SUM, Term(2, "2"), "*", "(3 + 5) * 2"),
        (Term(2, "2"), SUM, "*", "2 * (3 + 5)"),
        (Term(16, "16"), PRODUCT, "/", "16 / (2 * 4)"),
        (PRODUCT, Term(2, "2"), "/", "2 * 4 / 2"),
        (Term(2, "2"), PRODUCT, "*", "2 * 2 * 4"),
        (Term(9, "9"), PRODUCT, "-", "9 - 2 * 4"),
        (Term(9, "9"), SUM, "+", "9 + 3 + 5"),
    ],
)
def test_parentheses_stand_where_they_are_needed(
    left: Term, right: Term, operator: str, text: str
) -> None:
    joined = join(left, right, operator)
    assert joined is not None
    assert joined.text == text
    assert value(ast.parse(text, mode="eval").body, []) == joined.value


@pytest.mark.parametrize(
    ("a", "b", "operator"), [(3, 5, "-"), (5, 5, "-"), (7, 2, "/"), (2, 4, "/")]
)
def test_results_that_are_not_whole_and_positive_are_refused(a: int, b: int, operator: str) -> None:
    assert join(Term(a, str(a)), Term(b, str(b)), operator) is None


@pytest.mark.parametrize(
    "options",
    [
        {"min_numbers": 2},
        {"max_numbers": 7},
        {"min_numbers": 5, "max_numbers": 4},
        {"max_number": 9},
        {"max_target": 19},
        {"train_size": 0},
        {"held_out_size": 0},
    ],
    ids=str,
)
def test_options_out_of_range_are_config_errors_of_one_line(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"^task: .*must") as raised:
        Countdown(**options)
    assert len(str(raised.value).splitlines()) == 1
    assert str(next(iter(options.values()))) in str(raised.value)


def test_a_problem_may_be_asked_in_other_words() -> None:
    plain = Countdown().train()[3]
    prompt = Countdown(template="{target} from {numbers}?", system="Play.").train()[3]
    numbers = ", ".join(map(str, plain.info["numbers"]))
    assert prompt.messages == (
        {"role": "system", "content": "Play."},
        {"role": "user", "content": f"{plain.target} from {numbers}?"},
    )
    assert (prompt.id, prompt.info) == (plain.id, plain.info)


@pytest.mark.parametrize("template", ["Make {target}.", "Use {numbers}.", "Play."])
def test_a_template_without_its_places_is_an_error(template: str) -> None:
    with pytest.raises(ConfigError, match=r"must contain {numbers} and {target}") as raised:
        Countdown(template=template)
    assert repr(template) in str(raised.value)
