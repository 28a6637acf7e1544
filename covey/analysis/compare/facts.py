"""Everything that a report says, gathered once for all its forms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from covey.analysis.compare.agreement import Agreement, agreement
from covey.analysis.compare.curves import Curve, curve
from covey.analysis.compare.evidence import Evidence, gather
from covey.analysis.compare.outcome import Comparison
from covey.analysis.compare.verdict import Verdict, verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A comparison with what follows from it."""

    comparison: Comparison
    verdict: Verdict
    curves: tuple[Curve, ...]
    agreement: Agreement | None
    """None without a finished run."""
    evidence: Evidence


def facts_of(folder: Path, comparison: Comparison) -> Facts:
    """Work out what a report says; `folder` is the comparison's, with its runs."""
    return Facts(
        comparison=comparison,
        verdict=verdict(comparison),
        curves=tuple(curve(comparison, arm.name) for arm in comparison.arms),
        agreement=agreement(comparison),
        evidence=gather(folder, comparison),
    )
