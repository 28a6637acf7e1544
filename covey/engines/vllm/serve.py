"""Entry point of a vLLM server that ends when its parent process, the trainer, ends.

The module's arguments are PARENT FOLDER ARGUMENTS. PARENT is the trainer's process id. FOLDER
contains the weights that the trainer sends, and is deleted when the trainer ends. ARGUMENTS are
passed to vLLM.
"""

from __future__ import annotations

import runpy
import shutil
import sys
from functools import partial

from covey.subprocesses import end_with_parent

SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Run the server, and end it when the parent process ends."""
    parent, folder, *arguments = sys.argv[1:]
    end_with_parent(int(parent), partial(shutil.rmtree, folder, ignore_errors=True))
    sys.argv = [SERVER, *arguments]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
