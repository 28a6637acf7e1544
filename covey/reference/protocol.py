"""What a reference policy is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from covey.models.logp import LogProbs
from covey.types import Batch

if TYPE_CHECKING:
    from covey.training.policy import Policy


class Reference(Protocol):
    """Gives log-probabilities that are never differentiated. No reference at all is `None`."""

    @property
    def identity(self) -> str:
        """What it is, in a few words, for the record of a run."""

    def logp(self, batch: Batch) -> LogProbs:
        """Return log-probability and entropy of every trained token under the reference."""

    def loaded(self) -> AbstractContextManager[None]:
        """Surround several calls of `logp`: what they need is brought here once."""

    def after_step(self, policy: Policy) -> None:
        """Follow the policy, which has just taken an optimizer step."""

    def save(self, folder: Path) -> None:
        """Write into a checkpoint what is needed to go on."""

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint."""


class Still:
    """A reference that never changes has nothing to follow, and nothing to save."""

    __slots__ = ()

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Nothing needs to be brought."""
        yield

    def after_step(self, policy: Policy) -> None:
        """Stay."""

    def save(self, folder: Path) -> None:
        """Write nothing."""

    def load(self, folder: Path) -> None:
        """Read nothing."""
