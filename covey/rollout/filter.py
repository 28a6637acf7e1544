"""Which groups an update learns from. Filters are not losses: they combine with any objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from covey.types import Batch, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The groups to learn from, and how many were left out, by reason."""

    groups: tuple[Group, ...]
    unscored: int = 0
    """Fewer than two of their answers were scored: there is nothing to compare."""
    stale: int = 0
    """Some answer was sampled too many optimizer steps ago."""
    uniform: int = 0
    """All right or all wrong."""
    surplus: int = 0
    """More than a step asks for."""


def select(
    groups: Sequence[Group],
    *,
    version: int,
    dynamic: bool = False,
    max_age: int = 0,
    most: int | None = None,
) -> Selected:
    """Leave out whole groups, never single answers: statistics are of groups.

    `dynamic` is DAPO's rule (arXiv 2503.14476 equation 11): keep a group if some but not all of its
    answers are right. It is about being right and not about reward, which a length penalty, say,
    makes vary in a group that is all right. With `max_age` a group is dropped if an answer is older
    than that many optimizer steps at `version`; 0 keeps all. `most` groups are kept, in order.
    """
    scored = [g for g in groups if sum(r.reward is not None for r in g.rollouts) >= 2]
    fresh = [g for g in scored if not max_age or _age(g, version) <= max_age]
    mixed = [g for g in fresh if not dynamic or is_mixed(g)]
    kept = mixed[:most]
    return Selected(
        groups=tuple(kept),
        unscored=len(groups) - len(scored),
        stale=len(scored) - len(fresh),
        uniform=len(fresh) - len(mixed),
        surplus=len(mixed) - len(kept),
    )


def is_mixed(group: Group) -> bool:
    """Whether some but not all scored answers of a group are right."""
    right = [r.success for r in group.rollouts if r.reward is not None]
    return any(right) and not all(right)


def _age(group: Group, version: int) -> int:
    return version - min(r.policy_version for r in group.rollouts)


def without_truncated(batch: Batch) -> Batch:
    """Train no token of answers that were cut off: overlong filtering, DAPO section 3.4.

    To be called after advantages are filled in: the answers stay in their group's statistics, and
    in the number of sequences, so that masking shrinks a mean over answers rather than weighs up
    the rest. A mean over tokens, of the step or of a group, is over those that are left.
    """
    return replace(batch, mask=batch.mask & ~batch.truncated[:, None])
