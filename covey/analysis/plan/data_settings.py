"""Rules about curriculum and replay settings that have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from covey.analysis.plan.finding import Said, Setup, rule
from covey.analysis.plan.idle_settings import changed


@rule("idle", "data-over-time")
def idle_curriculum(setup: Setup) -> Iterator[Said]:
    """Rule about a curriculum whose pass rates never affect the choice of prompts."""
    config, size = setup.config, setup.facts.prompts
    curriculum = config.curriculum
    given = changed(curriculum, "memory", "floor")
    if given and not curriculum.active:
        yield Said(
            (*given, "curriculum.sampling", "curriculum.drop_above", "curriculum.mixture"),
            title=f"{', '.join(given.values())}: no effect",
            why="With these values of curriculum.sampling, drop_above and mixture, prompts are "
            "chosen at random.",
            remedy="set curriculum.sampling = 'uncertain', or remove these settings",
        )
    drawn = config.rollout.prompts_per_step * config.train.steps
    by_prompt = curriculum.sampling != "uniform" or curriculum.drop_above > 0
    if by_prompt and config.train.budget == "steps" and drawn < size:
        yield Said(
            ("curriculum.sampling", "curriculum.drop_above", "train.steps",
             "rollout.prompts_per_step"),
            title=f"the curriculum draws {drawn} of {size} prompts: few are drawn twice",
            why="The pass rate of a prompt is known after its first group, so it matters only "
            "for later groups.",
            remedy="use fewer prompts or more steps, or remove the curriculum",
        )  # fmt: skip


@rule("idle", "data-over-time")
def idle_replay(setup: Setup) -> Iterator[Said]:
    """Rule about a replay buffer whose rollouts are never replayed."""
    config, replay = setup.config, setup.config.replay
    given = changed(replay, "size", "max_age")
    if given and not replay.groups:
        yield Said(
            (*given, "replay.groups"),
            title=f"{', '.join(given.values())}: no effect",
            why="replay.groups is 0, so nothing is replayed.",
            remedy="set replay.groups, or remove these settings",
        )
    if replay.groups and replay.max_age < config.train.updates:
        yield Said(
            ("replay.max_age", "replay.groups", "train.mini_batches", "train.epochs"),
            title=f"replay.max_age = {replay.max_age} allows no replay",
            why=f"A group is {config.train.updates} optimizer steps old when the next step begins.",
            remedy=f"set replay.max_age to at least {config.train.updates}",
        )
