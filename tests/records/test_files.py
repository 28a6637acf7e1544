from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.errors import DiskError, RunError
from covey.records.files import append_line, json_line, whole_folder, write_text
from covey.records.records import read_lines

Row = dict[str, Any]
ROWS: list[Row] = [{"step": 1, "text": 'a"}\n{'}, {"step": 2, "text": ""}, {"step": 3, "x": [{}]}]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
rows = st.dictionaries(st.text(), values, max_size=4)

LIMITED = """
import json, resource, signal, sys
from pathlib import Path
from covey.errors import DiskError
from covey.records.files import append_line, whole_folder, write_text

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path, limit = Path(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    {code}
except DiskError as error:
    print(json.dumps(str(error)))
"""


def fails_at(limit: int, path: Path, code: str) -> str:
    """Run code in a process whose files cannot grow beyond a limit; return the DiskError."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED.format(code=code), str(path), str(limit)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    message: str = json.loads(done.stdout)
    return message


def all_files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def lines_of(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@given(st.lists(rows, max_size=5))
@settings(max_examples=40, deadline=None)
def test_appended_rows_read_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row]
) -> None:
    path = tmp_path_factory.mktemp("append") / "rows.jsonl"
    for row in rows:
        append_line(path, row)
    assert read_lines(path) == rows
    assert path.exists() == bool(rows)


def test_a_row_is_one_line_of_ascii_whatever_it_holds(tmp_path: Path) -> None:
    append_line(tmp_path / "a", {"text": "ü\n\u2028\x85\r"})
    data = (tmp_path / "a").read_bytes()
    assert data.isascii()
    assert data.splitlines(keepends=True) == [data]


@pytest.mark.parametrize("room", [0, 1, 20])
def test_a_row_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path, room: int) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(lines_of(ROWS))
    size = path.stat().st_size
    message = fails_at(size + room, path, 'append_line(path, {"text": "x" * 50})')
    assert path.read_bytes() == lines_of(ROWS)
    assert message.startswith(f"cannot write {path}: ")
    assert len(message.splitlines()) == 1


def test_a_row_that_fits_exactly_is_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    append_line(path, {"a": 1})
    limit = path.stat().st_size + len('{"b": 2}\n')
    message = fails_at(limit, path, 'append_line(path, {"b": 2}); append_line(path, {"c": 3})')
    assert message.startswith("cannot write")
    assert read_lines(path) == [{"a": 1}, {"b": 2}]


def test_appending_where_there_is_no_folder_is_a_disk_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"^cannot write .*: No such file or directory$"):
        append_line(tmp_path / "missing" / "steps.jsonl", {"step": 1})


@given(st.text())
@settings(max_examples=40, deadline=None)
def test_written_text_reads_back_and_nothing_else_is_left(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.mktemp("write")
    write_text(folder / "a.toml", "old")
    write_text(folder / "a.toml", text)
    assert (folder / "a.toml").read_bytes() == text.encode()
    assert all_files(folder) == ["a.toml"]


@pytest.mark.parametrize("length", [600, 100_000])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, length: int
) -> None:
    path = tmp_path / "config.toml"
    path.write_text("old")
    message = fails_at(500, path, f'write_text(path, "x" * {length})')
    assert path.read_text() == "old"
    assert all_files(tmp_path) == ["config.toml"]
    assert message.startswith(f"cannot write {path}: ")
    assert len(message.splitlines()) == 1


def test_a_failed_first_write_leaves_nothing(tmp_path: Path) -> None:
    fails_at(500, tmp_path / "config.toml", 'write_text(path, "x" * 600)')
    assert all_files(tmp_path) == []


def test_text_that_cannot_be_encoded_leaves_the_old_content_and_nothing_else(
    tmp_path: Path,
) -> None:
    write_text(tmp_path / "config.toml", "old")
    with pytest.raises((DiskError, UnicodeEncodeError)):
        write_text(tmp_path / "config.toml", "new \ud800")
    assert (tmp_path / "config.toml").read_text() == "old"
    assert all_files(tmp_path) == ["config.toml"]


def fill(folder: Path, content: str = "x") -> None:
    (folder / "deep").mkdir()
    (folder / "model.bin").write_text(content)
    (folder / "deep" / "state.bin").write_text(content)


def fill_and_raise(path: Path, error: BaseException) -> None:
    with whole_folder(path) as folder:
        fill(folder, "new")
        raise error


FILLED = ["000001", "000001/deep", "000001/deep/state.bin", "000001/model.bin"]


def test_a_folder_gets_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "000001") as folder:
        fill(folder)
        assert not (tmp_path / "000001").exists()
    assert all_files(tmp_path) == FILLED


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with whole_folder(tmp_path / "000001") as folder:
            fill(folder, content)
            (folder / content).touch()
    assert all_files(tmp_path) == sorted([*FILLED, "000001/new"])
    assert (tmp_path / "000001" / "model.bin").read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, DiskError])
def test_an_exception_passes_through_and_leaves_no_folder(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error, match=r"^mine$"):
        fill_and_raise(tmp_path / "000001", error("mine"))
    assert all_files(tmp_path) == []


def test_an_exception_leaves_the_folder_that_was_there(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "000001") as folder:
        fill(folder, "old")
    with pytest.raises(ValueError):
        fill_and_raise(tmp_path / "000001", ValueError())
    assert all_files(tmp_path) == FILLED
    assert (tmp_path / "000001" / "model.bin").read_text() == "old"


def test_a_failed_write_in_a_folder_is_a_disk_error_and_leaves_no_folder(tmp_path: Path) -> None:
    code = 'with whole_folder(path) as folder: (folder / "model.bin").write_bytes(b"x" * 600)'
    message = fails_at(500, tmp_path / "000001", code)
    assert message == f"cannot write {tmp_path / '000001'}: File too large"
    assert all_files(tmp_path) == []


def test_what_a_killed_process_left_of_a_folder_is_not_in_the_next(tmp_path: Path) -> None:
    (tmp_path / ".000001.partial").mkdir()
    (tmp_path / ".000001.partial" / "leftover").touch()
    with whole_folder(tmp_path / "000001") as folder:
        fill(folder)
    assert all_files(tmp_path) == FILLED


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "steps.jsonl") == []


def test_a_file_cut_anywhere_reads_as_the_rows_that_were_finished(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    data = lines_of(ROWS)
    ends = [len(lines_of(ROWS[:count])) - 1 for count in range(1, len(ROWS) + 1)]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        assert read_lines(path) == ROWS[: sum(end <= cut for end in ends)]


@pytest.mark.parametrize("broken", ["", "{", "{'a': 1}", '{"a": 1}{"b": 2}'])
def test_a_broken_line_that_is_not_the_last_is_an_error(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(f'{{"step": 1}}\n{broken}\n{{"step": 3}}\n')
    with pytest.raises(RunError, match=f"^{path} line 2 cannot be read: "):
        read_lines(path)


texts = st.text(st.characters(exclude_categories=()), max_size=9)  # with lone surrogates
lines = st.dictionaries(texts, values | texts | st.lists(texts, max_size=2), max_size=3)


@given(lines)
@settings(max_examples=100, deadline=None)
def test_a_line_holds_what_the_json_module_would_write(row: Row) -> None:
    line = json_line(row)
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert json.loads(line) == json.loads(json.dumps(row))


def test_a_line_holds_what_has_no_json_type_as_text() -> None:
    line = json_line({"a": Path("b"), "c": (1, float("inf")), "d": object})
    assert json.loads(line) == {"a": "b", "c": [1, float("inf")], "d": "<class 'object'>"}


def test_a_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen = tmp_path / "file", []

    def sync(handle: int) -> None:
        seen.append((target.exists(), os.fstat(handle).st_size))

    monkeypatch.setattr(os, "fsync", sync)  # the other tests do without
    write_text(target, "four")
    assert (False, 4) in seen
