"""Finds settings without effect, harmful settings and equivalent algorithms before training.

`RULES` is a table of all findings about one configuration. No rule loads a model or data: known
facts about the data are given as `TaskFacts`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from covey.baselines import REMEDY
from covey.config import Config
from covey.config.resolve import reward_of
from covey.config.schema import Section
from covey.errors import ConfigError, CoveyError
from covey.lab.plan.equivalence import (
    IGNORES_REWARD,
    PAGE,
    Finding,
    Kind,
    Setup,
    active_penalty,
    equivalent_algorithms,
    reference_is_policy,
    setup_of,
)
from covey.lab.plan.summary import most_steps
from covey.lab.plan.task_facts import TaskFacts
from covey.objective import advantage, find_algorithm, penalty, ratio
from covey.objective import surrogate as surrogates
from covey.objective.penalty import MAX_ADAPTATION
from covey.rewards.length import Soft
from covey.rollout.prompt_limit import limit_reason, longest_prompt

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
SLOW_ADAPTER = 2e-6
"""The highest learning rate that counts as one of full training, whose default is 1e-6."""
COLD = 0.3
"""The highest temperature at which most completions of a prompt are equal."""
TIGHT_CLIP = 0.01
"""Clip bounds below TIGHT_CLIP are meant for sequence-level ratios, not for token ratios."""
POINTS = 0.05
"""The difference in accuracy that an evaluation should be able to detect."""
FEWEST_PAIRS = 6
"""Two evaluations can differ significantly only if at least FEWEST_PAIRS prompts have different
results. If 6 results change in the same direction, a two-sided sign test gives the p-value `2 /
2**6 < 0.05`."""
FEWEST_PROMPTS = math.ceil(FEWEST_PAIRS / POINTS)
UNFINISHED = 0.25
"""The smallest fraction of truncated solutions at which a rule reports `rollout.max_tokens`."""

FORMAT_REWARDS = frozenset(
    {
        "think_answer_form", "think_tool_form", "agent_example_form",
        "efficiency", "safety", "citations", "coherence",
    }
)  # fmt: skip
"""Rewards that score the format of a completion and not its final answer, so that a completion with
`success` may still be wrong."""

Values = Mapping[str, Any]
"""What a condition found, for the texts of its finding. A key with a dot is the name of a setting,
and its value is the text `name = value`; the texts use them as {idle}."""


def findings(config: Config, facts: TaskFacts | None = None) -> list[Finding]:
    setup = setup_of(config, facts)
    return [finding for rule in RULES for finding in rule.findings(setup)]


class Rule(NamedTuple):
    """A row of the table of findings; the texts are filled in with `str.format`."""

    kind: str
    """The kind of the finding, and the section of docs/plan.md that explains it."""
    settings: str
    when: Callable[[Setup, Config], bool | Values | Sequence[Values]]
    title: str
    why: str
    remedy: str

    def findings(self, setup: Setup) -> list[Finding]:
        holds = self.when(setup, setup.config)
        found: Values | Sequence[Values] = [{}] if holds is True else holds or []
        kind, section = self.kind.split()
        made = []
        for values in [found] if isinstance(found, Mapping) else found:
            own = {name: text for name, text in values.items() if "." in name}
            texts = {
                **{name: value for name, value in values.items() if "." not in name},
                "c": setup.config,
                "o": setup.objective,
                "f": setup.facts,
                "idle": ", ".join(own.values()),
                "has": "has" if len(own) == 1 else "have",
            }
            made.append(
                Finding(
                    kind=cast(Kind, kind),
                    title=self.title.format_map(texts),
                    why=self.why.format_map(texts),
                    remedy=self.remedy.format_map(texts),
                    docs=f"{PAGE}#{section}",
                    settings=tuple(dict.fromkeys([*own, *self.settings.split()])),
                )
            )
        return made


# What the conditions read.


def changed(section: Section, *names: str) -> dict[str, str]:
    """Return the text `name = value` for each setting that differs from its default."""
    fields = type(section).model_fields
    pairs = [(name, getattr(section, name)) for name in names or fields if name in fields]
    where = type(section).__name__.lower()
    return {f"{where}.{k}": f"{where}.{k} = {v!r}" for k, v in pairs if v != fields[k].default}


def changed_options(setup: Setup, *names: str) -> dict[str, str]:
    """Return the text `name = value` for each objective option that differs from its default."""
    options = setup.config.objective.options
    parameters = inspect.signature(find_algorithm(setup.config.objective.name, options)).parameters
    return {
        f"objective.{name}": f"objective.{name} = {options[name]!r}"
        for name in names
        if name in options and options[name] != parameters[name].default
    }


def off_policy_only(setup: Setup, config: Config) -> Values:
    """Return options that have an effect only if the policy has changed after generation."""
    if not setup.single_optimizer_step:
        return {}
    names = ["dual"] if setup.option("dual") else []
    if setup.option("off_policy_limit") and setup.exact:
        names.append("off_policy_limit")
    if setup.surrogate is surrogates.penalized_where_marked:
        names += ["coefficient", "share"]
    if setup.on_policy and setup.surrogate is surrogates.clipped_at_marks:
        names.append("target")
    if setup.on_policy and setup.surrogate is surrogates.unclipped_without_marked:
        names.append("tau")
    return {f"objective.{n}": f"objective.{n} = {setup.option(n)!r}" for n in names}


def clip_never_acts(setup: Setup, config: Config) -> bool | Values:
    """Return the bounds of a sequence-level ratio with a clip range meant for token ratios."""
    low, high = (setup.option(name, 0.0) for name in ("clip_low", "clip_high"))
    per_sequence = setup.objective.ratio in (ratio.sequence, ratio.sequence_token, ratio.arithmetic)
    train = config.train
    short = train.epochs == 1 and 1 < train.mini_batches <= FEW_STEPS
    near = short and config.optimizer.learning_rate <= SMALL_RATE
    acts = setup.surrogate is not surrogates.clipped or not per_sequence or not near
    wide = min(low, high) >= TOKEN_SIZED_CLIP and config.rollout.max_tokens > 1
    return wide and not acts and {"low": low, "high": high}


def fixed_beta(setup: Setup, config: Config) -> bool | Values:
    objective, rollout = setup.objective, config.rollout
    if not objective.kl_target:
        return False
    count = rollout.prompts_per_step * rollout.group_size
    growth = MAX_ADAPTATION * min(count / objective.kl_horizon, 1.0)
    most, needed = most_steps(config), math.log(NOTICEABLE_BETA) / math.log1p(growth)
    numbers = {"count": count, "growth": growth, "factor": NOTICEABLE_BETA}
    return most < needed and {**numbers, "needed": needed, "most": most}


def unread_scoring(setup: Setup, config: Config) -> Values:
    """Return settings of scoring workers if the reward is computed in the main process."""
    try:
        quick = reward_of(config).quick
    except CoveyError:  # the error is reported when the run is assembled
        return {}
    return changed(config.scoring, "workers", "timeout", "gigabytes") if quick else {}


def few_draws(setup: Setup, config: Config) -> bool | Values:
    drawn = config.rollout.prompts_per_step * config.train.steps
    by_prompt = config.curriculum.sampling != "uniform" or config.curriculum.drop_above > 0
    few = by_prompt and config.train.budget == "steps" and drawn < setup.facts.prompts
    return few and {"drawn": drawn}


def success_is_all(setup: Setup) -> bool:
    """Whether the only privileged text of a teacher is a correct completion."""
    context = set(setup.config.teacher.context)
    return "privileged" in setup.objective.needs and context == {"success"}


def teacher_that_is_another(setup: Setup, config: Config) -> bool | Values:
    teacher, train = config.teacher, config.train
    updates = train.total_optimizer_steps
    if "privileged" not in setup.objective.needs or teacher.policy != "moving":
        return False
    if teacher.every > updates:
        why = f"The run has {updates} optimizer steps, and the teacher is never updated"
        return {"other": "frozen", "why": why}
    copied = teacher.alpha == 1.0 and train.optimizer_steps % teacher.every == 0
    why = "The teacher is a copy of the policy at the start of every step"
    return copied and {"other": "current", "why": why}


def format_only(setup: Setup, config: Config) -> bool | Values:
    users = ["filter.dynamic_sampling = True"] if config.filter.dynamic_sampling else []
    if "success" in setup.objective.needs:
        users.append(f"objective.name = {config.objective.name!r}")
    needed = bool(users) and config.reward.name in FORMAT_REWARDS
    return needed and {"users": " and ".join(users)}


def tight_clip(setup: Setup, config: Config) -> bool | Values:
    low, high = (setup.option(name, 1.0) for name in ("clip_low", "clip_high"))
    of_tokens = setup.objective.ratio is ratio.token and setup.surrogate is surrogates.clipped
    tight = not setup.single_optimizer_step and of_tokens and max(low, high) < TIGHT_CLIP
    return tight and {"low": low, "high": high}


def few_held_out(setup: Setup, config: Config) -> bool | Values:
    evaluate, options = config.evaluate, config.task.options
    known = (setup.facts.held_out, evaluate.prompts, options.get("held_out_size"))
    prompts = next((number for number in known if number), None)
    if not evaluate.every or not isinstance(prompts, int) or not 0 < prompts < FEWEST_PROMPTS:
        return False
    shown = f"with {prompts} prompts, no change can be significant"
    if prompts >= FEWEST_PAIRS:
        shown = f"here that is {FEWEST_PAIRS / prompts:.0%} of the prompts"
    return {"prompts": prompts, "shown": shown}


def long_prompts(setup: Setup, config: Config) -> bool | Values:
    facts = setup.facts
    if facts.context is None:
        return False
    try:
        limit = longest_prompt(config, facts.context)
    except ConfigError:  # no prompt fits, so the run cannot start
        return False
    count = sum(length > limit for length in facts.long_prompts or facts.prompt_tokens)
    if not count:
        return False
    share = f"{count} of {len(facts.prompt_tokens)} prompts that were measured"
    if facts.long_prompts:
        least = "at least " * (count == len(facts.long_prompts))
        share = f"{least}{count} of {facts.prompts:,} prompts"
    what, remedy = {
        "error": (
            "the run stops before it begins",
            "set rollout.long_prompts = 'skip' or 'truncate', or shorten the data",
        ),
        "skip": ("they are left out", "check which text is lost"),
        "truncate": ("their first tokens are cut off", "check which text is lost"),
    }[config.rollout.long_prompts]
    reason = limit_reason(config, facts.context)
    return {"share": share, "limit": limit, "what": what, "reason": reason, "remedy": remedy}


def too_short(setup: Setup, config: Config) -> bool | Values:
    lengths, limit = setup.facts.solution_tokens, config.rollout.max_tokens
    cut = sum(length > limit for length in lengths)
    if not lengths or cut / len(lengths) < UNFINISHED:
        return False
    median = sorted(lengths)[len(lengths) // 2]
    return {"cut": cut, "all": len(lengths), "median": median, "most": max(lengths)}


# The table. c is the configuration, o the objective, and f the facts about the data; {idle} lists
# the settings that the condition found.

RULES: tuple[Rule, ...] = (
    Rule(
        "same single-optimizer-step",
        "objective.name train.mini_batches train.epochs",
        lambda s, c: (
            s.single_optimizer_step
            and bool(others := equivalent_algorithms(s))
            and {
                "others": ", ".join(others),
                # With more mini-batches than prompts, mini-batches would split groups.
                "more": "train.epochs = 2"
                if c.rollout.prompts_per_step == 1
                else f"train.mini_batches = {min(4, c.rollout.prompts_per_step)}",
            }
        ),
        "with one optimizer step per training step {c.objective.name} is the same as {others}",
        "The trained policy is the policy that generated the completions, so every ratio is "
        "exactly 1. Clips have no effect, and a sequence-level ratio has the same gradient as "
        "token ratios.",
        "if the algorithms should differ, take several optimizer steps, such as {more}",
    ),
    Rule(
        "idle single-optimizer-step",
        "objective.name model.dtype train.mini_batches train.epochs",
        off_policy_only,
        "{idle} {has} no effect with one optimizer step per training step",
        "Such a setting acts only if the policy has changed since it generated the completions. "
        "With one optimizer step, the policy has not changed, and the setting adds no gradient.",
        "take several optimizer steps (train.mini_batches), or remove the setting",
    ),
    Rule(
        "idle single-optimizer-step",
        "train.old_logp objective.name train.mini_batches train.epochs",
        lambda s, c: c.train.old_logp == "sampler" and "old_entropy" in s.objective.needs,
        "train.old_logp = {c.train.old_logp!r} has no effect",
        "The algorithm needs the entropy of the old policy, which takes a forward pass of the "
        "trainer; old_logp comes from the same pass.",
        "set train.old_logp = 'auto'",
    ),
    Rule(
        "idle single-optimizer-step",
        "train.old_logp objective.name train.mini_batches train.epochs",
        lambda s, c: (
            c.train.old_logp != "auto"
            and s.single_optimizer_step
            and not s.objective.needs & {"old_logp", "old_entropy"}
        ),
        "train.old_logp = {c.train.old_logp!r} has no effect",
        "With one optimizer step per training step, old_logp equals logp.",
        "set train.old_logp = 'auto'",
    ),
    Rule(
        "idle clip-range-of-a-sequence-ratio",
        "objective.clip_low objective.clip_high optimizer.learning_rate train.mini_batches "
        "train.epochs",
        clip_never_acts,
        "objective.clip_low = {low}, clip_high = {high} hardly ever clip a sequence-level ratio",
        "A sequence-level ratio is a mean over the tokens of a completion, so it changes far less "
        "than token ratios. In {c.train.mini_batches} optimizer steps at this learning rate, even "
        "token ratios change little. The paper's bounds are 0.0003 and 0.0004.",
        "set objective.clip_low = 3e-4 and objective.clip_high = 4e-4",
    ),
    Rule(
        "idle penalty-and-reference",
        "objective.beta",
        lambda s, c: (
            not s.objective.beta and changed(c.reference) | changed_options(s, "kl", "kl_in")
        ),
        "{idle}: no effect, because objective.beta is 0",
        "Without a weight there is no penalty, and no reference is loaded.",
        "set objective.beta, such as 0.04, or remove these settings",
    ),
    Rule(
        "idle penalty-and-reference",
        "objective.beta reference.kind reference.every train.mini_batches train.epochs",
        lambda s, c: s.objective.beta > 0 and active_penalty(s) is None and reference_is_policy(s),
        "objective.beta = {o.beta} has no effect",
        "The reference is updated after every batch, so it always equals the policy that "
        "generated the completions. The KL and its gradient are 0.",
        "raise reference.every, or set objective.beta = 0",
    ),
    Rule(
        "idle penalty-and-reference",
        "objective.beta objective.kl_in",
        lambda s, c: (
            s.objective.beta > 0 and active_penalty(s) is None and not reference_is_policy(s)
        ),
        "objective.beta = {o.beta} has no effect",
        "The advantage depends on which completions are correct and not on their reward, so a KL "
        "in the reward has no effect, although a reference is loaded.",
        "set objective.kl_in = 'loss', or set objective.beta = 0",
    ),
    Rule(
        "idle penalty-and-reference",
        "objective.kl_target objective.kl_horizon train.steps",
        lambda s, c: not s.objective.kl_target and changed_options(s, "kl_horizon"),
        "{idle} has no effect",
        "beta adapts to a target KL, but no target is set.",
        "set objective.kl_target, or remove objective.kl_horizon",
    ),
    Rule(
        "idle penalty-and-reference",
        "objective.kl_target objective.kl_horizon train.steps",
        fixed_beta,
        "objective.kl_target = {o.kl_target} hardly changes beta",
        "A step of {count} completions changes beta by {growth:.2%} at most. A factor of {factor} "
        "takes {needed:,.0f} steps, but the run has {most:,} steps.",
        "lower objective.kl_horizon",
    ),
    Rule(
        "idle sampling",
        "objective.correction",
        lambda s, c: (
            s.option("correction", "none") == "none"
            and changed_options(
                s,
                "correction_low",
                "correction_high",
                *(() if s.objective.corrects else ("correction_mean_one",)),
            )
        ),
        "{idle}: no effect, because objective.correction is 'none'",
        "These settings bound a correction, but no correction is chosen.",
        "set objective.correction, such as 'token_truncate', or remove these settings",
    ),
    Rule(
        "idle sampling",
        "model.dtype",
        lambda s, c: s.exact and not c.stale and changed_options(s, "correction", "veto"),
        "{idle}: there is nothing to correct",
        "Engine and trainer share their float32 weights and agree to 1e-5.",
        "remove the correction; only bfloat16 and truncated sampling need it",
    ),
    Rule(
        "idle filters",
        "filter.skip_zero_gradient objective.beta objective.name",
        lambda s, c: c.filter.skip_zero_gradient and not s.objective.only_surrogate,
        "filter.skip_zero_gradient = True skips nothing",
        "A penalty, an entropy bonus or marked tokens give every completion a gradient, even with "
        "advantage 0.",
        "remove filter.skip_zero_gradient",
    ),
    Rule(
        "idle filters",
        "filter.max_rounds filter.dynamic_sampling",
        lambda s, c: not c.filter.dynamic_sampling and changed(c.filter, "max_rounds"),
        "filter.max_rounds = {c.filter.max_rounds} has no effect",
        "This setting limits dynamic sampling, which is off.",
        "set filter.dynamic_sampling = true, or remove filter.max_rounds",
    ),
    Rule(
        "idle filters",
        "overlap.max_staleness overlap.staleness train.mini_batches train.epochs",
        lambda s, c: 0 < c.overlap.max_staleness >= c.overlap.staleness * c.train.optimizer_steps,
        "overlap.max_staleness = {c.overlap.max_staleness} drops nothing",
        "No completion is older than overlap.staleness allows.",
        "remove overlap.max_staleness",
    ),
    Rule(
        "idle filters",
        "overlap.mode overlap.staleness",
        lambda s, c: c.overlap.mode == "copy" and not c.overlap.staleness,
        "overlap.mode = 'copy' overlaps nothing with overlap.staleness = 0",
        "Each step waits for completions of the current weights.",
        "set overlap.staleness = 1, or remove overlap.mode",
    ),
    Rule(
        "idle rewards",
        "length_penalty.name objective.name",
        lambda s, c: c.length_penalty.name != "none" and s.advantage in IGNORES_REWARD,
        "length_penalty.name = {c.length_penalty.name!r} has no effect with {c.objective.name}",
        "The advantage of {c.objective.name} depends on which completions are correct, and not on "
        "their rewards.",
        "use an algorithm that uses rewards, or remove the length penalty",
    ),
    Rule(
        "idle rewards",
        "length_penalty.limit length_penalty.cache rollout.max_tokens",
        lambda s, c: (
            c.length_penalty.name == "soft"
            and Soft(**c.length_penalty.options).of(c.rollout.max_tokens) == 0.0
        ),
        "length_penalty.limit = {c.length_penalty.options[limit]}, "
        "cache = {c.length_penalty.options[cache]} never apply",
        "Completions end at rollout.max_tokens = {c.rollout.max_tokens}, before the penalty "
        "starts.",
        "remove limit and cache, or raise rollout.max_tokens",
    ),
    Rule(
        "idle groups",
        "objective.keep rollout.group_size",
        lambda s, c: (
            (keep := s.option("keep", 0)) >= c.rollout.group_size
            and {"keep": keep, "half": max(1, c.rollout.group_size // 2)}
        ),
        "objective.keep = {keep} keeps all completions of a group of {c.rollout.group_size}",
        "No completion is filtered out, so the advantage equals that of GRPO.",
        "set objective.keep = {half}, or raise rollout.group_size",
    ),
    Rule(
        "idle rewards",
        "objective.parts objective.name",
        lambda s, c: len(s.objective.parts) == 1,
        "objective.parts names one part: {c.objective.name} is grpo times a number",
        "A single part is standardized in its group as in grpo, and then divided by one deviation "
        "for the whole step.",
        "name several parts, or use grpo",
    ),
    Rule(
        "idle groups",
        "rollout.group_size objective.name",
        lambda s, c: (
            s.advantage is advantage.group_standardized
            and c.rollout.group_size == 2
            and {"size": 1.0 if s.option("ddof", 1) == 0 else math.sqrt(0.5)}
        ),
        "rollout.group_size = 2: every advantage is +-{size:.2f}, whatever the rewards are",
        "Two rewards divided by their own standard deviation only show which one is larger.",
        "raise rollout.group_size, or use an advantage that is not standardized, such as "
        "objective.name = 'dr_grpo'",
    ),
    Rule(
        "idle other-settings",
        "model.offload_activations model.gradient_checkpointing",
        lambda s, c: c.model.offload_activations and not c.model.gradient_checkpointing,
        "model.offload_activations = true: no effect without gradient checkpointing",
        "Only the inputs of recomputed layers are kept in main memory.",
        "set model.gradient_checkpointing = true, or remove the setting",
    ),
    Rule(
        "idle other-settings",
        "adapter.rank",
        lambda s, c: not c.adapter.rank and changed(c.adapter, "alpha", "targets"),
        "{idle}: no effect, because adapter.rank is 0",
        "Without a rank all weights are trained, and there is no adapter.",
        "set adapter.rank, such as 16, or remove these settings",
    ),
    Rule(
        "idle other-settings",
        "reward.name",
        unread_scoring,
        "{idle}: no effect with reward.name = {c.reward.name!r}",
        "The reward is quick, so it is computed in the main process.",
        "remove these settings",
    ),
    Rule(
        "idle other-settings",
        "objective.name",
        lambda s, c: "values" not in s.objective.needs and changed(c.critic),
        "{idle} {has} no effect",
        "{c.objective.name} has no critic.",
        "remove the section [critic], or set objective.name = 'ppo'",
    ),
    Rule(
        "idle other-settings",
        "objective.name",
        lambda s, c: "teacher" not in s.objective.needs and changed(c.teacher),
        "{idle} {has} no effect",
        "{c.objective.name} has no teacher.",
        "remove the section [teacher], or set objective.name = 'opd' or 'sdpo'",
    ),
    Rule(
        "risk learning-rate",
        "critic.learning_rate",
        lambda s, c: "values" in s.objective.needs and not c.critic.learning_rate,
        "critic.learning_rate = 0: the critic never changes",
        "Advantages then use constant values, at the cost of a second model.",
        "set a rate, such as 1e-5, or use an algorithm without a critic",
    ),
    Rule(
        "risk learning-rate",
        "critic.warmup_steps train.steps",
        lambda s, c: (
            "values" in s.objective.needs
            and c.train.budget == "steps"
            and c.critic.warmup_steps >= c.train.steps
        ),
        "critic.warmup_steps = {c.critic.warmup_steps} takes all {c.train.steps} steps",
        "The policy is not trained while the critic warms up.",
        "lower critic.warmup_steps",
    ),
    Rule(
        "idle single-optimizer-step",
        "objective.value_clip train.mini_batches train.epochs",
        lambda s, c: (
            "values" in s.objective.needs
            and c.train.optimizer_steps == 1
            and bool(clip := s.option("value_clip"))
            and {"clip": clip}
        ),
        "objective.value_clip = {clip!r} has no effect with one optimizer step per training step",
        "The critic has not changed since its values were computed.",
        "take several optimizer steps (train.mini_batches), or remove the setting",
    ),
    Rule(
        "risk penalty-and-reference",
        "reference.kind reference.every objective.name",
        lambda s, c: (
            s.objective.pairs
            and c.reference.kind in ("moving", "renewed")
            and c.reference.every < c.train.total_optimizer_steps
        ),
        "reference.kind = {c.reference.kind!r} changes the reference of the pairs",
        "Margins start again from 0 whenever the reference is updated, so beta keeps the policy "
        "near its recent weights and not near its initial weights.",
        "to keep the policy near its initial weights, set reference.kind = 'frozen'",
    ),
    Rule(
        "idle data-over-time",
        "curriculum.sampling curriculum.drop_above curriculum.mixture",
        lambda s, c: not c.curriculum.active and changed(c.curriculum, "memory", "floor"),
        "{idle}: no effect",
        "With these values of curriculum.sampling, drop_above and mixture, prompts are chosen at "
        "random.",
        "set curriculum.sampling = 'uncertain', or remove these settings",
    ),
    Rule(
        "idle data-over-time",
        "curriculum.sampling curriculum.drop_above train.steps rollout.prompts_per_step",
        few_draws,
        "the curriculum draws {drawn} of {f.prompts} prompts: few are drawn twice",
        "The pass rate of a prompt is known after its first group, so it matters only for later "
        "groups.",
        "use fewer prompts or more steps, or remove the curriculum",
    ),
    Rule(
        "idle data-over-time",
        "replay.groups",
        lambda s, c: not c.replay.groups and changed(c.replay, "size", "max_age"),
        "{idle}: no effect",
        "replay.groups is 0, so nothing is replayed.",
        "set replay.groups, or remove these settings",
    ),
    Rule(
        "idle data-over-time",
        "replay.max_age replay.groups train.mini_batches train.epochs",
        lambda s, c: c.replay.groups > 0 and c.replay.max_age < c.train.optimizer_steps,
        "replay.max_age = {c.replay.max_age} allows no replay",
        "A group is {c.train.optimizer_steps} optimizer steps old when the next step begins.",
        "set replay.max_age to at least {c.train.optimizer_steps}",
    ),
    Rule(
        "risk teachers",
        "teacher.context rollout.group_size",
        lambda s, c: success_is_all(s) and c.rollout.group_size == 1,
        "teacher.context = success needs a second completion in each group",
        "With rollout.group_size = 1, no completion has privileged text, so the run trains on "
        "nothing.",
        "set rollout.group_size to 8, or add feedback or a column to teacher.context",
    ),
    Rule(
        "risk teachers",
        "teacher.context filter.dynamic_sampling",
        lambda s, c: (
            success_is_all(s) and c.rollout.group_size > 1 and not c.filter.dynamic_sampling
        ),
        "groups without a correct completion have no privileged text",
        "The only text in teacher.context is a correct completion of the same group. If the task "
        "is hard, most groups have no correct completion. The metric objective/taught is the "
        "share of completions that the teacher trains.",
        "if many groups have no correct completion, add feedback or a column to teacher.context, "
        "or set objective.task above 0",
    ),
    Rule(
        "idle teachers",
        "teacher.policy teacher.alpha teacher.every train.steps",
        teacher_that_is_another,
        "teacher.policy = 'moving' is the same as {other!r} here",
        "{why}, at the cost of a second copy of the weights.",
        "set teacher.policy = {other!r}",
    ),
    Rule(
        "risk learning-rate",
        "optimizer.learning_rate",
        lambda s, c: c.optimizer.learning_rate == 0,
        "optimizer.learning_rate = 0: no weight changes",
        "The run generates, scores and evaluates, and learns nothing.",
        "set a rate, such as 1e-6, or 1e-4 for an adapter",
    ),
    Rule(
        "risk learning-rate",
        "optimizer.warmup_steps train.steps train.mini_batches train.epochs",
        lambda s, c: (
            c.optimizer.learning_rate > 0
            and (warmup := c.optimizer.warmup_steps) >= (updates := c.train.total_optimizer_steps)
            and {"updates": updates, "reached": updates / warmup}
        ),
        "optimizer.warmup_steps = {c.optimizer.warmup_steps} is longer than the run of {updates} "
        "optimizer steps",
        "The learning rate reaches at most {reached:.0%} of its value, and the schedule never "
        "begins.",
        "lower optimizer.warmup_steps; it counts optimizer steps, not train.steps",
    ),
    Rule(
        "risk learning-rate",
        "optimizer.learning_rate adapter.rank",
        lambda s, c: c.adapter.rank > 0 and 0 < c.optimizer.learning_rate <= SLOW_ADAPTER,
        "optimizer.learning_rate = {c.optimizer.learning_rate:g} hardly changes an adapter",
        "An adapter starts without any effect and has few weights, so it needs about ten times "
        "the rate of full training or more.",
        "set optimizer.learning_rate = 1e-5 to 1e-4",
    ),
    Rule(
        "risk sampling",
        "rollout.top_k",
        lambda s, c: c.rollout.top_k == 1,
        "rollout.top_k = 1 makes the completions of a group equal",
        "Only the likeliest token is ever sampled, so all completions of a prompt are equal, and "
        "the policy learns nothing.",
        "sample at rollout.temperature = 1 without top_k; evaluate.temperature can be low",
    ),
    Rule(
        "risk sampling",
        "rollout.temperature",
        lambda s, c: c.rollout.top_k != 1 and c.rollout.temperature <= COLD,
        "rollout.temperature = {c.rollout.temperature} makes the completions of a group equal",
        "Completions of a prompt are mostly equal, and equal rewards give no gradient.",
        "sample at rollout.temperature = 1 without top_k; evaluate.temperature can be low",
    ),
    Rule(
        "risk sampling",
        "rollout.top_k rollout.top_p rollout.min_p rollout.mask_replay objective.correction",
        lambda s, c: s.truncates and s.objective.correction is None and c.rollout.top_k != 1,
        "rollout.top_k, top_p or min_p truncate the distribution without a correction",
        "Tokens come from a truncated distribution, and the loss treats them as samples of the "
        "full distribution, so the gradient is biased towards likely tokens.",
        "set rollout.mask_replay = true, which trains the truncated distribution, or sample from "
        "the full distribution",
    ),
    Rule(
        "risk sampling",
        "engine.dtype engine.kv_dtype objective.correction",
        lambda s, c: bool(c.engine.rounds),
        "engine.{c.engine.rounds} = 'float8' samples from a rounded policy",
        "Completions are generated faster, but their log-probs differ from the trainer's more "
        "than in bfloat16. The correction weighs tokens by this difference, which reduces the "
        "effective sample size.",
        "measure the difference and the effective sample size with `covey numerics`",
    ),
    Rule(
        "risk rewards",
        "reward.name objective.name filter.dynamic_sampling",
        format_only,
        "{users} needs correct completions, but reward.name = {c.reward.name!r} only checks their "
        "format",
        "The run then keeps groups and reinforces tokens by their format. When every completion "
        "has the correct format, the run drops every group.",
        "use a reward that checks final answers, or a mix with an accuracy part",
    ),
    Rule(
        "risk penalty-and-reference",
        "objective.kl objective.kl_in objective.beta",
        lambda s, c: (
            active_penalty(s) is not None
            and s.objective.kl_in == "loss"
            and s.objective.penalty is penalty.k1
        ),
        "objective.kl = 'k1' in the loss does not pull towards the reference",
        "The gradient of logp - ref_logp equals the gradient of logp. It is noise with a mean of "
        "0 over sampled tokens, and does not depend on the reference.",
        "set objective.kl = 'k2' or 'k3', or objective.kl_in = 'reward'",
    ),
    Rule(
        "risk penalty-and-reference",
        "objective.kl_in objective.beta objective.name",
        lambda s, c: (
            active_penalty(s) is not None
            and s.objective.kl_in == "reward"
            and s.advantage is advantage.group_standardized
        ),
        "objective.beta = {o.beta} is divided by the standard deviation of the rewards",
        "The KL is part of the reward, and the reward is standardized. In a group of only correct "
        "completions, only the KL varies, and beta cancels out.",
        "set objective.kl_in = 'loss', or use an advantage that is not standardized",
    ),
    Rule(
        "risk groups",
        "train.mini_batches rollout.prompts_per_step rollout.group_size",
        lambda s, c: (
            "groups" in s.objective.needs
            and c.train.mini_batches > c.rollout.prompts_per_step
            and {"rows": c.rollout.prompts_per_step * c.rollout.group_size / c.train.mini_batches}
        ),
        "train.mini_batches = {c.train.mini_batches} splits groups: a mini-batch has {rows:.3g} "
        "completions, a group {c.rollout.group_size}",
        "Good and bad completions of a prompt are in different optimizer steps, so an optimizer "
        "step may see only the good or only the bad completions of a prompt.",
        "set train.mini_batches to {c.rollout.prompts_per_step} or less, or raise "
        "rollout.prompts_per_step",
    ),
    Rule(
        "risk clip-range-of-a-sequence-ratio",
        "objective.clip_low objective.clip_high objective.name train.mini_batches",
        tight_clip,
        "objective.clip_low = {low}, clip_high = {high} clip token ratios at the first optimizer "
        "step",
        "Bounds of this size are for sequence-level ratios, which change far less than token "
        "ratios.",
        "set objective.clip_low = 0.2 and objective.clip_high = 0.2, or objective.name = 'gspo'",
    ),
    Rule(
        "risk evaluation",
        "evaluate.prompts",
        few_held_out,
        f"{{prompts}} held-out prompts cannot show a difference of {POINTS:.0%} between two "
        "checkpoints",
        f"At least {FEWEST_PAIRS} prompts must change, all in one direction, before an exact test "
        "calls a change significant: {shown}.",
        f"set evaluate.prompts to {FEWEST_PROMPTS} or more; 500 are better",
    ),
    Rule(
        "risk evaluation",
        "task.name",
        lambda s, c: s.facts.overlap > 0,
        "{f.overlap} of {f.held_out} held-out prompts are training prompts too",
        "Evaluations on prompts that were trained on measure memory, not skill.",
        "remove these prompts from the training data or from the held-out data; with one file or "
        "split for both, leave the held-out file or split out of the settings and set "
        "task.held_out_share",
    ),
    Rule(
        "risk baselines",
        "task.name reward.name",
        lambda s, c: (
            [{"shortcut": each} for each in s.facts.baselines.flagged()]
            if s.facts.baselines
            else False
        ),
        "{shortcut}, without any skill",
        "A policy that finds this shortcut has a rising reward curve, but does not learn the "
        "task. Evaluations and reports show the gain above the shortcut.",
        REMEDY,
    ),
    Rule(
        "risk sampling",
        "rollout.max_tokens rollout.max_prompt_tokens rollout.long_prompts",
        long_prompts,
        "{share} have more than {limit} tokens: {what}",
        "The longest has {f.longest_prompt:,} tokens; {reason}.",
        "{remedy}",
    ),
    Rule(
        "risk sampling",
        "rollout.max_tokens",
        too_short,
        "rollout.max_tokens = {c.rollout.max_tokens} truncates the solutions of {cut} of {all} "
        "prompts",
        "The task's own solutions have {median} tokens in the median and {most} at most; a "
        "truncated completion has no final answer and no reward.",
        "set rollout.max_tokens to {most} or more",
    ),
)
