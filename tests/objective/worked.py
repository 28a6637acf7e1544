"""Files of worked numbers, and comparisons with them in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


class Worked:
    """The numbers of one file; `a.b.c` is the path of a number in it."""

    def __init__(self, file: str) -> None:
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        self.numbers: dict[str, Any] = json.loads(text)

    def at(self, path: str) -> Any:
        value: Any = self.numbers
        for key in path.split("."):
            value = value[key]
        return value

    def tensor(self, value: Any) -> torch.Tensor:
        """Return numbers, or those at a path, as float64."""
        numbers = self.at(value) if isinstance(value, str) else value
        return torch.as_tensor(numbers, dtype=torch.float64).detach()

    def close(self, actual: Any, expected: Any) -> None:
        torch.testing.assert_close(self.tensor(actual), self.tensor(expected), atol=1e-9, rtol=0)

    def far(self, actual: Any, wrong: Any) -> None:
        assert (self.tensor(actual) - self.tensor(wrong)).abs().max() > 1e-3
