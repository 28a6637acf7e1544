from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.errors import DataError
from covey.tasks import Jsonl

Row = dict[str, object]


def write(path: Path, rows: list[Row], ensure_ascii: bool = True) -> None:
    lines = [json.dumps(row, ensure_ascii=ensure_ascii) + "\n" for row in rows]
    path.write_bytes("".join(lines).encode())


def task_of(path: Path, **options: str) -> Jsonl:
    return Jsonl(train_file=str(path), held_out_file=str(path), **options)


def error_of(path: Path, **options: str) -> str:
    with pytest.raises(DataError) as raised:
        task_of(path, **options).train()
    message = str(raised.value)
    assert len(message.splitlines()) == 1
    assert message.startswith("task: ")
    assert str(path) in message
    return message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def test_a_line_becomes_a_prompt_with_its_other_fields_as_info(file: Path) -> None:
    write(file, [{"question": "1+1?", "answer": 2, "level": "easy", "tags": ["sum"]}])
    (prompt,) = task_of(file).train()
    assert prompt.messages == ({"role": "user", "content": "1+1?"},)
    assert prompt.text == "1+1?"
    assert prompt.answer == "2"
    assert prompt.info == {"level": "easy", "tags": ["sum"]}
    assert (prompt.id, prompt.task) == ("jsonl/train/1", "jsonl")


def test_each_split_reads_its_own_file_and_marks_its_ids(tmp_path: Path) -> None:
    write(tmp_path / "a", [{"question": "train?", "answer": "1"}])
    write(tmp_path / "b", [{"question": "held out?", "answer": "2"}])
    task = Jsonl(train_file=str(tmp_path / "a"), held_out_file=str(tmp_path / "b"))
    assert [(p.id, p.text) for p in task.train()] == [("jsonl/train/1", "train?")]
    assert [(p.id, p.text) for p in task.held_out()] == [("jsonl/held_out/1", "held out?")]


def test_question_and_answer_fields_can_have_other_names(file: Path) -> None:
    write(file, [{"problem": "p", "solution": "s", "question": "kept", "answer": "kept too"}])
    (prompt,) = task_of(file, question="problem", answer="solution").train()
    assert (prompt.text, prompt.answer) == ("p", "s")
    assert prompt.info == {"question": "kept", "answer": "kept too"}


def test_the_system_message_comes_first(file: Path) -> None:
    write(file, [{"question": "q", "answer": "a"}])
    (prompt,) = task_of(file, system="Be brief.").train()
    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q"},
    )
    assert prompt.text == "q"


def test_blank_lines_are_skipped_and_ids_are_line_numbers(file: Path) -> None:
    row = json.dumps({"question": "q", "answer": "a"})
    file.write_text(f"\n{row}\n  \n{row}")
    assert [p.id for p in task_of(file).train()] == ["jsonl/train/2", "jsonl/train/4"]


@given(
    rows=st.lists(
        st.fixed_dictionaries({"question": st.text(), "answer": st.text()}), min_size=1, max_size=4
    )
)
@settings(max_examples=50, deadline=None)
def test_any_text_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    write(file, rows)
    prompts = task_of(file).train()
    assert [{"question": p.text, "answer": p.answer} for p in prompts] == rows


def test_only_newlines_end_a_line_so_raw_unicode_separators_may_stand_in_text(file: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    write(file, [{"question": text, "answer": "a"}], ensure_ascii=False)
    assert [p.text for p in task_of(file).train()] == [text]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"question": "q", "answer": "a"}\n{"question": ', ":2 is not JSON"),
        ('{"question": "q", "answer": "a"}\n\n[1]\n', ":3 is not an object but list"),
        ("7\n", ":1 is not an object but int"),
        ('{"question": "q", "answers": "a"}', ":1 has no 'answer'; did you mean 'answers'?"),
        ('{"answer": "a", "zzz": 1}', ":1 has no 'question'; choose from answer, zzz"),
        ("{}", ":1 has no 'question'"),
        ("", " holds no prompts"),
        ("\n \n", " holds no prompts"),
    ],
)
def test_a_bad_line_is_named(file: Path, content: str, problem: str) -> None:
    file.write_text(content)
    assert f"{file}{problem}" in error_of(file)


def test_a_file_that_cannot_be_read_is_named(file: Path, tmp_path: Path) -> None:
    assert "No such file" in error_of(file)
    assert "directory" in error_of(tmp_path)
    file.write_bytes(b'{"question": "\xff", "answer": "a"}')
    assert "utf-8" in error_of(file)
