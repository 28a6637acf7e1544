"""Read this process's rank and the number of ranks from torchrun's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from covey.errors import ConfigError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Rank of this process and number of ranks, in the whole run and on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """Return rank and world size from the environment variables; rank 0 of 1 if none are set."""
    given = {name: environment[name] for name in NAMES if environment.get(name)}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return Place()
    numbers = {name: _number(name, text) for name, text in given.items()}
    for name in NAMES[:2]:
        if name not in numbers:
            other = next(iter(given))
            raise ConfigError(
                f"ranks: the environment variable {other} is set, but {name} is not; start the "
                f"ranks with torchrun, or unset {other} to train with one process"
            )
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    local_rank, local_size = numbers.get("LOCAL_RANK", rank), numbers.get("LOCAL_WORLD_SIZE", size)
    _check("RANK", rank, "WORLD_SIZE", size)
    _check("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name):
                raise ConfigError(
                    f"ranks: the environment variable {name} is not set; start the ranks with "
                    "torchrun"
                )
    return Place(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ConfigError(
            f"ranks: {name} = {text!r} is not a number; start the ranks with torchrun"
        )
    return int(text)


def _check(name: str, rank: int, size_name: str, size: int) -> None:
    if rank >= size:
        raise ConfigError(
            f"ranks: {name} = {rank} must be less than {size_name} = {size}, because ranks are "
            "counted from 0"
        )
