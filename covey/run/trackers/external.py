"""Base classes for trackers that send metrics to other packages, such as W&B.

The base classes choose what is logged, and when.
"""

from __future__ import annotations

import importlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from covey.errors import RunError
from covey.escape import printable
from covey.run.folder import RunFolder
from covey.run.history import is_number
from covey.run.records import read_object
from covey.run.trackers.protocol import Tracker

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation

SHOWN = 8
"""Number of highest-reward and of lowest-reward completions in a table."""
LONGEST = 4000
"""Maximum number of characters of a text in a table; the run folder has the whole text."""
COLUMNS = ("prompt", "completion", "target", "reward", "success", "advantage", "finish", "parts")
PROJECT = "covey"
SAVED_BYTES = 255
"""Size of NAME.json in bytes. The JSON text is padded with spaces to a fixed size, so that every
write replaces the whole file.
"""


class ExternalTracker(Tracker):
    """A tracker that sends metrics to another package, such as W&B.

    Subclasses open the package's log, write numbers and tables, and close the log.
    """

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        self.run = run
        self.settings = settings
        self.samples_every: int = settings.get("save", {}).get("samples_every", 0)

    def open(self, done: int) -> None:
        """Open the package's log, to log the steps after step `done`."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a training step."""

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Log a table of completions with the columns in `COLUMNS`.

        By default, log no completions.
        """

    def is_new(self, event: str, step: int) -> bool:
        """Return False if the training loop has already reported this event for this step.

        After a resume, the training loop reports some events a second time.
        """
        return True

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        """Open the tracker."""
        self.open(done)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Log all numbers of a step."""
        self._log("step", metrics["step"], finite_numbers(metrics))

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Log all metrics of an evaluation, without confidence intervals."""
        row = {f"evaluation/{name}": value for name, value in evaluation.row().items()}
        self._log("evaluation", step, finite_numbers(row))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log completions with the highest and lowest rewards every save.samples_every steps."""
        every = self.samples_every
        due = bool(every) and (step == 1 or step % every == 0)
        if name == "rollouts" and due and self.is_new("table", step):
            self.completions(step, sample_rows(rows))

    def _log(self, event: str, step: int, values: Mapping[str, float]) -> None:
        if self.is_new(event, step):
            self.numbers(step, values)


class RememberingTracker(ExternalTracker):
    """A tracker for packages with append-only logs, such as W&B. It logs no step twice.

    A resumed run repeats the steps after its checkpoint and gets the same numbers.
    NAME.json in the run folder contains the run's id and the last logged steps.
    """

    name: str
    """The name of the tracker, which is also the name of its Python package."""
    session: Any = None
    """The run object of the tracking package. The method `open` starts or continues the run."""

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(run, settings)
        self.file = run.path / f"{self.name}.json"
        self.known: dict[str, Any] = {
            "id": uuid.uuid4().hex[:12],
            **self._saved(),
        }

    def _saved(self) -> dict[str, Any]:
        try:
            return read_object(self.file) if self.file.exists() else {}
        except RunError:  # damaged: start a new run of the tracker
            return {}

    def is_new(self, event: str, step: int) -> bool:
        """Return whether an event of a step is not logged yet, and mark the event as logged."""
        if step <= self.known.get(event, -1):
            return False
        self.known[event] = step
        return True

    def remember(self) -> None:
        """Save the last logged steps in NAME.json. This method is called after each log entry.

        The method overwrites the file in place with a single write. Replacing the file by a rename
        would be slow, because some file systems wait for the disk at a rename.
        """
        text = json.dumps(self.known).encode().ljust(SAVED_BYTES) + b"\n"
        handle = os.open(self.file, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(handle, text, 0)
        finally:
            os.close(handle)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step or of its evaluation.

        The tracking package puts the numbers of a step and of its evaluation into one row.
        """
        self.session.log(dict(values), step=step)

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Log a table."""
        package = importlib.import_module(self.name)
        table = package.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self.session.log({"completions": table}, step=step)

    def close(self) -> None:
        """Send all data that is not sent yet, and end the run of the tracking package."""
        if self.session is not None:
            self.session.finish()

    def _log(self, event: str, step: int, values: Mapping[str, float]) -> None:
        if self.is_new(event, step):
            self.numbers(step, values)
            self.remember()


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a row except `step`. For an estimate, return only its value."""
    values = {n: v.get("value") if isinstance(v, Mapping) else v for n, v in row.items()}
    values.pop("step", None)
    return {name: value for name, value in values.items() if is_number(value)}


def sample_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the completions with the highest and lowest rewards as rows of plain text cells."""
    scored = sorted((row for row in rows if row["reward"] is not None), key=lambda r: -r["reward"])
    chosen = scored if len(scored) <= 2 * SHOWN else [*scored[:SHOWN], *scored[-SHOWN:]]
    return [[_cell(row, column) for column in COLUMNS] for row in chosen]


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if column == "parts":
        return ", ".join(f"{name} {value:.3g}" for name, value in row["parts"].items())
    value = row["text" if column == "completion" else column]
    return shortened(value) if isinstance(value, str) else value


def shortened(text: str) -> str:
    """Return text without control characters, cut if it is very long."""
    more = f" ... ({len(text) - LONGEST} more characters)" if len(text) > LONGEST else ""
    return printable(text[:LONGEST]) + more
