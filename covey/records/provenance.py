"""Records the versions, machine, git state and command of a run, to make the run repeatable."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
WITHOUT_EFFECT = ("cli", "lab")
"""The folders of the package whose code only shows results, or starts runs."""
WITH_EFFECT = ("lab/compare/launch.py",)
"""Exceptions to WITHOUT_EFFECT: what the runs of a comparison execute."""
PACKAGES = ("covey", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def describe_environment(seed: int, device: str, threads: int) -> dict[str, Any]:
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


def code_digest(package: Path = PACKAGE) -> str:
    """Return a digest of the code that can change a run's numbers.

    It covers Covey's source, and the versions of the packages that compute.
    """
    digest = hashlib.sha256(repr([_version(name) for name in PACKAGES[1:]]).encode())
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).as_posix()
        if name.split("/")[0] not in WITHOUT_EFFECT or name in WITH_EFFECT:
            digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
