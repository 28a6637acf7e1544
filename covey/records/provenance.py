"""Records the versions, machine, git state and command of a run, to make the run repeatable."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

PACKAGES = ("covey", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def describe_environment(seed: int, device: str, threads: int) -> dict[str, Any]:
    """Return this run's package versions, machine, git state, command and seed."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "seed": seed,
        "device": device,
        "threads": threads,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "git": {
            "commit": _git("rev-parse", "HEAD"),
            "changed": bool(_git("status", "--porcelain")),
        },
    }


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Run git in the working folder; return its output, or None if git fails."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
