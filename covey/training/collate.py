"""Collating groups into a batch of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch

from covey.errors import ConfigError, ModelError
from covey.types import Batch, Group, Rollout


def collate(
    groups: Sequence[Group],
    device: torch.device | str = "cpu",
    parts: Sequence[str] | None = None,
) -> Batch:
    """Stack the rollouts of all groups, row by row in order.

    `parts` are the names of the parts of the reward to fill in; empty: all. None: leave them out.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]

    def padded(rows: Sequence[Sequence[int | float | bool]], dtype: type) -> torch.Tensor:
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        place = np.arange(lengths.max()) < lengths[:, None]
        whole: np.ndarray = np.zeros(place.shape, dtype=dtype)
        # All values at once and by numpy: torch takes several times as long for Python numbers.
        whole[place] = np.fromiter(chain.from_iterable(rows), dtype=dtype, count=lengths.sum())
        return torch.from_numpy(whole)

    def column(values: Sequence[int | float | bool], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    batch = Batch(
        prompt_tokens=padded([r.prompt_tokens for r in rollouts], np.int64),
        prompt_lengths=column([len(r.prompt_tokens) for r in rollouts], torch.long),
        tokens=padded([r.tokens for r in rollouts], np.int64),
        lengths=column([len(r.tokens) for r in rollouts], torch.long),
        mask=padded([r.trained for r in rollouts], np.bool_),
        sampler_logp=padded([r.sampler_logp for r in rollouts], np.float32),
        rewards=column(
            [math.nan if r.reward is None else r.reward for r in rollouts], torch.float64
        ),
        success=column([bool(r.success) for r in rollouts], torch.bool),
        group=column(
            [number for number, group in enumerate(groups) for _ in group.rollouts], torch.long
        ),
        rollout=torch.arange(len(rollouts)),
        truncated=column([r.finish == "length" for r in rollouts], torch.bool),
        parts=None if parts is None else _parts(rollouts, parts),
    )
    _check_sampler_logp(batch, rollouts)
    return batch if torch.device(device).type == "cpu" else batch.to(device)


def _parts(rollouts: Sequence[Rollout], names: Sequence[str]) -> torch.Tensor:
    """Return the named parts [B, K] of each reward, or all in alphabetical order."""
    scored = [r for r in rollouts if r.reward is not None]
    names = names or sorted({name for r in scored for name in r.parts})
    if scored and not names:
        raise ConfigError("objective: this reward has no parts to compare; grpo needs none")
    for rollout in scored:
        if missing := [name for name in names if name not in rollout.parts]:
            raise ConfigError(
                f"objective: the reward of completion {rollout.sample} of prompt "
                f"{rollout.prompt_id} has no part {missing[0]!r}, it has {_listed(rollout.parts)}; "
                "name the parts that every completion has in objective.parts"
            )
    rows = [
        [math.nan] * len(names) if r.reward is None else [r.parts[name] for name in names]
        for r in rollouts
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rollouts), len(names))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _check_sampler_logp(batch: Batch, rollouts: Sequence[Rollout]) -> None:
    """Refuse log-probabilities that are not finite; on the CPU, so that no device is waited for."""
    wrong = ~batch.sampler_logp.isfinite()
    if wrong.any():
        first = rollouts[int(wrong.any(dim=1).int().argmax())]
        raise ModelError(
            f"engine: log-probabilities of {int(wrong.sum())} tokens are not finite, the first in "
            f"completion {first.sample} of prompt {first.prompt_id}; check the model's weights and "
            "model.dtype"
        )
