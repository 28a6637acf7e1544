"""The base class of reference policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from covey.models.logp import LogProbs
from covey.types import Batch

if TYPE_CHECKING:
    import torch


class Reference:
    """The base class of reference policies, which compute log-probabilities without a gradient.

    The default methods suit a reference that never changes.
    """

    __slots__ = ()

    @property
    def identity(self) -> str:
        """A short text that identifies the reference in the files of the run."""
        raise NotImplementedError

    def logp(self, batch: Batch) -> LogProbs:
        """Return the log-probability and the entropy of every trained token under the reference."""
        raise NotImplementedError

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Keep the reference's weights on the device for several calls of `logp`."""
        yield

    def after_step(self, steps: int, masters: Mapping[str, torch.Tensor]) -> None:
        """Update the reference after an optimizer step, if it follows the policy.

        `steps` is the number of optimizer steps so far. `masters` maps the name of each trained
        weight to the optimizer's master copy.
        """

    def save(self, folder: Path, *, writes: bool = True) -> None:
        """Write the reference's state into a checkpoint.

        All ranks call this method, because weights may be sharded. Only the rank with `writes=True`
        writes files.
        """

    def load(self, folder: Path) -> None:
        """Restore the reference's state from a checkpoint."""
