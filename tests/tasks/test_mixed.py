from __future__ import annotations

import json
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config.resolve_options import resolve_options
from covey.config.schema import Named
from covey.errors import ConfigError, DataError
from covey.tasks.arithmetic import Arithmetic
from covey.tasks.mixed import Mixed, pattern, quotas
from covey.tasks.rows import DatasetTask
from covey.tasks.task import bad_rows_of, sampled_ids

SMALL = {"train_size": 6, "held_out_size": 2}


def mixed(**parts: Any) -> Mixed:
    return Mixed(parts=parts)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1.0], [1]),
        ([0.5, 0.5], [1, 1]),
        ([3, 1], [3, 1]),
        ([0.3, 0.7], [3, 7]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
        ([1 / 3, 2 / 3], [1, 2]),
        ([999, 1], [999, 1]),
        ([1e6, 1], [1000, 1]),
    ],
)
def test_a_block_is_the_shortest_with_the_exact_proportions(
    weights: list[float], counts: list[int]
) -> None:
    assert quotas(weights) == counts


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=6))
@settings(deadline=None, max_examples=40)
def test_proportions_are_exact_to_a_thousandth_and_no_part_is_left_out(
    weights: list[float],
) -> None:
    counts = quotas(weights)
    assert min(counts) >= 1
    for weight, count in zip(weights, counts, strict=True):
        share = weight / sum(weights)
        assert count / sum(counts) == pytest.approx(share, abs=0.001 * (len(weights) + 1))


def test_a_part_without_training_prompts_is_named() -> None:
    task = mixed(arithmetic=SMALL, products=SMALL)
    task.tasks["products"] = DatasetTask([], [])
    with pytest.raises(DataError, match=r"^task: task\.parts\.products has no training prompts$"):
        task.train()


@pytest.mark.parametrize("counts", [[1], [3, 1], [5, 3, 2], [97, 3], [400, 350, 250]])
def test_a_block_spreads_every_part_evenly(counts: list[int]) -> None:
    block = pattern(counts)
    for part, count in enumerate(counts):
        assert [rank for p, rank in block if p == part] == list(range(count))
        so_far = accumulate(p == part for p, _ in block)
        for place, seen in enumerate(so_far, start=1):
            assert abs(seen - place * count / len(block)) < len(counts)


def test_parts_are_asked_by_weight_and_every_prompt_at_least_once() -> None:
    task = mixed(arithmetic={**SMALL, "weight": 3}, countdown=SMALL)
    train = task.train()
    assert len(train) == 24
    assert Counter(p.task for p in train) == {"arithmetic": 18, "countdown": 6}
    assert [p.task for p in train[:4]] == [p.task for p in train[4:8]]
    counts = Counter(p.text for p in train)
    assert sorted(counts.values()) == [1] * 6 + [3] * 6


def test_prompts_asked_again_have_ids_of_their_own() -> None:
    train = mixed(arithmetic={**SMALL, "weight": 3}, countdown=SMALL).train()
    assert len({p.id for p in train}) == len(train)
    again = [p.id for p in train if "~" in p.id]
    assert Counter(identity.partition("~")[2] for identity in again) == {"1": 6, "2": 6}


def test_equal_parts_without_need_repeat_nothing() -> None:
    train = mixed(arithmetic=SMALL, countdown=SMALL).train()
    assert len(train) == 12
    assert not any("~" in p.id for p in train)


def test_a_prompt_depends_on_its_index_alone() -> None:
    task = mixed(arithmetic={"weight": 0.7}, countdown={"weight": 0.3})
    train = task.train()
    assert len(train) == 10 * 33_334
    picked = [train[i] for i in (300_000, 5, 17)]
    assert [train[i] for i in (17, 5, 300_000)] == picked[::-1]


def test_all_held_out_prompts_are_kept_part_by_part() -> None:
    task = mixed(
        arithmetic={"train_size": 9, "held_out_size": 3, "weight": 100},
        countdown={"train_size": 9, "held_out_size": 4},
    )
    assert [p.task for p in task.held_out()] == ["arithmetic"] * 3 + ["countdown"] * 4


