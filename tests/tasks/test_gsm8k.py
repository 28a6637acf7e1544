from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from covey.errors import ConfigError, DataError
from covey.tasks.gsm8k import Gsm8k, read_solution
from covey.tasks.task import THINK_THEN_ANSWER, bad_rows_of

ROWS = [
    {
        "question": "Ida packs 3 boxes of 400 nails. How many nails are that?",
        "answer": "There are 3*400=<<3*400=1200>>1200 nails.\n#### 1,200",
    },
    {
        "question": "A pen costs 2 euros and Tom has 5 euros. What is left?",
        "answer": "He keeps 5-2=<<5-2=3>>3 euros.\nThat is all.\n#### 3",
    },
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def task_of(path: Path, **options: Any) -> Gsm8k:
    return Gsm8k(train_file=str(path), held_out_file=str(path), **options)


def test_the_answer_follows_the_mark_and_the_solution_comes_before_it(file: Path) -> None:
    first, second = task_of(file).train()
    assert (first.target, second.target) == ("1200", "3")
    assert first.info == {"worked": "There are 3*400=1200 nails."}
    assert second.info == {"worked": "He keeps 5-2=3 euros.\nThat is all."}
    assert first.text == f"{ROWS[0]['question']}\n\n{THINK_THEN_ANSWER}"
    assert [p.id for p in task_of(file).held_out()] == ["gsm8k/held_out/1", "gsm8k/held_out/2"]


def test_instruction_and_system_are_as_given(file: Path) -> None:
    prompt = task_of(file, system="S", instruction="").train()[0]
    assert [m["content"] for m in prompt.messages] == ["S", ROWS[0]["question"]]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a\n#### 18", ("a", "18")),
        ("#### -7", ("", "-7")),
        ("x #### 1\n#### 2.50", ("x #### 1", "2.50")),
        ("a\n#### 1,234,567 ", ("a", "1234567")),
        ("no mark 18", None),
        ("a\n####", None),
        ("", None),
    ],
)
def test_worked_solutions_are_read(text: str, read: tuple[str, str] | None) -> None:
    assert read_solution(text) == read


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "q", "answer": "18"}, "has an 'answer' without #### and a number"),
        ({"question": "q"}, "has no 'answer' that is text"),
        ({"question": "q", "answer": 18}, "has no 'answer' that is text"),
        ({"answer": "#### 1"}, "has no 'question'"),
        ([1], "is not an object but list"),
    ],
    ids=str,
)
def test_a_bad_row_is_named_or_skipped(file: Path, row: Any, problem: str) -> None:
    file.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row))
    with pytest.raises(DataError) as raised:
        task_of(file).train()
    assert str(raised.value).startswith(f"task: {file}:2 {problem}")
    task = task_of(file, skip_bad_rows=True)
    assert len(task.train()) == 1
    assert [problem in line for line in bad_rows_of(task)] == [True]


def test_without_files_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*where: str, **options: Any) -> dict[str, list[dict[str, str]]]:
        asked.append(where)
        return {"train": ROWS, "test": ROWS[1:]}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = Gsm8k()
    assert ([p.target for p in task.train()], [p.target for p in task.held_out()]) == (
        ["1200", "3"],
        ["3"],
    )
    assert set(asked) == {("openai/gsm8k", "main")}


def test_without_the_network_local_files_are_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*where: str, **options: Any) -> None:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"'openai/gsm8k': ConnectionError: no route; .*local") as e:
        Gsm8k().train()
    assert len(str(e.value).splitlines()) == 1


def test_without_the_package_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs datasets: pip install covey\[tasks\]"):
        Gsm8k().train()


@pytest.mark.parametrize("files", [("a", ""), ("", "b")])
def test_one_file_of_two_is_a_config_error(files: tuple[str, str]) -> None:
    with pytest.raises(
        ConfigError, match="set both train_file and held_out_file, or leave out both"
    ):
        Gsm8k(train_file=files[0], held_out_file=files[1])
