"""Tracker for trackio."""

from __future__ import annotations

import os

from covey.records.trackers.external import PROJECT, RememberingTracker


class TrackioTracker(RememberingTracker):
    """Logs metrics and tables of completions to a local database, which `trackio show` opens.

    A resumed run continues the same trackio run. The environment variable TRACKIO_DIR is the folder
    of the database, and TRACKIO_PROJECT is the project name. If TRACKIO_SPACE_ID is set, the data
    goes to this Hugging Face Space.
    """

    name = "trackio"

    def open(self, done: int) -> None:
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
