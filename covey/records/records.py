"""Reads the files of a run folder, even if some lines are damaged.

Most functions skip unreadable lines, and report these lines to the user in one message per file.
Code that needs every line calls `read_lines`, which raises an error if a line is unreadable. The
classes below list the fields that Covey reads from each file. This module does not import torch.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from covey.errors import RunError, reason
from covey.types import Episode, Rollout, Segment, Turn, VersionSpan

Note = Callable[[str], None]
Row = dict[str, Any]
Shape = TypeAdapter[Any]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53)]


class _Row(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Step(_Row):
    """A line of steps.jsonl, in which all fields except the name of the reward are numbers."""

    step: Count
    reward_id: str | None = None
    __pydantic_extra__: dict[str, Number | bool | None]


class _Estimate(_Row):
    value: Number
    low: Number
    high: Number


class _Evaluation(_Row):
    """A line of eval.jsonl, which can contain more estimates, such as `pass@4`."""

    step: Count
    prompts: Count
    greedy: _Estimate
    parts: dict[str, Number]
    mean_tokens: Number | None = None
    unscored: Count = 0
    distinct_answers: Count | None = None
    best_constant: Number | None = None
    baselines: dict[str, dict[str, Number | str]] = {}
    __pydantic_extra__: dict[str, _Estimate | Number]


class _Turn(_Row):
    """A turn of a multi-turn rollout."""

    role: str
    segment: Count
    start: Count
    stop: Count
    text: str
    tool_calls: list[dict[str, Any]]
    reward: Number | None


class _Rollout(_Row):
    """A line of rollouts/*.jsonl, with defaults for fields that old files lack."""

    prompt_id: str
    prompt: str
    target: str
    text: str
    reward: Number | None
    success: bool | None
    advantage: Number | None
    parts: dict[str, Number] = {}
    finish: str = ""
    sample: Count = 0
    prompt_tokens: list[Count] = []
    tokens: list[Count] = []
    sampler_logp: list[Number] = []
    trained: bool | list[bool] = True
    policy_version: Count = 0
    reward_id: str = ""
    task: str = ""
    info: dict[str, Any] = {}
    turns: list[_Turn] = []
    segments: list[dict[str, Any]] = []
    episode: dict[str, Any] = {}
    feedback: str = ""
    teacher_prompt: list[Count] = []


class _Item(_Row):
    """A line of evaluations/*.jsonl."""

    prompt_id: str
    prompt: str
    target: str
    completion: str
    success: bool | None
    reward: Number | None = None
    parts: dict[str, Number] = {}
    tokens: Count
    finish: str


class _Environment(_Row):
    """environment.json, in which every field may be missing."""

    kind: str | None = None
    config: str | None = None
    threads: int | None = None
    command: list[str] = []
    device: str | None = None
    reward: str | None = None
    exact_logp: bool | None = None
    key: str | None = None
    packages: dict[str, str | None] = {}
    git: dict[str, Any] = {}


class _Saved(_Row):
    """A line of checkpoints.jsonl."""

    step: Count


STEP: Shape = TypeAdapter(_Step)
EVALUATION: Shape = TypeAdapter(_Evaluation)
ROLLOUT: Shape = TypeAdapter(_Rollout)
ITEM: Shape = TypeAdapter(_Item)
ENVIRONMENT: Shape = TypeAdapter(_Environment)
SAVED: Shape = TypeAdapter(_Saved)
ANY_OBJECT: Shape = TypeAdapter(Row)

MOST_TEXT = 16 << 20
"""Maximum size in bytes of a run's configuration, of its description and of other small files."""
MOST_DATA = 4 << 30
"""Maximum size in bytes of a run's data, such as the rollouts of one step."""
TAIL = 64 * 1024
"""Number of bytes at the end of a JSON Lines file that Covey reads to find the last line."""


def unsaid(text: str) -> None:
    """Ignore a note about damaged lines."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a JSON Lines file: the parsed row, or the reason why parsing failed."""

    raw: bytes
    row: Row | None
    problem: str = ""


def is_missing(path: Path) -> bool:
    """Whether a path does not exist; a broken symbolic link counts as existing."""
    return not path.exists() and not path.is_symlink()


def read_bytes(path: Path, most: int = MOST_DATA) -> bytes:
    """Return the content of a regular file of at most `most` bytes; raise RunError for any other
    path, such as a pipe or a link."""
    with open_file(path) as file:
        # A file that grows while it is read must not fill the memory either.
        data = file.read(most + 1)
    if len(data) > most:
        raise RunError(f"{path} cannot be read: it is larger than {most} bytes")
    return data


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Return the UTF-8 text of a regular file; raise RunError for any other path or content."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError:
        raise RunError(f"{path} cannot be read: it is not UTF-8 text") from None


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file; raise RunError for any other path, or if the file cannot be read.

    Every file of a run is read through this function, because a run folder may come from someone
    else: a pipe or a device would block or never end, and a link may lead to any file.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        link = error.errno == errno.ELOOP
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        why = "it is a link" if link else "it is missing" if missing else reason(error)
        raise RunError(f"{path} cannot be read: {why}") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        other = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise RunError(f"{path} cannot be read: it is {other}")
    with os.fdopen(handle, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise RunError(f"{path} cannot be read: {reason(error)}") from None


def scan_lines(path: Path, shape: Shape = ANY_OBJECT) -> list[Line]:
    """Read all JSON lines of a file, valid or not, except an unfinished last line."""
    if is_missing(path):
        return []
    *whole, last = read_bytes(path).split(b"\n")
    lines = [parse_line(path, number, raw, shape) for number, raw in enumerate(whole, start=1)]
    unfinished = parse_line(path, len(whole) + 1, last, shape)
    return lines if unfinished.row is None else [*lines, unfinished]


def parse_line(path: Path, number: int, raw: bytes, shape: Shape) -> Line:
    """Parse and validate a JSON line. The returned `Line` has the row or the error message."""
    try:
        return Line(raw, _checked(raw, shape))
    except ValueError as error:
        return Line(raw, None, f"{path} line {number} cannot be read: {error}")


def _checked(raw: bytes, shape: Shape) -> Row:
    try:
        # NaN and Infinity are not valid JSON, so they are read as null.
        row: Row = json.loads(raw.decode("utf-8"), parse_constant=lambda name: None)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    try:
        shape.validate_python(row)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"][0].lower() + first["msg"][1:]
        raise ValueError(f"{where}: {message}" if where else message) from None
    return row


def read_lines(path: Path, shape: Shape = ANY_OBJECT) -> list[Row]:
    """Read a JSON Lines file, except an unfinished last line; raise RunError for invalid lines."""
    rows = []
    for line in scan_lines(path, shape):
        if line.row is None:
            raise RunError(line.problem)
        rows.append(line.row)
    return rows


def usable_lines(path: Path, shape: Shape, note: Note) -> list[Row]:
    """Return the valid rows of a JSON Lines file; report invalid lines in one message."""
    try:
        lines = scan_lines(path, shape)
    except RunError as error:
        note(str(error))
        return []
    bad = [line.problem for line in lines if line.row is None]
    if bad:
        more = f" ({len(bad)} lines in all)" if len(bad) > 1 else ""
        note(f"{bad[0]}; the line is left out{more}")
    return [line.row for line in lines if line.row is not None]


def last_row(path: Path) -> Row:
    """Return the last valid row of a JSON Lines file; {} if the file's last 64 KiB contain no valid
    row."""
    try:
        with open_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().split(b"\n")
    except RunError:
        return {}
    for line in reversed(lines):
        try:
            return _checked(line, SAVED)
        except ValueError:
            continue
    return {}


def by_step(path: Path, rows: list[Row], note: Note) -> list[Row]:
    """Sort rows by step, and keep only the last row of each step.

    If `rows` is not sorted or contains a step twice, `note` is called with a message.
    """
    last = {row["step"]: row for row in rows}
    ordered = [last[step] for step in sorted(last)]
    if ordered != rows:
        note(f"{path}: steps are repeated or out of order; the last line of each step is used")
    return ordered


def read_object(path: Path, shape: Shape = ANY_OBJECT) -> Row:
    """Read a file that contains exactly one JSON object; raise RunError for any other content."""
    data = read_bytes(path, MOST_TEXT)
    try:
        return _checked(data, shape)
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}") from None


# Writes and reads the episodes of rollouts in the records of a run, without importing torch.


def episode_row(rollout: Rollout) -> Row:
    """Return the JSON fields that only multi-turn rollouts have, or {} for a single-turn
    rollout."""
    if rollout.episode is None:
        return {}
    return {
        "turns": [asdict(turn) for turn in rollout.turns],
        "segments": [asdict(segment) for segment in rollout.segments],
        "episode": asdict(rollout.episode),
    }


def read_episode(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the segments, turns and episode of a multi-turn rollout from its JSON row.

    Raise KeyError, TypeError or ValueError if the row is damaged.
    """
    episode = row["episode"]
    return {
        "segments": tuple(_segment(segment) for segment in row["segments"]),
        "turns": tuple(Turn(**{**t, "tool_calls": tuple(t["tool_calls"])}) for t in row["turns"]),
        "episode": Episode(
            **{
                **episode,
                "messages": tuple(episode["messages"]),
                "turn_rewards": tuple(episode["turn_rewards"]),
            }
        ),
    }


def _segment(row: Mapping[str, Any]) -> Segment:
    versions = tuple(VersionSpan(*span) for span in row["versions"])
    values = {name: tuple(value) for name, value in row.items() if name != "versions"}
    return Segment(**values, versions=versions)


def turn_lines(row: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield (line of text, whether the policy wrote the line) for the turns of a rollout.

    Nothing is yielded for a single-turn rollout.
    """
    segment = 0
    for turn in row.get("turns", ()):
        if turn["segment"] != segment:
            segment = turn["segment"]
            yield f"segment {segment + 1}: the chat template rewrote earlier text", False
        own = turn["role"] == "assistant"
        tokens = turn["stop"] - turn["start"]
        count = f"{tokens} tokens" if own else f"{tokens} tokens, not trained"
        reward = "" if turn["reward"] is None else f"  turn reward {turn['reward']:g}"
        yield f"{turn['role']} ({count}){reward}  {turn['text']}", own
        for call in turn["tool_calls"]:
            yield f"  {_called(call)}", own
    error = row.get("episode", {}).get("error")
    if error:
        yield f"environment: {error}", False


def _called(call: Mapping[str, Any]) -> str:
    if "error" in call:
        return f"malformed call: {call['error']}"
    function = call["function"]
    shown = ", ".join(f"{k}={v!r}" if k else repr(v) for k, v in function["arguments"].items())
    return f"call {function['name']}({shown})"
