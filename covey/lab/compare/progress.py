"""Shows the progress of a comparison's runs, as a live table or as plain lines."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from covey.escape import printable
from covey.lab.compare.comparison_folder import read_outcome
from covey.lab.compare.launch import Job, Running, Status
from covey.records.metric_registry import value_text
from covey.records.records import last_row

LIVE_SECONDS = 0.5
PLAIN_SECONDS = 10.0
"""LIVE_SECONDS is the time between updates of the table in a terminal, and PLAIN_SECONDS is the
time between a run's progress lines in a log.
"""
STYLES: dict[Status, str] = {
    "waiting": "dim",
    "running": "",
    "done": "green",
    "failed": "red",
    "stopped": "yellow",
}


def run_progress(job: Job, budget: str, amount: int) -> tuple[str, str, str]:
    """Return three texts: the used share of the budget, the step, and the newest evaluation."""
    step = last_row(job.path / "steps.jsonl")
    evaluation = last_row(job.path / "eval.jsonl")
    spent = min(1.0, step.get("step" if budget == "steps" else budget, 0) / amount)
    found = [
        f"{label} {value_text(name, evaluation[name]['value'])}"
        for name, label in (("greedy", "accuracy"), ("reward", "reward"))
        if name in evaluation
    ]
    return f"{spent:.0%}", str(step.get("step", 0)), ", ".join(found) or "not evaluated"


@dataclass(slots=True, kw_only=True)
class Progress:
    """Shows progress as a live table in a terminal, and as plain lines in logs and pipes."""

    console: Console
    budget: str
    amount: int
    live: Live | None = None
    shown: dict[str, Status] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)

    def __call__(self, running: Running) -> None:
        """Update the live table every half second or, without a table, print lines about runs."""
        elapsed = time.monotonic() - self.last
        if self.live is not None:
            ended = not running.having("running") and not running.having("waiting")
            if elapsed >= LIVE_SECONDS or ended:
                self.last = time.monotonic()
                self.live.update(self._table(running), refresh=True)
            return
        if again := elapsed > PLAIN_SECONDS:
            self.last = time.monotonic()
        for job in running.jobs:
            status = running.status[job.folder]
            changed = status != self.shown.get(job.folder, "waiting")
            if changed or (again and status == "running"):
                self.shown[job.folder] = status
                self._print(job, status)

    def _print(self, job: Job, status: Status) -> None:
        spent, step, result = run_progress(job, self.budget, self.amount)
        outcome = read_outcome(job.path) if status == "failed" else None
        error = f": {outcome.error}" if outcome is not None else ""
        line = f"{job.arm} seed {job.seed}: {status}, {spent}, step {step}, {result}"
        self.console.print(line + error)

    def _table(self, running: Running) -> Table:
        title = "stopping: each run saves its current step" if running.stopping else None
        table = Table(title=title)
        for heading in ("arm", "seed", "", "spent", "step", "held-out"):
            table.add_column(heading, justify="left" if heading in ("arm", "") else "right")
        for job in running.jobs:
            status = running.status[job.folder]
            progress = run_progress(job, self.budget, self.amount)
            cells = (Text(printable(job.arm)), str(job.seed), status, *progress)
            table.add_row(*cells, style=STYLES[status])
        return table
