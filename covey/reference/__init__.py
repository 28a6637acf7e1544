"""Reference policies, for the KL penalty on the policy's distance from its reference."""

from covey.reference.frozen import FrozenReference
from covey.reference.protocol import Reference

__all__ = ["FrozenReference", "Reference"]
