"""Reference policies: what the penalty keeps the policy near to."""

from covey.reference.frozen import FrozenReference
from covey.reference.protocol import Reference

__all__ = ["FrozenReference", "Reference"]
