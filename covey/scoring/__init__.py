"""Judging many answers: in this process if the reward is quick, otherwise in processes of its own.

A reward that raises, hangs or dies costs the answer its reward and nothing else.
"""

from covey.scoring.inline import InlineScorer
from covey.scoring.pool import Pool
from covey.scoring.result import Job, Pending, ScoreResult
from covey.scoring.scorer import Scorer, check_timeout, make_scorer

__all__ = [
    "InlineScorer",
    "Job",
    "Pending",
    "Pool",
    "ScoreResult",
    "Scorer",
    "check_timeout",
    "make_scorer",
]
