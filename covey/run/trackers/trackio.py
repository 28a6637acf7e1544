"""The trackio tracker: a local database, which `trackio show` opens.

The variable TRACKIO_DIR sets the folder, and TRACKIO_PROJECT the project. If TRACKIO_SPACE_ID is
set, trackio sends the data to this Space on the Hub.
"""

from __future__ import annotations

import os

from covey.run.trackers.external import PROJECT, RememberingTracker


class TrackioTracker(RememberingTracker):
    """Logs to a trackio run, with tables of completions.

    A resumed run continues the same trackio run.
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
