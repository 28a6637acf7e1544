"""Reference policies, with which the KL penalty compares the policy."""

from covey.reference.frozen import FrozenReference
from covey.reference.protocol import Reference

__all__ = ["FrozenReference", "Reference"]