def test_a_key_that_is_no_task_name_names_one_and_marks_the_ids() -> None:
    task = mixed(
        easy={"name": "arithmetic", "max_operations": 2, **SMALL},
        hard={"name": "arithmetic", "min_operations": 4, **SMALL},
    )
    prompts = [*task.train(), *task.held_out()]
    assert {p.task for p in prompts} == {"arithmetic"}
    assert {p.id.split("/")[0] for p in prompts} == {"easy", "hard"}
    assert {p.info["operations"] for p in prompts if p.id.startswith("hard")} == {4}
    assert len({p.id for p in prompts}) == 16


def test_what_the_parts_skipped_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\nbad\n')
    files = {"train_file": str(path), "held_out_file": str(path)}
    task = mixed(arithmetic=SMALL, mine={"name": "jsonl", "skip_bad_rows": True, **files})
    task.train()
    assert list(task.bad_rows) == ["mine/train"]
    assert [line.split()[1] for line in bad_rows_of(task)] == [f"{path}:2"]


def test_a_mixed_task_is_built_from_a_section_of_the_configuration() -> None:
    parts = {"arithmetic": {"weight": 2, **SMALL}, "tools": {}}
    section = Named.model_validate({"name": "mixed", "parts": parts})
    options = resolve_options(Mixed, section, "task")
    assert options == {"parts": parts}
    assert Counter(p.task for p in Mixed(**options).train()[:3]) == {"arithmetic": 2, "tools": 1}


def test_mixtures_may_be_mixed() -> None:
    inner = {"name": "mixed", "parts": {"arithmetic": SMALL, "countdown": SMALL}}
    train = mixed(inner=inner, tools={}).train()
    assert {p.id.split("/")[0] for p in train} == {"inner", "tools"}
    assert {p.task for p in train} == {"arithmetic", "countdown", "tools"}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "task: the option `parts` must name at least one task"),
        ({"a": 3}, "config: task.parts.a = 3 must be a table"),
        (
            {"arithmetik": {}},
            "config: task.parts.arithmetik.name = 'arithmetik' is not a known task; did",
        ),
        ({"a": {"name": 3}}, "config: task.parts.a.name = 3 must be the name of a task"),
        (
            {"a": {"name": "arithmetic", "train_sice": 3}},
            "config: task.parts.a.train_sice is not an option of arithmetic; did you mean",
        ),
        (
            {"arithmetic": {"train_size": "many"}},
            "config: task.parts.arithmetic.train_size = 'many': input should be a valid integer",
        ),
        (
            {"arithmetic": {"train_size": 0}},
            "config: task.parts.arithmetic: train_size must be at least 1",
        ),
        ({"jsonl": {}}, "config: task.parts.jsonl.train_file must be set for jsonl"),
        ({"tools": {"weight": 0}}, "config: task.parts.tools.weight = 0 must be a number above 0"),
        ({"tools": {"weight": "2"}}, "config: task.parts.tools.weight = '2' must be a number"),
        ({"tools": {"weight": True}}, "config: task.parts.tools.weight = True must be a number"),
        ({"tools": {"weight": float("inf")}}, "config: task.parts.tools.weight = inf must be"),
        (
            {"no.such.module": {}},
            "config: task.parts.no.such.module.name = 'no.such.module' would run code",
        ),
        (
            {"g": {"name": "reasoning_gym:chain_sum", "dataset": "lcm"}},
            "config: task.parts.g.dataset cannot be set, because the task name 'reasoning_gym:chain_sum'",
        ),
    ],
    ids=str,
)
def test_errors_name_the_part_and_the_option(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Mixed(parts=parts)
    assert str(raised.value).startswith(message)


def test_a_sample_of_ids_shows_a_row_that_is_missing(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"{n}?", "target": str(n)}) for n in range(900)]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "held out?", "target": "1"}\n')
    found = []
    for name, kept in (("whole", rows), ("gap", [*rows[:300], "", *rows[301:]])):
        (tmp_path / name).write_text("\n".join(kept))
        files = {"train_file": str(tmp_path / name), "held_out_file": str(held_out)}
        task = mixed(jsonl=files, arithmetic={"train_size": 5000})
        found.append(sampled_ids(task.train()))
        assert 128 < len(found[-1]) <= 257
        assert sampled_ids(task.held_out())[1].startswith("jsonl/")  # type: ignore[union-attr]
    assert found[0] != found[1]
    assert found[0][0] == found[1][0] == 10_000
    few = Arithmetic(train_size=3).train()
    assert sampled_ids(few) == [3, *(prompt.id for prompt in few)]
