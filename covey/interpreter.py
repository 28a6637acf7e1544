"""Starting modules of covey as processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).parent.parent)
BEGIN = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of covey, wherever it is started.

    `python -m` looks for modules in the working folder first: in a folder that was downloaded, a
    file called json.py would run.
    """
    return [sys.executable, "-P", "-c", BEGIN, ROOT, module, *arguments]
