"""Rules about self-teachers that cannot teach, or that are equivalent to a simpler teacher."""

from __future__ import annotations

from collections.abc import Iterator

from covey.analysis.plan.finding import Said, Setup, rule
from covey.training.schedule import total_updates


@rule("risk", "teachers")
def teacher_that_knows_nothing_more(setup: Setup) -> Iterator[Said]:
    """Rule about a self-teacher whose only extra context, a correct answer, is often missing."""
    config = setup.config
    if "privileged" not in setup.objective.needs or set(config.teacher.context) != {"success"}:
        return
    size, rounds = config.rollout.group_size, config.filter
    if size == 1:
        yield Said(
            ("teacher.context", "rollout.group_size"),
            title="teacher.context = success has no other completion to show",
            why="rollout.group_size = 1: a group has no second completion, so no completion has "
            "privileged text, and nothing is trained.",
            remedy="set rollout.group_size to 8, or add feedback or a column to teacher.context",
        )
    elif not rounds.dynamic_sampling:
        yield Said(
            ("teacher.context", "filter.dynamic_sampling"),
            title="groups without a correct completion teach nothing",
            why="teacher.context has no text but a correct completion of the same group. While the "
            "task is hard, most groups have none; objective/taught is the share that is taught.",
            remedy="nothing, if most groups have a correct completion; otherwise add feedback or a "
            "column to teacher.context, or set objective.task above 0",
        )


@rule("idle", "teachers")
def teacher_that_is_another(setup: Setup) -> Iterator[Said]:
    """Rule about a moving self-teacher that always equals the policy, or is never updated."""
    teacher, updates = setup.config.teacher, total_updates(setup.config.train)
    if "privileged" not in setup.objective.needs or teacher.policy != "moving":
        return
    if teacher.every > updates:
        other, why = "frozen", f"The run has {updates} optimizer steps, and the teacher never moves"
    elif teacher.alpha == 1.0 and setup.config.train.updates % teacher.every == 0:
        other, why = "current", "The teacher is a copy of the policy at the start of every step"
    else:
        return
    yield Said(
        ("teacher.policy", "teacher.alpha", "teacher.every", "train.steps"),
        title=f"teacher.policy = 'moving' is the same as {other!r} here",
        why=f"{why}, at the cost of a second copy of the weights.",
        remedy=f"set teacher.policy = {other!r}",
    )
