"""Averages that are exact however a step is split: sums and counts, divided once at the end."""

from __future__ import annotations

from collections import defaultdict

import torch


class Meter:
    """Collects (sum, count), largest and smallest by name."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._extremes: dict[str, float] = {}

    def add(self, name: str, value: float, count: float = 1.0) -> None:
        """Add `value`, the sum of `count` observations."""
        self._sums[name] += value
        self._counts[name] += count

    def tokens(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add one observation for each token in the mask."""
        total = values.where(mask, 0.0).sum(dtype=torch.float64)
        self.add(name, float(total), float(mask.sum()))

    def largest(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Note the largest value of the tokens in the mask."""
        chosen = values[mask]
        if chosen.numel():
            high = float(chosen.max())
            self._extremes[name] = max(high, self._extremes.get(name, high))

    def smallest(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Note the smallest value of the tokens in the mask."""
        chosen = values[mask]
        if chosen.numel():
            low = float(chosen.min())
            self._extremes[name] = min(low, self._extremes.get(name, low))

    def means(self) -> dict[str, float]:
        """Return every mean and extreme; what was never observed is left out."""
        means = {n: s / self._counts[n] for n, s in self._sums.items() if self._counts[n]}
        return {**means, **self._extremes}
