"""Filters that choose the groups and tokens to train on; they work with any objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from covey.types import EQUAL_REWARDS, Batch, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The groups to train on, and the number of groups dropped for each reason."""

    groups: tuple[Group, ...] = ()
    unscored: int = 0
    """Number of groups dropped because fewer than two of their rollouts were scored."""
    stale: int = 0
    """Number of groups dropped because a rollout was sampled too many optimizer steps ago."""
    uniform: int = 0
    """Number of groups dropped because their rollouts were all correct or all incorrect, or because
    all their rewards were equal (`drop_flat`)."""
    surplus: int = 0
    """Number of groups dropped because the step did not need them."""


def select(
    groups: Sequence[Group],
    *,
    dynamic: bool = False,
    drop_flat: bool = False,
    most: int | None = None,
    fewest: int = 2,
) -> Selected:
    """Select the groups to train on; drop whole groups, because advantages depend on all rollouts.

    A group is dropped if fewer than `fewest` of its rollouts are scored. `dynamic` is DAPO's rule
    (arXiv 2503.14476 equation 11): keep a group if some but not all of its rollouts are correct.
    DAPO's rule compares success, not reward, because a length penalty makes rewards differ even if
    all completions are correct. `drop_flat` is ScaleRL's rule (arXiv 2510.13786): keep a group if
    its rewards are not all equal. Of the remaining groups, the first `most` groups are kept, or all
    groups if `most` is None.
    """
    scored = [g for g in groups if sum(r.reward is not None for r in g.rollouts) >= fewest]
    mixed = [g for g in scored if (is_mixed(g) or not dynamic) and not (drop_flat and is_flat(g))]
    kept = mixed[:most]
    return Selected(
        groups=tuple(kept),
        unscored=len(groups) - len(scored),
        uniform=len(scored) - len(mixed),
        surplus=len(mixed) - len(kept),
    )


def without_stale(selected: Selected, *, version: int, max_age: int) -> Selected:
    """Drop groups with a token sampled more than `max_age` optimizer steps before `version`.

    `version` is the version of the policy that is about to train on the groups. If `max_age` is 0,
    no group is dropped.
    """
    fresh = tuple(g for g in selected.groups if not max_age or age(g, version) <= max_age)
    stale = len(selected.groups) - len(fresh)
    return replace(selected, groups=fresh, stale=stale)


def is_mixed(group: Group) -> bool:
    """Return whether some but not all scored rollouts of a group are correct."""
    correct = [r.success for r in group.rollouts if r.reward is not None]
    return any(correct) and not all(correct)


def is_flat(group: Group) -> bool:
    """Return whether the rewards of a group are all equal, up to rounding."""
    rewards = [r.reward for r in group.rollouts if r.reward is not None]
    size = max(1.0, *(abs(reward) for reward in rewards))
    return max(rewards) - min(rewards) <= EQUAL_REWARDS * size


def age(group: Group, version: int) -> int:
    """Return how many optimizer steps before `version` the oldest token of a group was sampled.

    A rollout without tokens, whose environment failed before the policy's first turn, is ignored.
    """
    versions = (r.policy_version for r in group.rollouts if r.sampled)
    return version - min(versions, default=version)


def without_truncated(batch: Batch) -> Batch:
    """Mask all tokens of truncated rollouts (overlong filtering, DAPO section 3.4).

    Call this function after the advantages are computed. Masked rollouts still count in the
    statistics of their group and in the number of sequences. In a loss that averages over rollouts,
    masked rollouts count as 0, and the weights of all other rollouts do not change. A loss that
    averages over the tokens of a step or group includes only the unmasked tokens.
    """
    return replace(batch, mask=batch.mask & ~batch.truncated[:, None])
