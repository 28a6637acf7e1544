from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from covey.errors import ConfigError
from covey.evaluation import by_category, check_category, compare, estimates, is_graded
from covey.evaluation.intervals import mean_over_prompts, proportion
from covey.evaluation.items import Item, ItemCompletion
from covey.types import Prompt


def completion(success: bool | None, reward: float | None = None, **parts: float) -> ItemCompletion:
    return ItemCompletion(
        text=f"so {success}", reward=reward, tokens=3, finish="stop", success=success, parts=parts
    )


def graded(name: str, reward: float | None, **parts: float) -> Item:
    return replace(item(name, False), greedy=completion(False, reward, **parts))


def item(name: str, right: bool | None, samples: Sequence[bool | None] = (), **info: Any) -> Item:
    asked = ({"role": "user", "content": f"{name}?"},)
    prompt = Prompt(id=name, task="sums", messages=asked, target="7", info=info)
    return Item(prompt=prompt, greedy=completion(right), samples=tuple(map(completion, samples)))


def test_the_values_of_a_prompt() -> None:
    assert item("a", True).values() == {"greedy": 1.0}
    # 2 of 5 right: of the 10 pairs, 3 hold none; of the 5 fours, none does.
    values = item("a", False, [True, False, True, False, None]).values()
    assert values == {"greedy": 0.0, "mean@5": 0.4, "pass@2": pytest.approx(0.7), "pass@4": 1.0}
    assert item("a", True, [True]).values() == {"greedy": 1.0, "mean@1": 1.0}


def test_an_unscored_completion_counts_as_wrong_and_is_marked() -> None:
    one = item("a", None, [None, True])
    assert one.values() == {"greedy": 0.0, "mean@2": 0.5, "pass@2": 1.0}
    row = json.loads(json.dumps(one.row()))
    assert row["success"] is None
    assert [sample["success"] for sample in row["samples"]] == [None, True]


def test_a_row_holds_prompt_target_and_completion() -> None:
    row = item("a", True, [False], level=2).row()
    assert (row["prompt_id"], row["prompt"], row["target"]) == ("a", "a?", "7")
    assert (row["completion"], row["success"], row["info"]) == ("so True", True, {"level": 2})
    assert row["samples"][0]["text"] == "so False"


def test_intervals_over_items_are_of_means_over_prompts() -> None:
    items = [item(str(n), n < 3, [n < 5, n < 8]) for n in range(10)]
    found = estimates(items)
    assert found["greedy"] == proportion(3, 10)
    assert found["mean@2"] == mean_over_prompts([1.0] * 5 + [0.5] * 3 + [0.0] * 2)
    assert found["pass@2"] == mean_over_prompts([1.0] * 8 + [0.0] * 2)


def test_categories_come_in_the_order_of_their_numbers_then_names() -> None:
    levels = [10, 9, 2.5, "hard", 9]
    items = [item(str(n), True, level=level) for n, level in enumerate(levels)]
    items.append(item("none", True))
    found = by_category(items, "level")
    assert list(found) == ["2.5", "9", "10", "-", "hard"]
    assert [i.prompt.id for i in found["9"]] == ["1", "4"]
    assert sum(map(len, found.values())) == len(items)
    assert list(by_category(items, "task")) == ["sums"]


def test_a_key_that_no_prompt_has_is_an_error_that_names_the_nearest() -> None:
    prompts = [item("a", True, operations=2).prompt]
    check_category(prompts, "operations")
    check_category(prompts, "task")
    with pytest.raises(ConfigError, match=r"--by operation: .*did you mean 'operations'"):
        check_category(prompts, "operation")


def test_a_comparison_names_what_was_gained_and_lost() -> None:
    first = [
        item("a", True, [True] * 2),
        item("b", False, [True] * 2),
        item("c", True, [False] * 2),
    ]
    second = [
        item("a", False, [True] * 2),
        item("b", True, [False] * 2),
        item("c", True, [False] * 2),
    ]
    found = compare(first, second)
    assert (found.gained, found.lost) == (("a",), ("b",))
    greedy, mean = found.differences["greedy"], found.differences["mean@2"]
    assert (greedy.estimate.value, greedy.gained, greedy.lost, greedy.p_value) == (0.0, 1, 1, 1.0)
    assert (mean.estimate.value, mean.gained, mean.lost) == (pytest.approx(1 / 3), 1, 0)
    row = json.loads(json.dumps(found.row()))
    assert (row["gained"], row["greedy"]["p_value"]) == (["a"], 1.0)


def test_evaluations_of_other_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="not of the same prompts"):
        compare([item("a", True)], [item("b", True)])


def test_rewards_and_parts_have_estimates_over_what_was_scored() -> None:
    items = [graded("a", 0.2, form=1.0), graded("b", 0.6, form=0.0), graded("c", None)]
    found = estimates(items)
    assert list(found) == ["greedy", "reward", "parts/form"]
    assert found["reward"] == mean_over_prompts([0.2, 0.6])
    assert found["parts/form"] == mean_over_prompts([1.0, 0.0])
    assert found["greedy"] == proportion(0, 3)
    assert found["greedy"].high > 0.5
    assert is_graded((one.greedy.reward, one.greedy.success) for one in items)
    assert not is_graded([(None, None), (1.0, True), (0.0, False)])


def test_sampled_accuracy_without_a_success_has_an_interval() -> None:
    found = estimates([item(str(n), False, [False] * 4) for n in range(20)])
    for name in ("mean@4", "pass@2", "pass@4"):
        assert (found[name].value, found[name].high) == (0.0, pytest.approx(0.1684, abs=5e-5))


def test_policies_are_compared_by_reward_where_both_were_scored() -> None:
    first = [graded("a", 0.5), graded("b", 0.9), graded("c", None), graded("d", 0.4)]
    second = [graded("a", 0.1), graded("b", 0.2), graded("c", 1.0), graded("d", 0.1)]
    found = compare(first, second).differences
    assert found["reward"].estimate.value == pytest.approx((0.4 + 0.7 + 0.3) / 3)
    assert (found["reward"].gained, found["greedy"].gained) == (3, 0)


def test_a_part_that_is_the_success_has_the_interval_of_greedy() -> None:
    items = [
        replace(
            item(str(n), n < 18),
            greedy=completion(n < 18, (n < 18 and 1.0) or 0.1, correct=float(n < 18), form=1.0),
        )
        for n in range(100)
    ]
    found = estimates(items, (0.0, 1.0))
    assert found["parts/correct"] == found["greedy"] == proportion(18, 100)
    assert found["parts/form"] == proportion(100, 100)
    assert found["parts/form"].low < found["parts/form"].high


def test_the_bounds_of_a_reward_widen_its_interval() -> None:
    items = [graded(str(n), 0.0) for n in range(20)]
    unseen = 1 - 0.025 ** (1 / 20)
    assert estimates(items)["reward"].high == pytest.approx(unseen)
    known = estimates(items, (-1.0, 2.8))["reward"]
    assert (known.low, known.high) == pytest.approx((-unseen, 2.8 * unseen))
    assert estimates(items, (float("-inf"), 1.0))["reward"].high == pytest.approx(unseen)
