from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.config.resolve_options import resolve_options
from covey.config.schema import Named
from covey.errors import ConfigError, DataError
from covey.tasks.rows import Jsonl
from covey.tasks.task import bad_rows_of, shared_prompts
from covey.types import Prompt

Row = dict[str, object]


def write(path: Path, rows: list[Row], ensure_ascii: bool = True) -> None:
    lines = [json.dumps(row, ensure_ascii=ensure_ascii) + "\n" for row in rows]
    path.write_bytes("".join(lines).encode())


def task_of(path: Path, **options: Any) -> Jsonl:
    return Jsonl(train_file=str(path), held_out_file=str(path), **options)


def error_of(path: Path, **options: Any) -> str:
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
    assert prompt.target == "2"
    assert prompt.info == {"level": "easy", "tags": ["sum"]}
    assert (prompt.id, prompt.task) == ("jsonl/train/1", "jsonl")


def test_each_split_reads_its_own_file_and_marks_its_ids(tmp_path: Path) -> None:
    write(tmp_path / "a", [{"question": "train?", "answer": "1"}])
    write(tmp_path / "b", [{"question": "held out?", "answer": "2"}])
    task = Jsonl(train_file=str(tmp_path / "a"), held_out_file=str(tmp_path / "b"))
    assert [(p.id, p.text) for p in task.train()] == [("jsonl/train/1", "train?")]
    assert [(p.id, p.text) for p in task.held_out()] == [("jsonl/held_out/1", "held out?")]


@pytest.mark.parametrize(
    ("row", "read"),
    [
        ({"prompt": "p", "target": "t"}, ("p", "t", {})),
        ({"question": "q", "target": "t", "x": 1}, ("q", "t", {"x": 1})),
        ({"messages": [{"role": "user", "content": "m"}], "answer": 7}, ("m", "7", {})),
        (
            {"question": "q", "prompt": "p", "answer": "a", "target": "t"},
            ("p", "t", {"question": "q", "answer": "a"}),
        ),
    ],
)
def test_the_first_default_column_of_a_row_is_used(file: Path, row: Any, read: Any) -> None:
    write(file, [row])
    (prompt,) = task_of(file).train()
    assert (prompt.text, prompt.target, prompt.info) == read


@pytest.mark.parametrize(
    ("old", "new"), [("question", "prompt"), ("messages", "prompt"), ("answer", "target")]
)
def test_an_old_option_is_an_error_that_names_the_new_one(old: str, new: str) -> None:
    section = Named.model_validate({"name": "jsonl", old: "x"})
    with pytest.raises(ConfigError, match=rf"config: task\.{old} was renamed to task\.{new}"):
        resolve_options(Jsonl, section, "task")


def test_prompt_and_target_columns_can_have_other_names(file: Path) -> None:
    write(file, [{"problem": "p", "solution": "s", "question": "kept", "answer": "kept too"}])
    (prompt,) = task_of(file, prompt="problem", target="solution").train()
    assert (prompt.text, prompt.target) == ("p", "s")
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
        st.fixed_dictionaries({"question": st.text().filter(str.strip), "answer": st.text()}),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=50, deadline=None)
def test_any_text_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    write(file, rows)
    prompts = task_of(file).train()
    assert [{"question": p.text, "answer": p.target} for p in prompts] == rows


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
        (
            '{"question": "q", "answers": "a"}',
            ":1 has no 'target' or 'answer'; did you mean 'answers'?",
        ),
        (
            '{"answer": "a", "zzz": 1}',
            ":1 has no 'prompt' or 'question' or 'messages'; choose from answer, zzz",
        ),
        ("{}", ":1 has no 'prompt'"),
        ('{"question": " \\n", "answer": "a"}', ":1 has an empty 'question'"),
        ('{"question": 7, "answer": "a"}', ":1 has 'question' that is not text but int"),
        ('{"question": "\\ud800", "answer": "a"}', ":1 has 'question' with a character that"),
        ('{"question": "q", "answer": null}', ":1 has 'answer' that is neither text nor a number"),
        ('{"question": "q", "answer": true}', ":1 has 'answer' that is neither text nor a number"),
        ('{"question": "q", "answer": ["a"]}', "neither text nor a number but list"),
        ('{"question": "q", "answer": "\\ud800"}', ":1 has 'answer' with a character that"),
        ('{"question": "q", "answer": NaN}', ":1 has 'answer' that is nan"),
        ("[" * 100_000, ":1 is not JSON"),
        ("", " has no prompts"),
        ("\n \n", " has no prompts"),
    ],
)
def test_a_bad_line_is_named(file: Path, content: str, problem: str) -> None:
    file.write_text(content)
    message = error_of(file)
    assert message.startswith(f"task: {file}")
    assert problem in message


