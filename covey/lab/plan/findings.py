"""Finds equivalent algorithms, settings without effect, and harmful settings before training.

`findings` checks one resolved configuration, and `coincidences` checks the arms of a comparison.
`findings` and `coincidences` load neither a model nor data. The caller passes known facts about the
data as `TaskFacts`.
"""

from __future__ import annotations

from covey.config import Config

# Importing these modules registers their rules.
from covey.lab.plan import idle_settings, risky_settings  # noqa: F401
from covey.lab.plan.equivalence import RULES, Finding, setup_of
from covey.lab.plan.task_facts import TaskFacts


def findings(config: Config, facts: TaskFacts | None = None) -> list[Finding]:
    """Return all findings about a resolved configuration."""
    setup = setup_of(config, facts)
    return [finding for rule in RULES for finding in rule(setup)]
