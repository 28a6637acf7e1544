"""Rules about the settings of algorithms with a critic, a teacher or preference pairs."""

from __future__ import annotations

from collections.abc import Iterator

from covey.analysis.plan.finding import Said, Setup, rule
from covey.analysis.plan.idle_settings import changed
from covey.training.schedule import total_updates

_MODELS = (("critic", "values", "'ppo'"), ("teacher", "teacher", "'opd' or 'sdpo'"))
"""For each extra model: its section of the configuration, the value in `objective.needs` that asks
for it, and the algorithms that use it.
"""


@rule("idle", "other-settings")
def model_without_use(setup: Setup) -> Iterator[Said]:
    """Rule about settings in [critic] or [teacher] when the objective has no critic or teacher."""
    for section, need, names in _MODELS:
        given = changed(getattr(setup.config, section))
        if given and need not in setup.objective.needs:
            has = "has" if len(given) == 1 else "have"
            yield Said(
                (*given, "objective.name"),
                title=f"{', '.join(given.values())} {has} no effect",
                why=f"{setup.config.objective.name} has no {section}.",
                remedy=f"remove the section [{section}], or set objective.name = {names}",
            )


@rule("risk", "learning-rate")
def critic_that_learns_nothing(setup: Setup) -> Iterator[Said]:
    """Rule about a critic with a learning rate of 0, or with a warm-up as long as the run."""
    critic, train = setup.config.critic, setup.config.train
    if "values" not in setup.objective.needs:
        return
    if not critic.learning_rate:
        yield Said(
            ("critic.learning_rate",),
            title="critic.learning_rate = 0: the critic never changes",
            why="Advantages then use constant values, at the cost of a second model.",
            remedy="set a rate, such as 1e-5, or use an algorithm without a critic",
        )
    if train.budget == "steps" and critic.warmup_steps >= train.steps:
        yield Said(
            ("critic.warmup_steps", "train.steps"),
            title=f"critic.warmup_steps = {critic.warmup_steps} takes all {train.steps} steps",
            why="The policy is not trained while the critic warms up.",
            remedy="lower critic.warmup_steps",
        )


@rule("idle", "one-update-per-rollout")
def value_clip_unused(setup: Setup) -> Iterator[Said]:
    """Rule about a value clip when the critic's values cannot change before the update."""
    clip = setup.option("value_clip")
    if clip and "values" in setup.objective.needs and setup.config.train.updates == 1:
        yield Said(
            ("objective.value_clip", "train.mini_batches", "train.epochs"),
            title=f"objective.value_clip = {clip!r} has no effect with one update per rollout",
            why="The critic has not changed since its values were computed.",
            remedy="nothing, or take several updates (train.mini_batches)",
        )


@rule("risk", "penalty-and-reference")
def reference_follows_pairs(setup: Setup) -> Iterator[Said]:
    """Rule about preference pairs with a reference that follows the policy."""
    reference, updates = setup.config.reference, total_updates(setup.config.train)
    moves = reference.kind in ("moving", "renewed") and reference.every < updates
    if setup.objective.pairs and moves:
        yield Said(
            ("reference.kind", "reference.every", "objective.name"),
            title=f"reference.kind = {reference.kind!r} changes the reference of the pairs",
            why="Margins start again from 0 whenever the reference is updated, so beta keeps the "
            "policy near its recent weights and not near its initial weights.",
            remedy="nothing, if this is intended; reference.kind = 'frozen' keeps the policy near "
            "its initial weights",
        )