def test_a_file_that_cannot_be_read_is_named(file: Path, tmp_path: Path) -> None:
    assert "No such file" in error_of(file)
    assert "directory" in error_of(tmp_path)
    file.write_bytes(b'{"question": "\xff", "answer": "a"}')
    assert "utf-8" in error_of(file)


def test_a_byte_order_mark_is_no_part_of_the_first_line(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "a"}')
    assert [p.text for p in task_of(file).train()] == ["q"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("x", "x"),
        ("", ""),
        ("4.0", "4.0"),
        (2, "2"),
        (-2.5, "-2.5"),
        (10**20, "1" + "0" * 20),
        (4.0, "4"),
        (-3.0, "-3"),
        (1e300, "1e+300"),
    ],
)
def test_answers_are_text_or_numbers(file: Path, answer: object, text: str) -> None:
    write(file, [{"question": "q", "answer": answer}])
    assert [p.target for p in task_of(file).train()] == [text]


def test_columns_are_renamed_and_what_they_name_is_kept(file: Path) -> None:
    write(file, [{"question": "q", "answer": 7, "nums": [3, 4], "level": 1}])
    task = task_of(file, columns={"nums": "numbers", "answer": "target"})
    (prompt,) = task.train()
    assert (prompt.target, prompt.info) == ("7", {"numbers": [3, 4], "target": 7, "level": 1})


def test_rows_of_nums_and_target_become_countdown_prompts(file: Path) -> None:
    write(file, [{"target": 98, "nums": [44, 19, 35]}])
    task = task_of(
        file,
        template="Make {target} out of {nums}.",
        columns={"nums": "numbers", "target": "target"},
        instruction="Use each once.",
    )
    (prompt,) = task.train()
    assert prompt.text == "Make 98 out of [44, 19, 35].\n\nUse each once."
    assert prompt.target == "98"
    assert prompt.info == {"numbers": [44, 19, 35], "target": 98}


def test_a_template_leaves_a_column_called_question_in_info(file: Path) -> None:
    write(file, [{"question": "kept", "topic": "x", "answer": "a"}])
    (prompt,) = task_of(file, template="About {topic}?").train()
    assert (prompt.text, prompt.info) == ("About x?", {"question": "kept", "topic": "x"})


def test_a_template_is_no_format_string(file: Path) -> None:
    write(file, [{"x": 1, "answer": "a"}])
    message = error_of(file, template="{x.real}")
    assert "has no 'x.real'" in message
    assert message.endswith("; in a template, write {{ and }} for braces")
    assert [p.text for p in task_of(file, template="{x} 100%").train()] == ["1 100%"]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (r"{x}? Write \boxed{}.", r"7? Write \boxed{}."),
        (r"\text{{\boxed{}}}", r"\text{\boxed{}}"),
        ("{{x}}", "{x}"),
        ("{{{x}}}", "{7}"),
        ("{{}}", "{}"),
        ("{x}}{ {", "7}{ {"),
    ],
)
def test_a_template_may_contain_braces(file: Path, template: str, text: str) -> None:
    write(file, [{"x": 7.0, "answer": "a"}])
    assert [p.text for p in task_of(file, template=template).train()] == [text]


def test_a_renamed_column_that_is_missing_makes_a_row_bad(file: Path) -> None:
    write(file, [{"question": "q", "answer": "a", "num": 1}])
    assert "has no 'nums'; did you mean 'num'?" in error_of(file, columns={"nums": "numbers"})


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_messages_are_taken_as_they_are(file: Path) -> None:
    messages = said(("user", "1"), ("assistant", "2"), ("user", "3"))
    write(file, [{"messages": messages, "answer": "a", "question": "kept"}])
    (prompt,) = task_of(file, prompt="messages").train()
    assert list(prompt.messages) == messages
    assert (prompt.text, prompt.info) == ("3", {"question": "kept"})


