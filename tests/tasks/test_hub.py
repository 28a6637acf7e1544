from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from covey.errors import ConfigError, DataError
from covey.tasks.hub import Hub
from covey.tasks.task import bad_rows_of

QUESTIONS = [f"What is {n} plus {n * n}?" for n in range(200)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "sums.parquet"
    answers = [n + n * n for n in range(200)]
    rows = {"question": QUESTIONS, "answer": answers, "level": [n % 3 for n in range(200)]}
    parquet.write_table(pyarrow.table(rows), path)
    return path


def test_a_parquet_file_is_split_by_question(table: Path) -> None:
    task = Hub(path=str(table), held_out_share=0.25)
    train, held_out = task.train(), task.held_out()
    assert {p.text for p in train} | {p.text for p in held_out} == set(QUESTIONS)
    assert {p.text for p in train} & {p.text for p in held_out} == set()
    assert 30 < len(held_out) < 70
    number = int(train[5].id.removeprefix("hub/train/"))
    assert train[5].text == QUESTIONS[number]
    assert train[5].target == str(number + number**2)
    assert train[5].info == {"level": number % 3}


def test_the_split_holds_whatever_is_said_around_the_question(table: Path) -> None:
    plain = Hub(path=str(table))
    dressed = Hub(path=str(table), system="S", instruction="Be brief.")
    assert [p.id for p in plain.held_out()] == [p.id for p in dressed.held_out()]
    assert dressed.held_out()[0].text.endswith("?\n\nBe brief.")


def test_a_larger_share_holds_out_the_same_and_more(table: Path) -> None:
    few, many = (
        {p.id for p in Hub(path=str(table), held_out_share=share).held_out()}
        for share in (0.1, 0.4)
    )
    assert few < many


def test_a_csv_file_is_read_with_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [["problem", "solution", "source"], *([f"q{n}", n, "mine"] for n in range(40))]
        )
    task = Hub(path=str(path), prompt="problem", target="solution", columns={"source": "from"})
    prompt = task.train()[0]
    assert prompt.text == f"q{prompt.target}"
    assert prompt.info == {"from": "mine"}


def test_an_empty_cell_of_a_csv_file_changes_no_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    lines = [f"q{n},{n},NA" for n in range(40)]
    path.write_text("\n".join(["question,answer,country", *lines, "unanswered,,NA"]))
    task = Hub(path=str(path), skip_bad_rows=True)
    prompts = [*task.train(), *task.held_out()]
    assert {p.text: p.target for p in prompts} == {f"q{n}": str(n) for n in range(40)}
    assert [p.info for p in prompts] == [{"country": "NA"}] * 40
    (bad,) = bad_rows_of(task)
    assert bad.startswith(f"task: {path} train[40] has 'answer' that is neither text nor a number")


@pytest.mark.parametrize("answer", ["NA", "None", "null", "nan"])
def test_words_that_other_tables_take_for_nothing_are_answers(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"question,answer\nq,{answer}\n")
    assert [p.target for p in Hub(path=str(path), held_out_share=1e-9).train()] == [answer]


def test_a_folder_has_the_splits_that_its_files_are_named_for(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(f'{{"question": "{split}?", "answer": "a"}}\n')
    task = Hub(path=str(folder), held_out_split="test")
    assert [p.text for p in task.train()] == ["train?"]
    assert [p.id for p in task.held_out()] == ["hub/held_out/0"]
    with pytest.raises(DataError, match=r"has no split 'tests'; did you mean 'test'\?$"):
        Hub(path=str(folder), held_out_split="tests").held_out()


def test_a_bad_row_is_named_by_split_and_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n{"question": "", "answer": "b"}\n')
    with pytest.raises(DataError) as raised:
        Hub(path=str(path)).train()
    assert str(raised.value) == f"task: {path} train[1] has an empty 'question'"
    task = Hub(path=str(path), skip_bad_rows=True, held_out_share=1e-9)
    assert [p.text for p in task.train()] == ["q"]
    assert len(bad_rows_of(task)) == 1


def test_a_bad_row_of_the_one_split_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [*({"question": f"q{n}", "answer": n} for n in range(60)), {"question": "", "answer": 1}]
    path.write_text("\n".join(map(json.dumps, rows)))
    task = Hub(path=str(path), skip_bad_rows=True)
    assert len(task.train()) + len(task.held_out()) == 60
    assert bad_rows_of(task) == [f"task: {path} train[60] has an empty 'question'"]


def test_a_column_that_is_not_there_is_named(table: Path) -> None:
    with pytest.raises(DataError, match=r"train\[0\] has no 'questions'; did you mean 'question'"):
        Hub(path=str(table), prompt="questions").train()


def test_too_few_rows_for_the_share_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(
        DataError, match=r"too few rows: with held_out_share = 1e-09, there are no held_out"
    ):
        Hub(path=str(path), held_out_share=1e-9).held_out()


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.docx"
    path.write_text("x")
    with pytest.raises(DataError, match=r"must end in one of \.csv, \.parquet, \.json, \.jsonl$"):
        Hub(path=str(path)).train()


def test_a_file_that_is_not_what_its_name_says_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.parquet"
    path.write_text("not parquet")
    with pytest.raises(DataError, match=r"^task: cannot load the dataset .*local folder") as raised:
        Hub(path=str(path)).train()
    assert len(str(raised.value)) < 600


def test_subset_and_revision_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load_dataset(*where: Any, **options: Any) -> dict[str, Any]:
        calls.append((where, options))
        return {"train": [{"question": q, "answer": 1} for q in QUESTIONS]}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    Hub(path="some/set", subset="main", revision="abc").train()
    Hub(path="some/set").train()
    assert calls == [
        (("some/set", "main"), {"revision": "abc"}),
        (("some/set", None), {"revision": None}),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out_share": 1.0}, "held_out_share = 1.0"),
        ({"held_out_split": "train"}, "are both 'train'"),
        ({"prompt": "m", "template": "t"}, "not both"),
    ],
)
def test_bad_options_are_config_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^task: .*{message}"):
        Hub(path="x", **options)
