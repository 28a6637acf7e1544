"""The packages that 4-bit base weights need. This module does not import torch."""

from __future__ import annotations

import importlib.util

from covey.errors import ConfigError

PACKAGES = ("bitsandbytes", "accelerate")


def check_four_bit() -> None:
    """Raise an error if a package is missing."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"config: adapter.load_in_4bit needs {package}: pip install {' '.join(PACKAGES)}"
            )