def test_system_and_instruction_go_around_messages_unless_they_have_a_system(file: Path) -> None:
    options = {"prompt": "messages", "system": "S", "instruction": "I"}
    rows = [said(("user", "q")), said(("system", "own"), ("user", "q"))]
    write(file, [{"messages": row, "answer": "a"} for row in rows])
    first, second = task_of(file, **options).train()
    assert list(first.messages) == said(("system", "S"), ("user", "q\n\nI"))
    assert list(second.messages) == said(("system", "own"), ("user", "q\n\nI"))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "an empty 'messages'"),
        (7, "'messages' that is not text but int"),
        (["hello"], "messages[0] that is not an object but str"),
        ([{"content": "q"}], "messages[0] whose role is None; choose from system, user"),
        ([{"role": "user"}], "'messages[0].content' that is not text but NoneType"),
        (said(("user", " ")), "an empty 'messages[0].content'"),
        (
            said(("user", "q"), ("assistant", "a")),
            "ends with the assistant; the last message must be",
        ),
        (said(("system", "s")), "ends with the system; the last message must be"),
    ],
    ids=str,
)
def test_bad_messages_are_named(file: Path, messages: Any, problem: str) -> None:
    write(file, [{"messages": messages, "answer": "a"}])
    assert problem in error_of(file)


BAD_AND_GOOD = 'nonsense\n{"question": "q", "answer": "a"}\n{"answer": "a"}\n[]\n'


def test_bad_rows_are_skipped_and_told_where_that_is_wanted(file: Path) -> None:
    file.write_text(BAD_AND_GOOD)
    task = task_of(file, skip_bad_rows=True)
    assert bad_rows_of(task) == []
    assert [p.id for p in task.train()] == ["jsonl/train/2"]
    assert [line.split()[1] for line in bad_rows_of(task)] == [f"{file}:{n}" for n in (1, 3, 4)]
    task.train()
    assert len(bad_rows_of(task)) == 3
    task.held_out()
    assert {split: len(lines) for split, lines in task.bad_rows.items()} == {
        "train": 3,
        "held_out": 3,
    }


def test_a_file_of_bad_rows_alone_is_an_error_that_counts_them(file: Path) -> None:
    file.write_text("x\ny\n")
    assert "has no prompts: 2 bad rows, the first: task: " in error_of(file, skip_bad_rows=True)


def test_what_was_skipped_is_no_option_and_no_part_of_equality(file: Path) -> None:
    section = Named.model_validate({"name": "jsonl", "train_file": "a", "held_out_file": "b"})
    options = resolve_options(Jsonl, section, "task")
    assert "bad_rows" not in options
    assert options["columns"] is None
    file.write_text(BAD_AND_GOOD)
    read, unread = task_of(file, skip_bad_rows=True), task_of(file, skip_bad_rows=True)
    read.train()
    assert read == unread
    assert repr(read) == repr(unread)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt": "m", "template": "{x}"},
            "task: set the option `prompt` or the option `template`, not both",
        ),
        (
            {"columns": {"a": "c", "b": "c"}},
            "task: the option `columns` gives the same name to two columns",
        ),
    ],
)
def test_options_that_contradict_each_other_are_config_errors(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        task_of(Path("x"), **options)


def test_only_rows_with_the_values_that_are_wanted_are_kept(file: Path) -> None:
    rows: list[Row] = [
        {"question": f"{n}?", "answer": n, "kind": kind} for n, kind in enumerate("abca")
    ]
    write(file, rows)
    task = task_of(file, only={"kind": ["a", "c"]})
    assert [p.target for p in task.train()] == ["0", "2", "3"]
    assert bad_rows_of(task) == []
    assert "has no prompts" in error_of(file, only={"kind": ["d"]})
    assert "has no 'knd'; did you mean 'kind'?" in error_of(file, only={"knd": ["a"]})


def test_one_file_is_split_by_a_hash_of_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+1?", "target": str(n + 1)} for n in range(300)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Jsonl(train_file=str(file), held_out_share=0.2)
    train, held_out = ({p.text for p in split} for split in (task.train(), task.held_out()))
    assert not train & held_out
    assert len(train | held_out) == 300
    assert 40 < len(held_out) < 80
    again = Jsonl(train_file=str(file), held_out_share=0.2, instruction="Think.").held_out()
    assert {p.text.removesuffix("\n\nThink.").removesuffix(" Think.") for p in again} == held_out
    with pytest.raises(ConfigError, match=r"held_out_share = 1\.5"):
        Jsonl(train_file=str(file), held_out_share=1.5)
    with pytest.raises(DataError, match="too few rows: with held_out_share"):
        Jsonl(train_file=str(file), held_out_share=1e-9).held_out()


def test_held_out_prompts_that_are_trained_on_are_counted() -> None:
    rows = [Prompt(id=str(n), task="t", target="", messages=({"role": "user", "content": text},))
            for n, text in enumerate(["One  plus\none?", "two?", "three?"])]  # fmt: skip
    same = replace(rows[0], id="9", messages=({"role": "user", "content": "one plus one?"},))
    assert shared_prompts(rows[:2], [same, rows[2]]) == [same]
