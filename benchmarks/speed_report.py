"""Results of the speed benchmark: rows by section, kept in a file and printed as tables."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column of a section's table."""

    heading: str
    key: str
    form: str = ""


SHAPE, WHO = Column("shape", "shape"), Column("who", "who")
COMPLETIONS, RAN = Column("completions", "completions", ","), Column("what was run", "ran")
SPEED = Column("tokens/s", "tokens_per_s", ",.0f")
SECONDS = Column("seconds", "seconds", ".3f")
RATIO = Column("covey is faster by", "ratio", ".1f")
PEAKS = (Column("peak GiB", "peak_gib", ".1f"), Column("reserved GiB", "reserved_gib", ".1f"))

COLUMNS: Mapping[str, tuple[Column, ...]] = {
    "sampler": (
        SHAPE, COMPLETIONS, WHO, SPEED, Column("best", "best_tokens_per_s", ",.0f"),
        Column("ms per step", "step_ms", ".2f"), Column("floor, ms", "floor_ms", ".2f"),
        Column("times floor", "times_floor", ".1f"), RATIO, RAN,
    ),
    "float8": (
        SHAPE, COMPLETIONS, Column("engine.dtype", "who"), SPEED,
        Column("best", "best_tokens_per_s", ",.0f"), Column("ms per step", "step_ms", ".2f"),
        Column("floor, ms", "floor_ms", ".2f"), Column("times floor", "times_floor", ".1f"),
        Column("new weights, ms", "refresh_ms", ".1f"), *PEAKS, RAN,
    ),
    "sampler_long": (
        SHAPE, COMPLETIONS, WHO, Column("length", "length", ","), SPEED,
        Column("ms per step", "step_ms", ".2f"), Column("floor, ms", "floor_ms", ".2f"),
        Column("times floor", "times_floor", ".1f"), Column("pauses", "preemptions"), *PEAKS,
        Column("forecast GiB", "forecast_gib", ".1f"), RAN,
    ),
    "update": (
        SHAPE, WHO, SPEED, Column("MFU", "mfu", ".1%"), Column("work", "work", ".1%"), *PEAKS,
        RATIO, RAN,
    ),
    "step": (
        SHAPE, WHO, SECONDS, Column("fastest", "fastest", ".3f"),
        Column("rollout", "rollout", ".3f"), Column("update", "update", ".3f"), SPEED, *PEAKS,
        RATIO, RAN,
    ),
    "ragged": (
        SHAPE, WHO, COMPLETIONS, Column("slots", "slots"), Column("tokens", "tokens", ","),
        Column("mean length", "mean_length", ".0f"), SECONDS, SPEED,
        Column("refill is faster by", "ratio", ".2f"), RAN,
    ),
    "linear": (
        SHAPE, COMPLETIONS, SECONDS, SPEED, Column("ms per completion", "ms_per_completion", ".2f"),
    ),
    "seed_shape": (
        SHAPE, WHO, Column("steps", "steps"), SECONDS, Column("rollout", "rollout", ".3f"),
        Column("update", "update", ".3f"), Column("start-up, s", "startup", ".1f"),
        Column("total, minutes", "minutes", ".1f"), RAN,
    ),
    "startup": (
        SHAPE, Column("kernel cache", "cache"), COMPLETIONS,
        Column("model ready, s", "ready_s", ".2f"),
        Column("first token, s", "first_token_s", ".2f"),
        Column("first graph replayed, s", "first_graph_s", ".2f"), RAN,
    ),
    "numerics": (
        SHAPE, Column("dtype", "dtype"), Column("compared", "who"), COMPLETIONS,
        Column("tokens", "tokens", ","), Column("entropy, nats", "entropy", ".2f"),
        Column("mean difference", "mean", ".1e"), Column("largest", "largest", ".1e"),
        Column("completions that differ", "differ"), RAN,
    ),
}  # fmt: skip
"""Table columns of each section, in running order."""


@dataclass(slots=True)
class Report:
    """Collects rows and writes each to disk at once."""

    path: Path | None
    environment: Mapping[str, Any]
    sections: dict[str, dict[str, Any]]

    @staticmethod
    def at(path: Path | None, environment: Mapping[str, Any]) -> Report:
        """Open a results file; sections that are measured again are replaced, others stay."""
        known = load(path)["sections"] if path is not None and path.exists() else {}
        return Report(path, environment, known)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Start a section; an error becomes one of its rows, and the next section still runs."""
        print(f"== {name}", flush=True)
        started = time.perf_counter()
        found: dict[str, Any] = {"environment": dict(self.environment), "rows": []}
        self.sections[name] = found
        try:
            yield
        except Exception as error:
            self.row(name, who="covey", missing=reason(error))
        found["seconds"] = round(time.perf_counter() - started, 1)
        self._write()
        print(f"   {found['seconds']} s", flush=True)

    def row(self, section: str, **values: Any) -> None:
        """Add a row."""
        self.sections[section]["rows"].append(values)
        print("   " + "  ".join(f"{k} {v}" for k, v in values.items() if v is not None), flush=True)
        self._write()

    def _write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        ordered = {name: self.sections[name] for name in COLUMNS if name in self.sections}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"sections": ordered}, indent=1) + "\n")
        part.replace(self.path)  # a time limit may stop the process at any moment


def reason(error: BaseException) -> str:
    """Return the last line of an error, or of a failed process's output."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line] or lines
    return f"{type(error).__name__}: {errors[-1].strip()[:300] if errors else ''}"


def load(path: Path) -> dict[str, Any]:
    """Read a file of results."""
    return dict(json.loads(path.read_text()))


def table(section: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a section's rows as lines of Markdown, without empty columns."""
    columns = [c for c in COLUMNS[section] if any(row.get(c.key) is not None for row in rows)]
    if any(row.get("missing") for row in rows):
        columns.append(Column("missing", "missing"))
    lines = [
        "| " + " | ".join(column.heading for column in columns) + " |",
        "|" + "---|" * len(columns),
    ]
    for row in rows:
        cells = [_cell(row.get(column.key), column.form) for column in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    return str(value).replace("|", "/") if isinstance(value, str) else format(value, form)


def markdown(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return all tables, each with date, machine and versions."""
    lines: list[str] = []
    for name in COLUMNS:
        if name not in sections:
            continue
        found = sections[name]
        lines += [f"**{name}** ({_where(found['environment'])})", "", *table(name, found["rows"])]
        lines.append("")
    return "\n".join(lines)


def _where(environment: Mapping[str, Any]) -> str:
    packages = environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers"))
    rate = f"{environment['copy_bytes_per_s'] / 1e12:.2f} TB/s copied"
    return f"{environment['started'][:10]}, {environment['machine']}, {versions}, {rate}"
