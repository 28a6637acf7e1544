"""Scores completions. Quick rewards run in this process, other rewards in worker processes.

If a reward function raises an error, hangs or crashes, only the completion being scored gets no
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
