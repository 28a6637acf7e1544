"""Base classes of the trackers for TensorBoard, Weights & Biases and trackio.

The base classes decide what a tracker logs, and when. A tracker imports its package only when
training starts.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.errors import RunError
from covey.escape import printable
from covey.records.folder import RunFolder
from covey.records.metric_registry import is_number
from covey.records.records import read_object
from covey.records.trackers.protocol import Tracker

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation

SHOWN = 8
"""Maximum number of completions with the highest rewards, and of completions with the lowest
rewards, in a table."""
LONGEST = 4000
"""Maximum number of characters of a text in a table. The run folder contains the complete texts."""
COLUMNS = ("prompt", "completion", "target", "reward", "success", "advantage", "finish", "parts")
PROJECT = "covey"
SAVED_BYTES = 255
"""Size in bytes of a tracker's file NAME.json, such as wandb.json. Spaces pad the file to this
size, so that every write replaces the whole file.
"""


class ExternalTracker(Tracker):
    """A tracker that sends metrics to another package, such as W&B.

    A subclass implements methods that open a log of the package, write metrics and tables, and
    close the log.
    """

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        self.run = run
        self.settings = settings
        self.samples_every: int = settings.get("save", {}).get("samples_every", 0)

    def open(self, done: int) -> None:
        """Open a log of the tracking package. The next step to log is `done + 1`."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a training step."""

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Log completions as a table with the columns `COLUMNS`; in the base class, do nothing."""

    def is_new(self, event: str, step: int) -> bool:
        """Return False if this event was already logged for this step before the run was
        resumed."""
        return True

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        self.open(done)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._log("step", metrics["step"], finite_numbers(metrics))

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Log all metrics of an evaluation, without confidence intervals."""
        row = {f"evaluation/{name}": value for name, value in evaluation.row().items()}
        self._log("evaluation", step, finite_numbers(row))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Every `save.samples_every` steps, log the completions with the highest and lowest
        rewards."""
        every = self.samples_every
        due = bool(every) and (step == 1 or step % every == 0)
        if name == "rollouts" and due and self.is_new("table", step):
            self.completions(step, sample_rows(rows))

    def _log(self, event: str, step: int, values: Mapping[str, float]) -> None:
        if self.is_new(event, step):
            self.numbers(step, values)


class RememberingTracker(ExternalTracker):
    """A tracker that never logs a step twice, for packages with append-only logs, such as W&B.

    A resumed run repeats the steps after its checkpoint, with the same numbers. The tracker does
    not log repeated steps again. A file in the run folder, such as wandb.json, stores the package's
    run id and the last logged steps.
    """

    name: str
    """The name of the tracker, which is also the name of its Python package."""
    session: Any = None
    """The run object of the tracking package. `open` creates this object for a new run or a
    continued run."""

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]) -> None:
        super().__init__(run, settings)
        self.file = run.path / f"{self.name}.json"
        self.known: dict[str, Any] = {"id": uuid.uuid4().hex[:12]}
        # If the file is damaged, a new run of the tracker starts.
        with suppress(RunError):
            self.known |= read_object(self.file) if self.file.exists() else {}

    def is_new(self, event: str, step: int) -> bool:
        """Return True if the event is not yet logged for this step, and mark it as logged."""
        if step <= self.known.get(event, -1):
            return False
        self.known[event] = step
        return True

    def remember(self) -> None:
        """Save the last logged step of each event in the file NAME.json, after each log entry.

        A single write overwrites the file in place. On some file systems, replacing the file by a
        rename would wait for the disk.
        """
        text = json.dumps(self.known).encode().ljust(SAVED_BYTES) + b"\n"
        handle = os.open(self.file, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(handle, text, 0)
        finally:
            os.close(handle)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self.session.log(dict(values), step=step)

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        package = import_module(self.name)
        table = package.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self.session.log({"completions": table}, step=step)

    def close(self) -> None:
        if self.session is not None:
            self.session.finish()

    def _log(self, event: str, step: int, values: Mapping[str, float]) -> None:
        if self.is_new(event, step):
            self.numbers(step, values)
            self.remember()


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a row, without `step` and without confidence bounds."""
    values = {n: v.get("value") if isinstance(v, Mapping) else v for n, v in row.items()}
    values.pop("step", None)
    return {name: value for name, value in values.items() if is_number(value)}


def sample_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    scored = sorted((row for row in rows if row["reward"] is not None), key=lambda r: -r["reward"])
    chosen = scored if len(scored) <= 2 * SHOWN else [*scored[:SHOWN], *scored[-SHOWN:]]
    return [[_cell(row, column) for column in COLUMNS] for row in chosen]


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if column == "parts":
        return ", ".join(f"{name} {value:.3g}" for name, value in row["parts"].items())
    value = row["text" if column == "completion" else column]
    return shortened(value) if isinstance(value, str) else value


def shortened(text: str) -> str:
    """Escape control characters in a text, and cut the text if it is very long."""
    more = f" ... ({len(text) - LONGEST} more characters)" if len(text) > LONGEST else ""
    return printable(text[:LONGEST]) + more
