"""Settings for float8 numbers in the native engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Use of float8 numbers in the native engine, instead of the model's dtype."""

    products: bool = False
    """Whether the matrix products of layers multiply float8 numbers."""
    cache: bool = False
    """Whether the KV cache of completions stores float8 numbers."""

    @property
    def exact(self) -> bool:
        """Whether the engine uses no float8 numbers."""
        return not (self.products or self.cache)


MODEL_PRECISION = Precision()
"""The default: the engine computes in the model's dtype."""
