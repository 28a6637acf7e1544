"""Collates groups into a batch of tensors."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from covey.errors import ConfigError, ModelError
from covey.kept_sets import KeptSets
from covey.types import TRUNCATED, Batch, Group, Rollout, Segment, TeacherPrompts


class _Row(NamedTuple):
    """A segment of a rollout, with the indices of its rollout and group."""

    group: int
    rollout: int
    of: Rollout
    segment: Segment
    place: int
    """Index of the segment in its rollout."""


def collate(
    groups: Sequence[Group],
    device: torch.device | str = "cpu",
    parts: Sequence[str] | None = None,
) -> Batch:
    """Turn groups into a batch with one row per segment, in the order of groups and rollouts.

    `parts` names the reward components to include in the batch. An empty list selects all
    components, and None selects no components.
    """
    numbered = enumerate(
        (n, rollout) for n, group in enumerate(groups) for rollout in group.rollouts
    )
    rows = [
        _Row(group, number, rollout, segment, place)
        for number, (group, rollout) in numbered
        for place, segment in enumerate(rollout.segments)
    ]

    def column(values: Sequence[int | float | bool], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    rewards = [math.nan if r.of.reward is None else r.of.reward for r in rows]
    batch = Batch(
        prompt_tokens=_padded([r.segment.prompt_tokens for r in rows], np.int64),
        prompt_lengths=column([len(r.segment.prompt_tokens) for r in rows], torch.long),
        tokens=_padded([r.segment.tokens for r in rows], np.int64),
        lengths=column([len(r.segment.tokens) for r in rows], torch.long),
        mask=_padded([r.segment.trained for r in rows], np.bool_),
        sampler_logp=_padded([r.segment.sampler_logp for r in rows], np.float32),
        rewards=column(rewards, torch.float64),
        success=column([bool(r.of.success) for r in rows], torch.bool),
        group=column([r.group for r in rows], torch.long),
        rollout=column([r.rollout for r in rows], torch.long),
        truncated=column([r.of.finish in TRUNCATED for r in rows], torch.bool),
        parts=None if parts is None else _parts([row.of for row in rows], parts),
        kept=_kept(rows),
        teacher_prompts=_teacher_prompts([r.of.teacher_prompt for r in rows]),
        **_turns(rows),
    )
    _check_sampler_logp(batch, [row.of for row in rows])
    return batch if torch.device(device).type == "cpu" else batch.to(device)


def _parts(rollouts: Sequence[Rollout], names: Sequence[str]) -> torch.Tensor:
    """Return a tensor [B, K] of the reward components `names`; an empty list selects all."""
    scored = [r for r in rollouts if r.reward is not None]
    names = names or sorted({name for r in scored for name in r.parts})
    if scored and not names:
        raise ConfigError(
            "objective: the algorithm uses the parts of the reward, but this reward has no "
            "parts; use a reward with parts, or an algorithm such as grpo"
        )
    for rollout in scored:
        if missing := [name for name in names if name not in rollout.parts]:
            raise ConfigError(
                f"objective: the reward of completion {rollout.sample} of prompt "
                f"{rollout.prompt_id} has no part {missing[0]!r}, only "
                f"{', '.join(rollout.parts) or 'none'}; "
                "list in objective.parts only parts that every completion has"
            )
    rows = [
        [math.nan] * len(names) if r.reward is None else [r.parts[name] for name in names]
        for r in rollouts
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rollouts), len(names))


def _padded(rows: Sequence[Sequence[int | float | bool]], dtype: type) -> torch.Tensor:
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    place = np.arange(lengths.max()) < lengths[:, None]
    whole: np.ndarray = np.zeros(place.shape, dtype=dtype)
    # numpy converts all values at once; torch takes several times as long for Python numbers.
    whole[place] = np.fromiter(chain.from_iterable(rows), dtype=dtype, count=lengths.sum())
    return torch.from_numpy(whole)


def _turns(rows: Sequence[_Row]) -> dict[str, Any]:
    """Return the batch fields turn, turn_reward and state; {} if no rollout has an environment."""
    if all(row.of.episode is None for row in rows):
        return {}
    shape = len(rows), max(len(row.segment.tokens) for row in rows)
    turns = torch.zeros(shape, dtype=torch.long)
    rewards = torch.zeros(shape, dtype=torch.float64)
    states = torch.zeros(shape, dtype=torch.long)
    for number, row in enumerate(rows):
        taken = [turn for turn in row.of.turns if turn.role == "assistant"]
        for turn_number, turn in enumerate(taken):
            if turn.segment == row.place:
                span = number, slice(turn.start, turn.stop)
                turns[span] = turn_number
                rewards[span] = turn.reward or 0.0
                states[span] = int(turn.state or "0", 16) % 2**63
    return {"turn": turns, "turn_reward": rewards, "state": states}


def _teacher_prompts(prompts: Sequence[Sequence[int]]) -> TeacherPrompts | None:
    """Pad the teacher prompts of all rows; return None if no row has a teacher prompt."""
    if not any(prompts):
        return None
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return TeacherPrompts(tokens=_padded(prompts, np.int64), lengths=lengths)


def _kept(rows: Sequence[_Row]) -> KeptSets | None:
    """Return, for each sampled token, the tokens that top-k, top-p and min-p allowed.

    Return None if no rollout has recorded the allowed tokens. Raise ModelError if a sampled token
    is not among the allowed tokens.
    """
    if not any(row.segment.kept for row in rows):
        return None
    tokens = _padded([row.segment.tokens for row in rows], np.int64).numpy()
    try:
        segments = [(row.segment.trained, row.segment.kept) for row in rows]
        kept = KeptSets.of(segments, tokens.shape[1])
        wrong = kept.lacking(tokens).any(axis=1)
        problem = "a token is not in its kept set"
    except (ValueError, zlib.error) as error:
        wrong, problem = np.ones(len(rows), dtype=bool), str(error)
    if wrong.any():
        first = rows[int(wrong.argmax())].of
        raise ModelError(
            f"engine: rollout.mask_replay cannot use completion {first.sample} of prompt "
            f"{first.prompt_id}, because a set of tokens that top_k, top_p and min_p kept is "
            f"invalid: {problem}"
        )
    return kept


def _check_sampler_logp(batch: Batch, rollouts: Sequence[Rollout]) -> None:
    """Raise ModelError if a log-prob from the engine is not finite.

    The check runs before the batch is copied to the GPU, so it does not wait for GPU work.
    """
    wrong = ~batch.sampler_logp.isfinite()
    if wrong.any():
        first, count = rollouts[int(wrong.any(dim=1).int().argmax())], int(wrong.sum())
        raise ModelError(
            f"engine: the log-probs of {count} tokens are not finite; the first such token is in "
            f"completion {first.sample} of prompt {first.prompt_id}; check the model's weights and "
            "model.dtype"
        )
