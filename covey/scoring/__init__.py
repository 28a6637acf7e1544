"""Scoring of completions: in this process for quick rewards, otherwise in worker processes.

If a reward function raises an error, hangs or crashes, only the completion being scored gets no
reward.
"""

from covey.rewards.score import Call
from covey.scoring.job import InlineScorer, Job, Pending, Scorer, ScoreResult
from covey.scoring.pool import Pool, check_timeout, make_scorer

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
