"""Judging many answers: in this process if the reward is quick, otherwise in processes of its own.

A reward that raises, hangs or dies costs the answer its reward and nothing else.
"""

from covey.scoring.here import Here
from covey.scoring.pool import Pool
from covey.scoring.scorer import Scorer, check_timeout, make_scorer
from covey.scoring.verdict import Job, Pending, Verdict

__all__ = ["Here", "Job", "Pending", "Pool", "Scorer", "Verdict", "check_timeout", "make_scorer"]
