"""What every command that trains or judges does first: settings, and what its user should know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from covey.config import Config, load_config

if TYPE_CHECKING:
    from covey.run.folder import RunFolder
    from covey.scoring import Scorer
    from covey.train.report import Reporter


def resolved(source: str, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration and write out every option that was left to default."""
    config = load_config(source, overrides)

    from covey.train.assemble import resolve  # imports torch, which takes seconds

    return resolve(config)


class Begun(Protocol):
    """The parts of a run that its opening notes are about."""

    @property
    def bad_rows(self) -> tuple[str, ...]:
        """One line for every row of the data that was skipped."""

    @property
    def scorer(self) -> Scorer:
        """Who judges."""


def tell_notes(reporter: Reporter, folder: RunFolder, parts: Begun) -> None:
    """Say what differs from when the run was started, and what was skipped."""
    import torch

    environment = folder.environment()
    threads, now = environment.get("threads"), torch.get_num_threads()
    if threads != now:
        reporter.note(
            f"this run was started with {threads} threads and goes on with {now}: results may "
            "differ in the last bits"
        )
    if parts.bad_rows:
        reporter.note(f"{len(parts.bad_rows)} bad rows skipped; the first: {parts.bad_rows[0]}")
    judged_by = environment.get("reward", parts.scorer.identity)
    if judged_by != parts.scorer.identity:
        reporter.note(
            f"the reward has changed since this run was started: it was {judged_by} and is now "
            f"{parts.scorer.identity}"
        )
