from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from covey.errors import ConfigError
from covey.tasks.arithmetic import Arithmetic
from covey.tasks.reasoning_gym import ReasoningGym
from covey.tasks.registry import TASKS, find_task
from covey.tasks.task import Generated, hash_fraction
from covey.types import Prompt


def test_the_tasks_are_these() -> None:
    assert sorted(TASKS) == [
        "arithmetic", "code", "countdown", "gsm8k", "hub", "instructions", "jsonl", "library", "mixed",
        "products", "reasoning_gym", "tools", "verifiers", "worlds",
    ]  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_a_registered_name_has_no_preset_options(name: str) -> None:
    assert find_task(name) == (TASKS[name], {})


def test_a_data_set_of_reasoning_gym_is_a_task_of_its_own() -> None:
    assert find_task("reasoning_gym:lcm") == (ReasoningGym, {"dataset": "lcm"})


def test_a_path_leads_to_a_task_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_tasks.py").write_text(
        "from covey.tasks.arithmetic import Arithmetic\ndef mine(size: int = 3):\n"
        "    return Arithmetic(train_size=size)\n"
    )
    monkeypatch.chdir(tmp_path)
    constructor, preset = find_task("my_own_tasks:mine")
    assert preset == {}
    assert constructor(size=4) == Arithmetic(train_size=4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "countdwn",
            "config: task.name = 'countdwn' is not a known task; did you mean 'countdown'?",
        ),
        ("zzz", "config: task.name = 'zzz' is not a known task; choose from arithmetic, code"),
        ("no_such_module:fn", "task.name = 'no_such_module:fn': cannot import 'no_such_module'"),
        ("covey.errors:nothing", "task.name = 'covey.errors:nothing': 'covey.errors' has no func"),
        ("os:system", "config: task.name = 'os:system' is not a Python function or class"),
        ("os:open", "config: task.name = 'os:open' is not a Python function or class"),
    ],
)
def test_an_unknown_name_says_what_is_known(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COVEY_TRUST", "no_such_module,covey.errors,os")
    with pytest.raises(ConfigError) as raised:
        find_task(name)
    assert str(raised.value).startswith(message)


def test_optional_packages_are_imported_only_when_they_are_used() -> None:
    code = (
        "import sys, covey.tasks\n"
        "print(sorted({'reasoning_gym', 'datasets', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_a_generated_sequence_asks_only_for_what_is_wanted() -> None:
    made = []

    def make(index: int) -> Prompt:
        made.append(index)
        return Prompt(id=str(index), task="t", messages=(), target="")

    prompts = Generated(10**12, make)
    assert [prompts[i].id for i in (5, -1)] == ["5", str(10**12 - 1)]
    assert [p.id for p in prompts[3:9:3]] == ["3", "6"]
    assert made == [5, 10**12 - 1, 3, 6]
    for index in (10**12, -(10**12) - 1):
        with pytest.raises(IndexError):
            prompts[index]


def test_shares_of_a_hash_are_even_and_take_any_text() -> None:
    shares = [hash_fraction(f"question {n}") for n in range(4000)]
    assert all(0 <= share < 1 for share in shares)
    assert all(
        900 < sum(low <= s < low + 0.25 for s in shares) < 1100 for low in (0, 0.25, 0.5, 0.75)
    )
    assert 0 <= hash_fraction("\ud800\x00") < 1
