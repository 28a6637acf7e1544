"""Check that the packages for 4-bit base weights are installed, without importing torch."""

from __future__ import annotations

import importlib.util

from covey.errors import ConfigError

PACKAGES = ("bitsandbytes", "accelerate")


def check_peft() -> None:
    """Raise ConfigError if the package for adapters is missing."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("config: [adapter] needs peft: pip install 'covey[lora]'")


def check_four_bit() -> None:
    """Raise ConfigError if a package for 4-bit weights is missing."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"config: adapter.load_in_4bit needs {package}: pip install {' '.join(PACKAGES)}"
            )
