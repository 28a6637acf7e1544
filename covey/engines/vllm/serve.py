"""A vLLM server that ends when its parent process ends (`serve.py PARENT FOLDER ARGUMENTS`).

Without serve.py, the servers of a killed trainer would occupy memory forever. FOLDER contains the
weights that the trainer sends. serve.py removes FOLDER when the trainer ends.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import sys
import threading
import time

WATCH_SECONDS = 1.0
SERVER = "vllm.entrypoints.openai.api_server"


def _watch(parent: int, folder: str) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # also ends the server's own processes: it leads a session


def main() -> None:
    """Run the server, and end it when the parent process ends."""
    parent, folder, *arguments = sys.argv[1:]
    threading.Thread(target=_watch, args=(int(parent), folder), daemon=True).start()
    sys.argv = [SERVER, *arguments]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
