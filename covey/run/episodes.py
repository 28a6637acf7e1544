"""Write and read the episodes of rollouts in the records of a run, without importing torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from covey.episode import Episode
from covey.types import Rollout, Segment, Turn, VersionSpan

Row = dict[str, Any]


def episode_row(rollout: Rollout) -> Row:
    """Return the extra fields of a multi-turn rollout's row, or none for a single completion."""
    if rollout.episode is None:
        return {}
    return {
        "turns": [asdict(turn) for turn in rollout.turns],
        "segments": [asdict(segment) for segment in rollout.segments],
        "episode": asdict(rollout.episode),
    }


def read_episode(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a multi-turn rollout from its row.

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
    """Yield a line for each turn of a row, and whether the turn was trained.

    For a single-turn rollout, nothing is yielded.
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
