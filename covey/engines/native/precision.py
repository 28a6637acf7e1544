"""Precision of the native engine, where it differs from the model's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The parts of the native engine that compute or store float8 numbers."""

    products: bool = False
    """Whether the matrix products of layers multiply float8 numbers."""
    cache: bool = False
    """Whether the KV cache of completions stores float8 numbers."""

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded to float8."""
        return not (self.products or self.cache)


MODEL_PRECISION = Precision()
"""Everything has the model's dtype."""
