"""Runs a trainer rank that ends with its Ray actor (`rank_process PARENT ARGUMENTS`).

PARENT is the process id of the actor. ARGUMENTS are the arguments of the `covey` command. Without
this module, the rank of a killed actor would continue to train and occupy its GPU.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

WATCH_SECONDS = 0.5


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    # The rank leads a session, so this also ends its engines and scoring workers.
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the `covey` command; kill this process if the parent process (the actor) ends."""
    parent, *arguments = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks SIGINT
    threading.Thread(target=_watch, args=(int(parent),), daemon=True).start()
    sys.argv = ["covey", *arguments]
    runpy.run_module("covey", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
