"""Rules that report settings without effect."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator

from covey.config import Config
from covey.config.schema import Section
from covey.errors import CoveyError
from covey.lab.plan.equivalence import (
    IGNORES_REWARD,
    Said,
    Setup,
    active_penalty,
    equivalent_algorithms,
    reference_is_policy,
    rule,
)
from covey.lab.plan.summary import most_steps
from covey.objective import advantage, algorithm, ratio
from covey.objective import surrogate as surrogates
from covey.objective.penalty import MAX_ADAPTATION
from covey.rewards.length import Soft
from covey.training.resolve import reward_of

UPDATES = ("train.mini_batches", "train.epochs")
"""Settings that determine the number of optimizer steps per rollout batch."""
TOKEN_SIZED_CLIP = 0.1
"""The smallest clip range that is too wide for a sequence-level ratio."""
FEW_STEPS = 4
"""The largest number of optimizer steps per epoch at which the rule about wide clip ranges
applies."""
SMALL_RATE = 1e-5
"""The largest learning rate at which the rule about wide clip ranges applies."""
NOTICEABLE_BETA = 1.1
"""An adaptive beta counts as fixed if it changes by less than a factor of NOTICEABLE_BETA in a
run."""


def changed(section: Section, *names: str) -> dict[str, str]:
    """Return the text `name = value` for each setting that differs from its default."""
    fields = type(section).model_fields
    pairs = [(name, getattr(section, name)) for name in names or fields if name in fields]
    where = type(section).__name__.lower()
    return {f"{where}.{k}": f"{where}.{k} = {v!r}" for k, v in pairs if v != fields[k].default}


def changed_options(setup: Setup, *names: str) -> dict[str, str]:
    """Return the text `name = value` for each objective option that differs from its default."""
    options = setup.config.objective.options
    parameters = inspect.signature(algorithm(setup.config.objective.name, options)).parameters
    return {
        f"objective.{name}": f"objective.{name} = {options[name]!r}"
        for name in names
        if name in options and options[name] != parameters[name].default
    }


@rule("same", "single-optimizer-step")
def one_update_equivalence(setup: Setup) -> Iterator[Said]:
    """Report algorithms that have equal gradients with a single optimizer step."""
    others = equivalent_algorithms(setup) if setup.single_optimizer_step else []
    if others:
        name, prompts = setup.config.objective.name, setup.config.rollout.prompts_per_step
        # With more mini-batches than prompts, mini-batches would split groups.
        more = "train.epochs = 2" if prompts == 1 else f"train.mini_batches = {min(4, prompts)}"
        yield Said(
            ("objective.name", *UPDATES),
            title=f"with one optimizer step per training step {name} is the same as "
            f"{', '.join(others)}",
            why="The trained policy is the policy that generated the completions, so every ratio "
            "is exactly 1. Clips have no effect, and a sequence-level ratio has the same gradient "
            "as token ratios.",
            remedy=f"if the algorithms should differ, take several optimizer steps, such as {more}",
        )


@rule("idle", "single-optimizer-step")
def off_policy_only(setup: Setup) -> Iterator[Said]:
    """Report settings that have an effect only if the policy has changed after generation."""
    if not setup.single_optimizer_step:
        return
    names = ["dual"] if setup.option("dual") else []
    if setup.option("off_policy_limit") and setup.exact:
        names.append("off_policy_limit")
    if setup.surrogate is surrogates.penalized_where_marked:
        names += ["coefficient", "share"]
    if setup.on_policy and setup.surrogate is surrogates.clipped_at_marks:
        names.append("target")
    if setup.on_policy and setup.surrogate is surrogates.unclipped_without_marked:
        names.append("tau")
    if names:
        settings = ", ".join(f"objective.{n} = {setup.option(n)!r}" for n in names)
        have = "has" if len(names) == 1 else "have"
        yield Said(
            (*(f"objective.{name}" for name in names), "objective.name", "model.dtype", *UPDATES),
            title=f"{settings} {have} no effect with one optimizer step per training step",
            why="Such a setting acts only if the policy has changed since it generated the "
            "completions. With one optimizer step, the policy has not changed, and the setting "
            "adds no gradient.",
            remedy="take several optimizer steps (train.mini_batches), or remove the setting",
        )


@rule("idle", "single-optimizer-step")
def old_logp_unread(setup: Setup) -> Iterator[Said]:
    """Report `train.old_logp` in a run where this setting has no effect."""
    source, objective = setup.config.train.old_logp, setup.objective
    if source == "auto":
        return
    if "old_entropy" in objective.needs and source == "sampler":
        why = (
            "The algorithm needs the entropy of the old policy, which takes a forward pass of the "
            "trainer; old_logp comes from the same pass."
        )
    elif setup.single_optimizer_step and not objective.needs & {"old_logp", "old_entropy"}:
        why = "With one optimizer step per training step, old_logp equals logp."
    else:
        return
    yield Said(
        ("train.old_logp", "objective.name", *UPDATES),
        title=f"train.old_logp = {source!r} has no effect",
        why=why,
        remedy="set train.old_logp = 'auto'",
    )


@rule("idle", "clip-range-of-a-sequence-ratio")
def clip_never_acts(setup: Setup) -> Iterator[Said]:
    """Report a sequence-level ratio with a clip range meant for token ratios."""
    low, high = (setup.option(name, 0.0) for name in ("clip_low", "clip_high"))
    per_sequence = setup.objective.ratio in (ratio.sequence, ratio.sequence_token, ratio.arithmetic)
    train = setup.config.train
    short = train.epochs == 1 and 1 < train.mini_batches <= FEW_STEPS
    near = short and setup.config.optimizer.learning_rate <= SMALL_RATE
    if setup.surrogate is not surrogates.clipped or not per_sequence or not near:
        return
    if min(low, high) >= TOKEN_SIZED_CLIP and setup.config.rollout.max_tokens > 1:
        yield Said(
            ("objective.clip_low", "objective.clip_high", "optimizer.learning_rate", *UPDATES),
            title=f"objective.clip_low = {low}, clip_high = {high} hardly ever clip a "
            "sequence-level ratio",
            why="A sequence-level ratio is a mean over the tokens of a completion, so it changes "
            f"far less than token ratios. In {train.mini_batches} optimizer steps at this learning "
            "rate, even token ratios change little. The paper's bounds are 0.0003 and 0.0004.",
            remedy="set objective.clip_low = 3e-4 and objective.clip_high = 4e-4",
        )


@rule("idle", "penalty-and-reference")
def penalty_settings(setup: Setup) -> Iterator[Said]:
    """Report KL-penalty and reference-policy settings that have no effect."""
    if not setup.objective.beta:
        idle = changed(setup.config.reference) | changed_options(setup, "kl", "kl_in")
        if idle:
            yield Said(
                (*idle, "objective.beta"),
                title=f"{', '.join(idle.values())}: no effect, because objective.beta is 0",
                why="Without a weight there is no penalty, and no reference is loaded.",
                remedy="set objective.beta, such as 0.04, or remove these settings",
            )
    elif active_penalty(setup) is None:
        settings: tuple[str, ...]
        if reference_is_policy(setup):
            settings = ("objective.beta", "reference.kind", "reference.every", *UPDATES)
            why = (
                "The reference is updated after every batch, so it always equals the policy that "
                "generated the completions. The KL and its gradient are 0."
            )
            remedy = "raise reference.every"
        else:
            settings = ("objective.beta", "objective.kl_in")
            why = (
                "The advantage depends on which completions are correct and not on their reward, "
                "so a KL in the reward has no effect, although a reference is loaded."
            )
            remedy = "set objective.kl_in = 'loss'"
        yield Said(
            settings,
            title=f"objective.beta = {setup.objective.beta} has no effect",
            why=why,
            remedy=f"{remedy}, or set objective.beta = 0",
        )


@rule("idle", "penalty-and-reference")
def adaptive_beta(setup: Setup) -> Iterator[Said]:
    """Report an adaptive beta that has no KL target, or that hardly changes within the run."""
    config, objective = setup.config, setup.objective
    if not objective.kl_target:
        idle = changed_options(setup, "kl_horizon")
        why, what = "beta adapts to a target KL, but no target is set.", "has no effect"
        remedy = "set objective.kl_target, or remove objective.kl_horizon"
    else:
        completions = config.rollout.prompts_per_step * config.rollout.group_size
        growth = MAX_ADAPTATION * min(completions / objective.kl_horizon, 1.0)
        most = most_steps(config)
        needed = math.log(NOTICEABLE_BETA) / math.log1p(growth)
        title = f"objective.kl_target = {objective.kl_target}"
        idle = {"objective.kl_target": title} if most < needed else {}
        why = (
            f"A step of {completions} completions changes beta by {growth:.2%} at most. A factor "
            f"of {NOTICEABLE_BETA} takes {needed:,.0f} steps, but the run has {most:,} steps."
        )
        what, remedy = "hardly changes beta", "lower objective.kl_horizon"
    for title in idle.values():
        yield Said(
            ("objective.kl_target", "objective.kl_horizon", "train.steps"),
            title=f"{title} {what}",
            why=why,
            remedy=remedy,
        )


@rule("idle", "sampling")
def correction_bounds(setup: Setup) -> Iterator[Said]:
    """Report bounds of an off-policy correction in a run without a correction."""
    if setup.option("correction", "none") != "none":
        return
    names = ["correction_low", "correction_high"]
    names += [] if setup.objective.corrects else ["correction_mean_one"]
    idle = changed_options(setup, *names)
    if idle:
        yield Said(
            (*idle, "objective.correction"),
            title=f"{', '.join(idle.values())}: no effect, because objective.correction is 'none'",
            why="These settings bound a correction, but no correction is chosen.",
            remedy="set objective.correction, such as 'token_truncate', or remove these settings",
        )


@rule("idle", "sampling")
def nothing_to_correct(setup: Setup) -> Iterator[Said]:
    """Report an off-policy correction that does nothing because engine and trainer log-probs
    agree."""
    idle = changed_options(setup, "correction", "veto")
    if idle and setup.exact and not setup.config.stale:
        yield Said(
            (*idle, "model.dtype"),
            title=f"{', '.join(idle.values())}: there is nothing to correct",
            why="Engine and trainer share their float32 weights and agree to 1e-5.",
            remedy="remove the correction; only bfloat16 and truncated sampling need it",
        )


@rule("idle", "filters")
def filters(setup: Setup) -> Iterator[Said]:
    """Report settings in [filter] and [overlap] that have no effect."""
    chosen, overlap = setup.config.filter, setup.config.overlap
    cases = [
        (
            chosen.skip_zero_gradient and not setup.objective.only_surrogate,
            ("filter.skip_zero_gradient", "objective.beta", "objective.name"),
            "filter.skip_zero_gradient = True skips nothing",
            "A penalty, an entropy bonus or marked tokens give every completion a gradient, even "
            "with advantage 0.",
            "remove filter.skip_zero_gradient",
        ),
        (
            not chosen.dynamic_sampling and bool(changed(chosen, "max_rounds")),
            ("filter.max_rounds", "filter.dynamic_sampling"),
            f"filter.max_rounds = {chosen.max_rounds} has no effect",
            "This setting limits dynamic sampling, which is off.",
            "set filter.dynamic_sampling = true, or remove filter.max_rounds",
        ),
        (
            overlap.max_staleness > 0
            and overlap.max_staleness >= overlap.staleness * setup.config.train.optimizer_steps,
            ("overlap.max_staleness", "overlap.staleness", "train.mini_batches", "train.epochs"),
            f"overlap.max_staleness = {overlap.max_staleness} drops nothing",
            "No completion is older than overlap.staleness allows.",
            "remove overlap.max_staleness",
        ),
        (
            overlap.mode == "copy" and not overlap.staleness,
            ("overlap.mode", "overlap.staleness"),
            "overlap.mode = 'copy' overlaps nothing with overlap.staleness = 0",
            "Each step waits for completions of the current weights.",
            "set overlap.staleness = 1, or remove overlap.mode",
        ),
    ]
    for holds, settings, title, why, remedy in cases:
        if holds:
            yield Said(settings, title=title, why=why, remedy=remedy)


@rule("idle", "rewards")
def length_penalty_unread(setup: Setup) -> Iterator[Said]:
    """Report a length penalty that the advantage ignores, or that never applies."""
    section, longest = setup.config.length_penalty, setup.config.rollout.max_tokens
    if section.name != "none" and setup.advantage in IGNORES_REWARD:
        algorithm_name = setup.config.objective.name
        yield Said(
            ("length_penalty.name", "objective.name"),
            title=f"length_penalty.name = {section.name!r} has no effect with {algorithm_name}",
            why=f"The advantage of {algorithm_name} depends on which completions are correct, and "
            "not on their rewards.",
            remedy="use an algorithm that uses rewards, or remove the length penalty",
        )
    options = section.options
    if section.name == "soft" and Soft(**options).of(longest) == 0.0:
        yield Said(
            ("length_penalty.limit", "length_penalty.cache", "rollout.max_tokens"),
            title=f"length_penalty.limit = {options['limit']}, cache = {options['cache']} never "
            "apply",
            why=f"Completions end at rollout.max_tokens = {longest}, before the penalty starts.",
            remedy="remove limit and cache, or raise rollout.max_tokens",
        )


@rule("idle", "groups")
def keeps_all(setup: Setup) -> Iterator[Said]:
    """Report a value of `objective.keep` that filters out no completion."""
    size, keep = setup.config.rollout.group_size, setup.option("keep", 0)
    if keep >= size:
        yield Said(
            ("objective.keep", "rollout.group_size"),
            title=f"objective.keep = {keep} keeps all completions of a group of {size}",
            why="No completion is filtered out, so the advantage equals that of GRPO.",
            remedy=f"set objective.keep = {max(1, size // 2)}, or raise rollout.group_size",
        )


@rule("idle", "rewards")
def one_part(setup: Setup) -> Iterator[Said]:
    """Report `objective.parts` with only one reward component."""
    if len(setup.objective.parts) == 1:
        name = setup.config.objective.name
        yield Said(
            ("objective.parts", "objective.name"),
            title=f"objective.parts names one part: {name} is grpo times a number",
            why="A single part is standardized in its group as in grpo, and then divided by one "
            "deviation for the whole step.",
            remedy="name several parts, or use grpo",
        )


@rule("idle", "groups")
def groups_of_two(setup: Setup) -> Iterator[Said]:
    """Report groups of two, where all standardized advantages have the same absolute value."""
    if setup.advantage is not advantage.group_standardized or setup.config.rollout.group_size != 2:
        return
    size = 1.0 if setup.option("ddof", 1) == 0 else math.sqrt(0.5)
    yield Said(
        ("rollout.group_size", "objective.name"),
        title=f"rollout.group_size = 2: every advantage is +-{size:.2f}, whatever the rewards are",
        why="Two rewards divided by their own standard deviation only show which one is larger.",
        remedy="raise rollout.group_size, or use an advantage that is not standardized, such as "
        "objective.name = 'dr_grpo'",
    )


@rule("idle", "other-settings")
def unused_sections(setup: Setup) -> Iterator[Said]:
    """Report LoRA, scoring and activation-offloading settings that have no effect."""
    config = setup.config
    if config.model.offload_activations and not config.model.gradient_checkpointing:
        yield Said(
            ("model.offload_activations", "model.gradient_checkpointing"),
            title="model.offload_activations = true: no effect without gradient checkpointing",
            why="Only the inputs of recomputed layers are kept in main memory.",
            remedy="set model.gradient_checkpointing = true, or remove the setting",
        )
    idle = changed(config.adapter, "alpha", "targets") if not config.adapter.rank else {}
    if idle:
        yield Said(
            (*idle, "adapter.rank"),
            title=f"{', '.join(idle.values())}: no effect, because adapter.rank is 0",
            why="Without a rank all weights are trained, and there is no adapter.",
            remedy="set adapter.rank, such as 16, or remove these settings",
        )
    idle = changed(config.scoring, "workers", "timeout", "gigabytes")
    if idle and _is_quick(config):
        reward = f"reward.name = {config.reward.name!r}"
        yield Said(
            (*idle, "reward.name"),
            title=f"{', '.join(idle.values())}: no effect with {reward}",
            why="The reward is quick, so it is computed in the main process.",
            remedy="remove these settings",
        )


def _is_quick(config: Config) -> bool:
    try:
        return reward_of(config).quick
    except CoveyError:  # the error is reported when the run is assembled
        return False


# Rules about the settings of algorithms with a critic, a teacher or preference pairs.

_MODELS = (("critic", "values", "'ppo'"), ("teacher", "teacher", "'opd' or 'sdpo'"))
"""The models that only some algorithms use: the critic and the teacher. Each entry names the
model's section of the configuration, the model's key in `objective.needs`, and the algorithms that
use the model."""


@rule("idle", "other-settings")
def model_without_use(setup: Setup) -> Iterator[Said]:
    """Report settings of a critic or a teacher that the objective does not use."""
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
    """Report a critic with a learning rate of 0, or with a warm-up as long as the run."""
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


@rule("idle", "single-optimizer-step")
def value_clip_unused(setup: Setup) -> Iterator[Said]:
    """Report a value clip without effect, because a training step takes only one optimizer step."""
    clip = setup.option("value_clip")
    if clip and "values" in setup.objective.needs and setup.config.train.optimizer_steps == 1:
        yield Said(
            ("objective.value_clip", "train.mini_batches", "train.epochs"),
            title=f"objective.value_clip = {clip!r} has no effect with one optimizer step per "
            "training step",
            why="The critic has not changed since its values were computed.",
            remedy="take several optimizer steps (train.mini_batches), or remove the setting",
        )


@rule("risk", "penalty-and-reference")
def reference_follows_pairs(setup: Setup) -> Iterator[Said]:
    """Report preference pairs whose reference policy changes during the run."""
    reference, updates = setup.config.reference, setup.config.train.total_optimizer_steps
    moves = reference.kind in ("moving", "renewed") and reference.every < updates
    if setup.objective.pairs and moves:
        yield Said(
            ("reference.kind", "reference.every", "objective.name"),
            title=f"reference.kind = {reference.kind!r} changes the reference of the pairs",
            why="Margins start again from 0 whenever the reference is updated, so beta keeps the "
            "policy near its recent weights and not near its initial weights.",
            remedy="to keep the policy near its initial weights, set reference.kind = 'frozen'",
        )


# Rules about curriculum and replay settings that have no effect.


@rule("idle", "data-over-time")
def idle_curriculum(setup: Setup) -> Iterator[Said]:
    """Report a curriculum whose pass rates never affect the choice of prompts."""
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
    """Report a replay buffer whose rollouts are never replayed."""
    config, replay = setup.config, setup.config.replay
    given = changed(replay, "size", "max_age")
    if given and not replay.groups:
        yield Said(
            (*given, "replay.groups"),
            title=f"{', '.join(given.values())}: no effect",
            why="replay.groups is 0, so nothing is replayed.",
            remedy="set replay.groups, or remove these settings",
        )
    if replay.groups and replay.max_age < config.train.optimizer_steps:
        yield Said(
            ("replay.max_age", "replay.groups", "train.mini_batches", "train.epochs"),
            title=f"replay.max_age = {replay.max_age} allows no replay",
            why=f"A group is {config.train.optimizer_steps} optimizer steps old when the next step "
            "begins.",
            remedy=f"set replay.max_age to at least {config.train.optimizer_steps}",
        )


# Rules about self-teachers that cannot teach, or that are equivalent to a simpler teacher.


@rule("risk", "teachers")
def teacher_that_knows_nothing_more(setup: Setup) -> Iterator[Said]:
    """Report an `sdpo` teacher that has no privileged text if a group has no correct completion."""
    config = setup.config
    if "privileged" not in setup.objective.needs or set(config.teacher.context) != {"success"}:
        return
    size, rounds = config.rollout.group_size, config.filter
    if size == 1:
        yield Said(
            ("teacher.context", "rollout.group_size"),
            title="teacher.context = success needs a second completion in each group",
            why="With rollout.group_size = 1, no completion has privileged text, so the run trains "
            "on nothing.",
            remedy="set rollout.group_size to 8, or add feedback or a column to teacher.context",
        )
    elif not rounds.dynamic_sampling:
        yield Said(
            ("teacher.context", "filter.dynamic_sampling"),
            title="groups without a correct completion have no privileged text",
            why="The only text in teacher.context is a correct completion of the same group. If "
            "the task is hard, most groups have no correct completion. The metric objective/taught "
            "is the share of completions that the teacher trains.",
            remedy="if many groups have no correct completion, add feedback or a column to "
            "teacher.context, or set objective.task above 0",
        )


@rule("idle", "teachers")
def teacher_that_is_another(setup: Setup) -> Iterator[Said]:
    """Report a moving `sdpo` teacher that always equals the policy, or that is never updated."""
    teacher, updates = setup.config.teacher, setup.config.train.total_optimizer_steps
    if "privileged" not in setup.objective.needs or teacher.policy != "moving":
        return
    if teacher.every > updates:
        other, why = (
            "frozen",
            f"The run has {updates} optimizer steps, and the teacher is never updated",
        )
    elif teacher.alpha == 1.0 and setup.config.train.optimizer_steps % teacher.every == 0:
        other, why = "current", "The teacher is a copy of the policy at the start of every step"
    else:
        return
    yield Said(
        ("teacher.policy", "teacher.alpha", "teacher.every", "train.steps"),
        title=f"teacher.policy = 'moving' is the same as {other!r} here",
        why=f"{why}, at the cost of a second copy of the weights.",
        remedy=f"set teacher.policy = {other!r}",
    )
