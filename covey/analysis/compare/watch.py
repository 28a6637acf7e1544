"""What a person sees while runs go on: a line for each in a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from covey.analysis.compare.jobs import Job
from covey.analysis.compare.record import read_outcome
from covey.analysis.compare.run import Running, Status
from covey.escape import printable

TAIL_BYTES = 16_384
PLAIN_SECONDS = 10.0
"""Without a terminal, the runs in progress are told this often."""
STYLES: dict[Status, str] = {"done": "green", "failed": "red", "stopped": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a run is."""

    step: int = 0
    accuracy: float | None = None
    """Of the latest evaluation."""
    spent: float = 0.0
    """Share of its budget."""


def standing(job: Job, budget: str, amount: int) -> Standing:
    """Read where a run is from the last lines of its files."""
    step = _last(job.path / "steps.jsonl")
    evaluation = _last(job.path / "eval.jsonl")
    used = step.get("step" if budget == "steps" else budget, 0)
    return Standing(
        step=step.get("step", 0),
        accuracy=evaluation["greedy"]["value"] if evaluation else None,
        spent=min(1.0, used / amount),
    )


def _last(file: Path) -> dict[str, Any]:
    """Return the last whole line of a file of JSON lines; no file has none."""
    try:
        with file.open("rb") as data:
            data.seek(max(0, file.stat().st_size - TAIL_BYTES))
            lines = data.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines[:-1]):  # what follows the last end of line is not whole
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return {}  # a line longer than what was read, or damaged
        return row if isinstance(row, dict) else {}
    return {}


def _shown(at: Standing) -> str:
    return "-" if at.accuracy is None else f"{at.accuracy:.1%}"


class Watching(Protocol):
    """Somebody who looks at the runs several times a second."""

    def __call__(self, running: Running) -> None:
        """Look."""


@dataclass(slots=True, kw_only=True)
class PlainWatch:
    """Lines for logs and pipes: when a run starts and ends, and now and then."""

    console: Console
    budget: str
    amount: int
    told: dict[str, Status] = field(default_factory=dict)
    spoke: float = field(default_factory=time.monotonic)

    def __call__(self, running: Running) -> None:
        """Tell what has changed."""
        for job in running.jobs:
            status = running.status[job.folder]
            if status != self.told.get(job.folder, "waiting"):
                self.told[job.folder] = status
                self._say(job, status)
        if time.monotonic() - self.spoke > PLAIN_SECONDS:
            self.spoke = time.monotonic()
            for job in running.of("running"):
                self._say(job, "running")

    def _say(self, job: Job, status: Status) -> None:
        at = standing(job, self.budget, self.amount)
        ended = read_outcome(job.path)
        why = f"  {ended.error}" if ended is not None and ended.error else ""
        line = f"{job.arm} seed {job.seed}: {status}  step {at.step}  right {_shown(at)}{why}"
        self.console.print(line, markup=False, highlight=False)


@dataclass(slots=True, kw_only=True)
class LiveWatch:
    """A table that stays in its place."""

    live: Live
    budget: str
    amount: int
    looked: float = 0.0

    def __call__(self, running: Running) -> None:
        """Show where all runs are, twice a second."""
        ended = not running.of("running") and not running.of("waiting")
        if time.monotonic() - self.looked < 0.5 and not ended:
            return
        self.looked = time.monotonic()
        self.live.update(self._table(running), refresh=True)

    def _table(self, running: Running) -> Table:
        table = Table(title="stopping: steps in progress are saved" if running.stopping else None)
        for heading in ("arm", "seed", "", "spent", "step", "right"):
            table.add_column(heading, justify="left" if heading in ("arm", "") else "right")
        for job in running.jobs:
            status = running.status[job.folder]
            at = standing(job, self.budget, self.amount)
            row = (
                Text(printable(job.arm)),
                str(job.seed),
                status,
                f"{at.spent:.0%}",
                str(at.step),
                _shown(at),
            )
            table.add_row(*row, style=STYLES.get(status, "dim" if status == "waiting" else ""))
        return table
