"""A reference that follows the policy: a moving average or a periodic copy of its weights.

    every n optimizer steps:  reference = alpha * policy + (1 - alpha) * reference

With alpha = 1, the reference becomes a copy of the policy, as in iterative GRPO in the DeepSeekMath
paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from covey.errors import RunError
from covey.parallel.shard import local_part, placed_like, whole_tensors
from covey.reference.frozen import FrozenReference

REFERENCE_FILE = "reference.safetensors"


@dataclass(slots=True, kw_only=True)
class MovingReference(FrozenReference):
    """A reference whose weights move toward the policy's weights every few optimizer steps."""

    alpha: float
    every: int
    """The number of optimizer steps between two updates of the reference, counted across training
    steps."""
    file: str = REFERENCE_FILE
    """The name of the checkpoint file with the reference weights."""
    weights: dict[str, torch.Tensor] = field(init=False)
    """The weights of the reference in float32. In bfloat16, small updates would be lost by
    rounding."""

    def __post_init__(self) -> None:
        FrozenReference.__post_init__(self)
        exact = (torch.float32, torch.float64)
        parameters = self.model.model.named_parameters()
        self.weights = {n: p.data if p.dtype in exact else p.data.float() for n, p in parameters}

    @property
    def identity(self) -> str:
        """A short text about how the reference follows the policy."""
        return f"moving by {self.alpha:g} every {self.every} optimizer steps"

    @torch.no_grad()
    def after_step(self, steps: int, masters: Mapping[str, torch.Tensor]) -> None:
        """Update the reference weights if `steps` is a multiple of `every`."""
        if steps % self.every:
            return
        # Weights that are not trained stay equal in policy and reference.
        for name, master in masters.items():
            weight = local_part(self.weights[name])
            weight.lerp_(local_part(master).to(weight.dtype), self.alpha)
        self._round_to_parameters()

    def save(self, folder: Path, *, writes: bool = True) -> None:
        """Write the reference's weights into the checkpoint, next to the policy's weights."""
        whole = whole_tensors(self.weights, keep=writes)
        if not writes:
            return
        try:
            save_file(whole, folder / self.file)
        except SafetensorError as error:
            raise OSError(str(error)) from None  # a full disk: callers handle OSError

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read the reference's weights from the checkpoint."""
        try:
            saved = load_file(folder / self.file)
        except (OSError, ValueError, SafetensorError) as error:
            raise RunError(
                f"checkpoint {folder} has no valid weights of the reference model: {error}; resume "
                "from another checkpoint"
            ) from None
        for name, weight in self.weights.items():
            if name not in saved or saved[name].shape != weight.shape:
                raise RunError(
                    f"checkpoint {folder}: the tensor {name} is missing from {self.file}, or has "
                    "the wrong shape; resume from another checkpoint"
                )
            weight.copy_(placed_like(saved[name], weight))
        self._round_to_parameters()

    def _round_to_parameters(self) -> None:
        for name, parameter in self.model.model.named_parameters():
            own, weight = local_part(parameter), local_part(self.weights[name])
            if own.data_ptr() != weight.data_ptr():
                own.copy_(weight)
