"""Scoring of completions: in this process for quick rewards, in worker processes for other rewards.

If a reward raises an error, hangs or crashes, only the completion that it was scoring loses its
reward.
"""

from covey.rewards.score import Call
from covey.scoring.build import InlineScorer, check_timeout, make_scorer
from covey.scoring.job import Job, Pending, Scorer, ScoreResult
from covey.scoring.pool import Pool

__all__ = [
    "Call",
    "InlineScorer",
    "Job",
    "Pending",
    "Pool",
    "ScoreResult",
    "Scorer",
    "check_timeout",
    "make_scorer",
]
