"""A vLLM server that ends when its parent process ends (module arguments: PARENT FOLDER ARGUMENTS).

FOLDER contains the weights that the trainer sends; the server removes it when the trainer ends.
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
