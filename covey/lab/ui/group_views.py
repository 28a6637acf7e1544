"""Builds the API responses with the groups, rollouts and tokens of a training step."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json
from typing_extensions import TypedDict

from covey.embedded import MODELS
from covey.errors import RunError
from covey.lab.ui.find_runs import settings_cached
from covey.lab.ui.processes import covey_json
from covey.lab.ui.views import (
    LONGEST,
    READ_SECONDS,
    SEARCHED_SECONDS,
    Query,
    Site,
    rollouts_file,
)
from covey.records.folder import RunFolder
from covey.records.records import ROLLOUT, Number, Row, open_file, parse_line

# Indexes the rollout files: the offset and some fields of each line, so that a request spends
# only a fraction of a second on a file that may have a gigabyte.


MOST_LINE = 2**26
"""Maximum length of a line in bytes; longer lines are not shown."""
HEAD = 160
"""Number of characters of each prompt, and of each target, that the index stores."""
KEPT = 4
"""Maximum number of rollout files whose index stays in memory."""


@with_config(ConfigDict(strict=True))
class _Listed(TypedDict):
    """The fields that the index reads from a line, which do not include the long lists of
    log-probs."""

    prompt_id: str
    prompt: str
    target: str
    text: str
    reward: Number | None
    success: bool | None
    advantage: Number | None
    finish: NotRequired[str]
    tokens: NotRequired[list[Any]]


LISTED: TypeAdapter[_Listed] = TypeAdapter(_Listed)


class Entry(NamedTuple):
    """The fields of a rollout that the index stores."""

    line: int
    """Line number in the file, counted from 1."""
    offset: int
    size: int
    prompt_id: str
    prompt: str
    """The first `HEAD` characters of the prompt; `target` is cut in the same way."""
    target: str
    text: int
    """Hash of the completion's text; completions with the same hash count as identical."""
    reward: float | None
    success: bool | None
    finish: str
    tokens: int


@dataclass(slots=True)
class RolloutIndex:
    """The index of the lines of a rollout file that Covey has read so far."""

    path: Path
    entries: list[Entry] = field(default_factory=list)
    groups: dict[str, list[Entry]] = field(default_factory=dict)
    """Maps each prompt id to the index entries of the prompt's rollouts."""
    notes: list[str] = field(default_factory=list)
    done: bool = False
    share: float = 0.0
    """The fraction of the file that has been indexed so far."""
    _offset: int = 0
    _lines: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self, seconds: float) -> None:
        """Index more lines of the file, for at most the given number of seconds."""
        until = time.monotonic() + seconds
        with self._lock:
            with open_file(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(self._offset)
                while self._offset < size and time.monotonic() < until:
                    self._take(file)
            self.share = self._offset / size if size else 1.0
            self.done = self._offset >= size

    def _take(self, file: BinaryIO) -> None:
        raw = file.readline(MOST_LINE)
        size = len(raw)
        self._lines += 1
        if size == MOST_LINE and not raw.endswith(b"\n"):
            while (more := file.readline(MOST_LINE)) and not more.endswith(b"\n"):
                size += len(more)
            size += len(more)
            self._note(f"{self.path} line {self._lines} is longer than 64 MiB; it is left out")
        else:
            try:
                self._keep(LISTED.validate_json(raw), size)
            except ValidationError:
                if raw.endswith(b"\n"):
                    self._note(parse_line(self.path, self._lines, raw, ROLLOUT).problem)
                else:
                    self._note(f"{self.path}: its last line is cut off; it is left out")
        self._offset += size

    def _keep(self, row: _Listed, size: int) -> None:
        group = self.groups.setdefault(row["prompt_id"], [])
        prompt, target = row["prompt"][:HEAD], row["target"][:HEAD]
        if group:  # share equal texts: a file may have a hundred thousand lines
            first = group[0]
            prompt = first.prompt if first.prompt == prompt else prompt
            target = first.target if first.target == target else target
        entry = Entry(
            line=self._lines,
            offset=self._offset,
            size=size,
            prompt_id=group[0].prompt_id if group else row["prompt_id"],
            prompt=prompt,
            target=target,
            text=hash(row["text"]),
            reward=row["reward"],
            success=row["success"],
            finish=sys.intern(row.get("finish", "")),
            tokens=len(row.get("tokens", ())),
        )
        group.append(entry)
        self.entries.append(entry)

    def _note(self, text: str) -> None:
        if len(self.notes) < 5:
            self.notes.append(text)

    def row(self, line: int) -> Row:
        place = bisect_left(self.entries, line, key=lambda entry: entry.line)
        found = self.entries[place : place + 1]
        row = None
        if found and found[0].line == line:
            with open_file(self.path) as file:
                file.seek(found[0].offset)
                row = _row(file.read(found[0].size))
        if row is None:
            raise RunError(f"line {line} of the file {self.path} cannot be read")
        return row

    def search(self, words: str, seconds: float) -> tuple[set[int], bool]:
        """Return the line numbers of rollouts whose prompt, target or completion contains `words`.

        The second return value is True if the search reached the end of the file within `seconds`.
        """
        until = time.monotonic() + seconds
        found: set[int] = set()
        # JSON escapes non-ASCII characters. A match in the raw bytes may be in another field.
        escaped = re.compile(re.escape(json.dumps(words)[1:-1].encode()), re.IGNORECASE)
        plain = re.compile(re.escape(words), re.IGNORECASE)
        with open_file(self.path) as file:
            for entry in list(self.entries):
                if time.monotonic() > until:
                    return found, False
                file.seek(entry.offset)
                raw = file.read(entry.size)
                row = _row(raw) if escaped.search(raw) or not words.isascii() else None
                if row and any(plain.search(row[name]) for name in ("prompt", "target", "text")):
                    found.add(entry.line)
        return found, True


def _row(raw: bytes) -> Row | None:
    try:
        row: Row = from_json(raw, allow_inf_nan=False)
        ROLLOUT.validate_python(row)
    except (ValueError, ValidationError):
        return None
    return row


def rollout_index(path: Path) -> RolloutIndex:
    """Return the index of a rollout file. The last `KEPT` indexes stay in memory."""
    try:
        found = path.stat()
    except OSError:
        raise RunError(f"the run has no file {path.name} with rollouts") from None
    return _index(path, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=KEPT)
def _index(path: Path, size: int, changed: int) -> RolloutIndex:
    return RolloutIndex(path)


PAGE = 40
"""The number of groups in one response of the server."""
SHOWN = 64
"""The maximum number of a group's rollouts that the server sends with their texts."""
SORTS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "reward": lambda row: (row["mean"] is None, row["mean"] or 0.0),
    "spread": lambda row: -(row["spread"] or 0.0),
    "length": lambda row: -row["length"],
}
"""Maps each way to sort groups, such as by mean reward, to the function that returns a sort key."""
TOKEN_FIELDS = ("advantage", "ratio", "entropy", "kl", "clipped", "gradient", "logp", "old_logp")
"""Fields of tokens that are unknown until `covey explain` repeats the training step."""


