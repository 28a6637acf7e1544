"""The trackio tracker, which writes to a local database that `trackio show` opens.

The environment variable TRACKIO_DIR sets the folder of the database, and TRACKIO_PROJECT sets the
project name. If TRACKIO_SPACE_ID names a Hugging Face Space, trackio sends the data to this Space.
"""

from __future__ import annotations

import os

from covey.run.trackers.external import PROJECT, RememberingTracker


class TrackioTracker(RememberingTracker):
    """Logs metrics and tables of completions to a trackio run.

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
