"""The trackio tracker: a local database, which `trackio show` opens.

The variable TRACKIO_DIR sets the folder, and TRACKIO_PROJECT the project. TRACKIO_SPACE_ID sends
the data to a Space on the hub.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from covey.run.trackers.external import COLUMNS, PROJECT, RememberingTracker


class TrackioTracker(RememberingTracker):
    """Logs to a trackio run, with tables of completions.

    A resumed run continues the same trackio run.
    """

    name = "trackio"
    session: Any = None

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

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self.session.log(dict(values), step=step)

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Log a table."""
        import trackio

        table = trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self.session.log({"completions": table}, step=step)

    def close(self) -> None:
        """Write the remaining data."""
        if self.session is not None:
            self.session.finish()