def groups(site: Site, query: Query) -> dict[str, Any]:
    """Filter and sort the groups of a step, and return one page of groups."""
    index = rollout_index(rollouts_file(site, query))
    index.update(READ_SECONDS)
    words = query.get("search", "").strip()
    lines, searched = index.search(words, SEARCHED_SECONDS) if words else (None, True)
    kept = [
        group
        for group in list(index.groups.values())
        if _kept(group, query.get("filter", "all"))
        and (lines is None or any(entry.line in lines for entry in group))
    ]
    if order := SORTS.get(query.get("sort", "")):
        kept.sort(key=lambda group: order(summary(group)))
    start = max(0, int(query.get("start") or 0))
    return {
        "groups": [summary(group) for group in kept[start : start + PAGE]],
        "start": start,
        "page": PAGE,
        "total": len(kept),
        "all": len(index.groups),
        "rollouts": len(index.entries),
        "read": index.share,
        "partial": not index.done,
        "searched": searched,
        "notes": index.notes,
    }


def summary(group: Sequence[Entry]) -> dict[str, Any]:
    rewards = [entry.reward for entry in group if entry.reward is not None]
    # Plain sums are used for speed, because a step may have thousands of groups. They are of
    # differences from one reward, so that equal rewards have exactly this mean and no spread.
    mean = spread = None
    if rewards:
        offsets = [reward - rewards[0] for reward in rewards]
        offset = sum(offsets) / len(rewards)
        mean = rewards[0] + offset
        spread = math.sqrt(sum((each - offset) ** 2 for each in offsets) / len(rewards))
    return {
        "prompt_id": group[0].prompt_id,
        "prompt": group[0].prompt,
        "target": group[0].target,
        "line": group[0].line,
        "size": len(group),
        "correct": sum(entry.success is True for entry in group),
        "mean": mean,
        "spread": spread,
        "rewards": [entry.reward for entry in group][:SHOWN],
        "length": sum(entry.tokens for entry in group) / len(group),
        "cut": sum(entry.finish == "length" for entry in group),
    }


def _kept(group: Sequence[Entry], name: str) -> bool:
    if name == "all":
        return True
    correct = sum(entry.success is True for entry in group)
    values = {entry.reward for entry in group}
    return {
        "mixed": len(values) > 1,
        "flat": len(values) == 1,
        "correct": correct == len(group),
        "wrong": correct == 0,
        "cut": any(entry.finish == "length" for entry in group),
        "unscored": None in values,
    }.get(name, True)


