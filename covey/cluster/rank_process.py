"""The process of a trainer rank, which ends with its Ray actor.

The command-line arguments of this module are the process id of the actor, followed by the arguments
of the `covey` command.
"""

from __future__ import annotations

import runpy
import signal
import sys

from covey.subprocesses import end_with_parent


def main() -> None:
    """Run the `covey` command, and kill this process if its parent process (the actor) ends."""
    parent, *arguments = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks SIGINT
    end_with_parent(int(parent))  # also ends this rank's engines and scoring workers
    sys.argv = ["covey", *arguments]
    runpy.run_module("covey", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
