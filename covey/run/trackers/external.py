"""Trackers that send metrics to other packages: TensorBoard, Weights & Biases and trackio.

The base classes decide what a tracker logs, and when. Each package is imported only when its
tracker opens.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from covey.errors import ConfigError, RunError, nearest
from covey.escape import printable
from covey.run.folder import RunFolder
from covey.run.metrics import is_number
from covey.run.records import read_object
from covey.run.samples import quoted
from covey.run.trackers.protocol import Tracker

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation

SHOWN = 8
"""A table shows this many completions with the highest rewards, and as many with the lowest
rewards."""
LONGEST = 4000
"""Tables cut longer texts to this many characters, and the run folder contains the whole texts."""
COLUMNS = ("prompt", "completion", "target", "reward", "success", "advantage", "finish", "parts")
PROJECT = "covey"
SAVED_BYTES = 255
"""Size in bytes of a tracker's file NAME.json, such as wandb.json, which is padded with spaces to
this size so that every write replaces the whole file.
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
        """Open the tracking package's log; the next step to log is `done` + 1."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a training step."""

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Log completions as a table with the columns `COLUMNS`; the base class logs none."""

    def is_new(self, event: str, step: int) -> bool:
        """Return False if this event was already reported for this step, as after a resume."""
        return True

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        """Open the tracker."""
        self.open(done)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Log all finite metrics of a training step."""
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


class TensorBoardTracker(ExternalTracker):
    """Writes metrics as scalars, in single precision, and completions as text."""

    writer: Any = None

    def open(self, done: int) -> None:
        """Open a new event file, which drops the earlier events of steps that are logged again."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(self.run.path / "tensorboard")
        # The first file needs this too, because TensorBoard treats a second file as a restart.
        self.writer = SummaryWriter(folder, purge_step=done + 1 if done else 0)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Write all scalars in one event, in the old format that all readers support."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.writer.file_writer.add_summary(Summary(value=scalars), step)

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Write completions as Markdown blocks, indented so that Markdown in them has no effect."""
        lines: list[str] = []
        for row in rows:
            cells = dict(zip(COLUMNS, row, strict=True))
            lines += [f"reward {cells['reward']:.3g}", ""]
            for name in ("prompt", "completion", "target", "parts"):
                lines += [f"{name}:", "", *quoted(str(cells[name])), ""]
        self.writer.add_text("completions", "\n".join(lines), step)

    def close(self) -> None:
        """Write the remaining events to the event file, and close it."""
        if self.writer is not None:
            self.writer.close()


class RememberingTracker(ExternalTracker):
    """A tracker for append-only logs, such as W&B, which logs no step twice.

    A resumed run repeats the steps after its checkpoint, with the same numbers. The file NAME.json
    in the run folder, such as wandb.json, therefore stores the package's run id and the last logged
    steps.
    """

    name: str
    """The name of the tracker, which is also the name of its Python package."""
    session: Any = None
    """The run object of the tracking package, which `open` creates to start a new run or to
    continue an earlier one."""

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
        """After each log entry, save the last logged step of each event in NAME.json.

        The file is overwritten in place with a single write, because on some file systems,
        replacing it by a rename would wait for the disk.
        """
        text = json.dumps(self.known).encode().ljust(SAVED_BYTES) + b"\n"
        handle = os.open(self.file, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(handle, text, 0)
        finally:
            os.close(handle)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a training step or evaluation; both become one row of the log."""
        self.session.log(dict(values), step=step)

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Log a table."""
        package = import_module(self.name)
        table = package.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self.session.log({"completions": table}, step=step)

    def close(self) -> None:
        """Send the remaining data, and end the tracking package's run."""
        if self.session is not None:
            self.session.finish()

    def _log(self, event: str, step: int, values: Mapping[str, float]) -> None:
        if self.is_new(event, step):
            self.numbers(step, values)
            self.remember()


class WandbTracker(RememberingTracker):
    """Logs metrics and completions to W&B; a resumed run continues the same W&B run.

    With WANDB_MODE=offline, W&B writes to the run folder, and `wandb sync` uploads the data later.
    WANDB_PROJECT, WANDB_ENTITY and the other variables of wandb have their usual effect.
    """

    name = "wandb"

    def open(self, done: int) -> None:
        """Start or continue the W&B run; if W&B fails, raise an error that says what to do."""
        import wandb

        try:
            self.session = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=self.run.path.name,
                id=self.known["id"],
                resume="allow" if done else None,
                dir=str(self.run.path),
                config=dict(self.settings),
                settings=wandb.Settings(console="off", quiet=True),  # notes may quote a model
            )
        except wandb.errors.Error as error:
            first = str(error).strip().partition("\n")[0].partition(". ")[0]
            why = printable(first).rstrip(".")
            raise ConfigError(
                f"config: trackers: wandb cannot start: {why}; run `wandb login`, set "
                "WANDB_MODE=offline, or set trackers = []"
            ) from None
        self.remember()


class TrackioTracker(RememberingTracker):
    """Logs metrics and tables of completions to a local database, which `trackio show` opens.

    A resumed run continues the same trackio run. The environment variable TRACKIO_DIR is the folder
    of the database, and TRACKIO_PROJECT the project name. With TRACKIO_SPACE_ID, the data goes to
    this Hugging Face Space.
    """

    name = "trackio"

    def open(self, done: int) -> None:
        """Start or continue the trackio run."""
        import trackio

        self.session = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{self.run.path.name}-{self.known['id'][:4]}",
            config=dict(self.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.remember()


TRACKERS: Mapping[str, type[ExternalTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}
"""The trackers that a configuration can name, each by the name of the Python package that it needs,
which is also the name of the pip extra."""


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError if a tracker is unknown or its Python package is not installed."""
    for name in names:
        if name not in TRACKERS:
            hint = nearest(name, TRACKERS)
            raise ConfigError(f"config: trackers: {name!r} is not a tracker{hint}")
        if find_spec(name) is None:
            raise ConfigError(
                f"config: trackers: {name!r} is not installed: pip install 'covey[{name}]'"
            )


def make_trackers(
    names: Iterable[str], run: RunFolder, settings: Mapping[str, Any]
) -> list[Tracker]:
    """Build the named trackers of a run."""
    return [TRACKERS[name](run, settings) for name in dict.fromkeys(names)]


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a row, without `step` and without confidence bounds."""
    values = {n: v.get("value") if isinstance(v, Mapping) else v for n, v in row.items()}
    values.pop("step", None)
    return {name: value for name, value in values.items() if is_number(value)}


def sample_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the highest-reward and lowest-reward completions as table rows."""
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