def group(site: Site, query: Query) -> dict[str, Any]:
    index = rollout_index(rollouts_file(site, query))
    index.update(READ_SECONDS)
    while not index.done and query.get("prompt_id") not in index.groups:
        index.update(READ_SECONDS)
    mine = list(index.groups.get(query.get("prompt_id", ""), ()))
    if not mine:
        raise RunError("this step has no group for the requested prompt")
    rows = []
    for entry in mine[:SHOWN]:
        with suppress(RunError):  # a field that lists do not need is damaged
            rows.append((entry.line, index.row(entry.line)))
    if not rows:
        raise RunError("the rollouts of this group cannot be read")
    return {
        "prompt_id": mine[0].prompt_id,
        "prompt": cut(rows[0][1]["prompt"]),
        "target": cut(rows[0][1]["target"]),
        "rollouts": [_shown(line, row) for line, row in rows],
        "left_out": len(mine) - len(rows),
    }


def cut(text: str, most: int = LONGEST) -> dict[str, Any]:
    """Return the beginning of a text, and the number of omitted characters."""
    return {"text": text[:most], "more": max(0, len(text) - most)}


def _shown(line: int, row: Mapping[str, Any], most: int = LONGEST) -> dict[str, Any]:
    kept = ("sample", "reward", "success", "advantage", "finish", "policy_version")
    return {
        "line": line,
        **{name: row.get(name) for name in kept},
        "parts": row.get("parts", {}),
        "tokens": len(row.get("tokens", ())),
        "text": cut(row["text"], most),
        "turns": [_turn(turn, most) for turn in row.get("turns", ())],
        "error": row.get("episode", {}).get("error"),
    }


def _turn(turn: Mapping[str, Any], most: int) -> dict[str, Any]:
    calls = [_call(call) for call in turn["tool_calls"]]
    kept = ("role", "segment", "start", "stop", "reward")
    return {**{name: turn[name] for name in kept}, "text": cut(turn["text"], most), "calls": calls}


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return f"call that cannot be read: {call.get('error', '')}"
    return f"{function.get('name')}({function.get('arguments')})"


def rollout(site: Site, query: Query) -> dict[str, Any]:
    """Return one rollout with its whole text and all known data of each token."""
    place, line = site.place(query), int(query.get("line") or 0)
    index = rollout_index(rollouts_file(site, query))
    while not index.done and (not index.entries or index.entries[-1].line < line):
        index.update(READ_SECONDS)
    row = index.row(line)
    tokens, run = row.get("tokens", []), RunFolder(place.path)
    texts = token_texts(run, settings_cached(run), tokens)
    trained = row.get("trained", True)
    missing = [] if texts else ["the texts of tokens (no tokenizer.json in a checkpoint)"]
    logp = row.get("sampler_logp", [])
    if len(logp) != len(tokens):
        logp, missing = [], [*missing, "log-probabilities of the engine"]
    explained = site.jobs.status(_explain_key(site, query))
    return {
        **_shown(line, row, most=4 * 2**20),
        "prompt": cut(row["prompt"]),
        "target": cut(row["target"]),
        "ids": tokens,
        "texts": texts or [f"[{token}]" for token in tokens],
        "trained": [trained] * len(tokens) if isinstance(trained, bool) else trained,
        "sampler_logp": logp,
        "missing": missing,
        "explain": {name: value for name, value in explained.items() if name != "result"},
        "explained": explained.get("result", {}).get(str(line)),
    }


def _explain_key(site: Site, query: Query) -> tuple[str, ...]:
    return ("explain", site.place(query).id, str(int(query.get("step") or 0)))


def start_explain(site: Site, query: Query) -> dict[str, Any]:
    """Start `covey explain` in another process, to compute the token data of a step."""
    place, step = site.place(query), rollouts_file(site, query).stem
    work = partial(_explain, str(place.path), int(step))
    key = _explain_key(site, query)
    site.jobs.start(key, work)
    found = site.jobs.status(key)
    return {name: value for name, value in found.items() if name != "result"}


def _explain(path: str, step: int) -> dict[str, Any]:
    found = covey_json("explain", path, "--step", str(step), "--seconds", "0")
    return {
        str(rollout["line"]): {
            name: [token.get(name) for token in rollout["tokens"]] for name in TOKEN_FIELDS
        }
        for rollout in found["rollouts"]
    }


# The text of each token of a rollout, from the tokenizer that a run saved with its checkpoints.

FILE = "tokenizer.json"


def token_texts(
    run: RunFolder, settings: dict[str, Any], tokens: Sequence[int]
) -> list[str] | None:
    for path in _tokenizers(run, settings):
        tokenizer = _loaded(str(path), path.stat().st_mtime_ns)
        if tokenizer is not None:
            return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    return None


def _tokenizers(run: RunFolder, settings: dict[str, Any]) -> Iterator[Path]:
    named = settings.get("model", {}).get("path")
    folders = [folder for _, folder in reversed(run.checkpoints())]
    if isinstance(named, str) and named:
        folders.append(MODELS.get(named, Path(named)))
    yield from (folder / FILE for folder in folders if (folder / FILE).is_file())


@lru_cache(maxsize=4)
def _loaded(path: str, changed: int) -> Any:
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(path)
    except Exception:  # the library raises plain Exception for a file that it cannot read
        return None
