"""Rules about settings that do nothing. Each looks at a setup and says what it finds."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator

from covey.analysis.plan.finding import Finding, Rule, Setup, told
from covey.analysis.plan.length import most_steps
from covey.analysis.plan.same import BLIND_TO_REWARD, active_penalty, namesakes, reference_is_policy
from covey.config import Config
from covey.config.schema import Section
from covey.errors import CoveyError
from covey.objective import advantage, algorithm, ratio
from covey.objective import surrogate as gains
from covey.objective.penalty import MAX_ADAPTATION
from covey.rewards.length import Soft
from covey.training.build import reward_of

TOKEN_SIZED_CLIP = 0.1
"""A bound that fits the ratio of a token; the mean over an answer does not get there ..."""
FEW_UPDATES = 4
"""... within so many updates of one pass over a batch ..."""
SMALL_RATE = 1e-5
"""... at this learning rate and below."""
NOTICEABLE_BETA = 1.1
"""An adaptive beta that cannot change by this factor in the whole run is as good as fixed."""


def changed(section: Section, *names: str) -> list[str]:
    """Return those of the settings that are not at their default, written as `name = value`."""
    fields = type(section).model_fields
    found = [name for name in names or fields if name in fields]
    pairs = [(name, getattr(section, name)) for name in found]
    where = type(section).__name__.lower()
    return [f"{where}.{k} = {v!r}" for k, v in pairs if v != fields[k].default]


def changed_options(setup: Setup, *names: str) -> list[str]:
    """Return those options of the objective that are not at their default."""
    options = setup.config.objective.options
    parameters = inspect.signature(algorithm(setup.config.objective.name, options)).parameters
    return [
        f"objective.{name} = {options[name]!r}"
        for name in names
        if name in options and options[name] != parameters[name].default
    ]


def ratio_is_one(setup: Setup) -> Iterator[Finding]:
    """One update per batch makes algorithms that differ in ratio and clip the same."""
    if not setup.one_update:
        return
    others = namesakes(setup)
    if not others:
        return
    name = setup.config.objective.name
    yield told(
        "same",
        "one-update-per-rollout",
        title=f"with one update per rollout {name} is the same as {', '.join(others)}",
        why="The policy that learns is the one that sampled, so every ratio is exactly 1: no clip "
        "acts, and the ratio of an answer has the gradient of its tokens' ratios.",
        remedy="fine if it is meant; to tell them apart take several updates, such as "
        "train.mini_batches = 4",
    )


def only_off_policy(setup: Setup) -> Iterator[Finding]:
    """Settings about a policy that has moved, where it has not."""
    if not setup.one_update:
        return
    names = ["dual"] if setup.option("dual") else []
    if setup.option("off_policy_limit") and setup.exact:
        names.append("off_policy_limit")
    if setup.surrogate is gains.penalized_where_marked:
        names += ["coefficient", "share"]
    if names:
        settings = ", ".join(f"objective.{n} = {setup.option(n)!r}" for n in names)
        yield told(
            "idle",
            "one-update-per-rollout",
            title=f"{settings} {_does(names)} nothing with one update per rollout",
            why="It is about a policy that has moved since the answers were sampled; here it has "
            "not, and its gradient is 0.",
            remedy="take several updates (train.mini_batches), or leave it out",
        )


def old_logp_unread(setup: Setup) -> Iterator[Finding]:
    """`train.old_logp` where nobody reads it, or where it is taken from elsewhere."""
    source, objective = setup.config.train.old_logp, setup.objective
    if source == "auto":
        return
    if "old_entropy" in objective.needs and source == "sampler":
        why = "The algorithm reads the entropy of the sampling policy, which takes a forward pass "
        why += "of the trainer; old_logp comes out of it too."
    elif setup.one_update and not objective.needs & {"old_logp", "old_entropy"}:
        why = "With one update per rollout old_logp is logp itself."
    else:
        return
    yield told(
        "idle",
        "one-update-per-rollout",
        title=f"train.old_logp = {source!r} is not looked at",
        why=why,
        remedy="leave it at 'auto'",
    )


def clip_never_acts(setup: Setup) -> Iterator[Finding]:
    """The clip of a token's ratio on the ratio of an answer."""
    bounds = [setup.option(name, 0.0) for name in ("clip_low", "clip_high")]
    per_answer = setup.objective.ratio in (ratio.sequence, ratio.sequence_token, ratio.arithmetic)
    train = setup.config.train
    short = train.epochs == 1 and 1 < train.mini_batches <= FEW_UPDATES
    near = short and setup.config.optimizer.learning_rate <= SMALL_RATE
    if setup.surrogate is not gains.clipped or not per_answer or not near:
        return
    if min(bounds) >= TOKEN_SIZED_CLIP and setup.config.rollout.max_tokens > 1:
        yield told(
            "idle",
            "the-clip-of-a-sequence-ratio",
            title=f"objective.clip_low = {bounds[0]}, high = {bounds[1]} hardly ever clip the ratio of "
            "a whole answer",
            why="It is a mean over the answer's tokens and moves far less than each of them, and "
            f"{train.mini_batches} updates at this learning rate move even those little; the "
            "paper's bounds are 0.0003 and 0.0004.",
            remedy="for the ratio of answers set objective.clip_low = 3e-4 and objective.clip_high = 4e-4",
        )


def penalty_settings(setup: Setup) -> Iterator[Finding]:
    """Settings of a KL penalty, or of its reference, that nothing comes of."""
    if not setup.objective.beta:
        idle = [*changed(setup.config.reference), *changed_options(setup, "kl", "kl_in")]
        if idle:
            yield told(
                "idle",
                "penalty-and-reference",
                title=f"{', '.join(idle)}: not looked at, since objective.beta is 0",
                why="Without a weight there is no penalty, and no reference is loaded.",
                remedy="set objective.beta, such as 0.04, or leave them out",
            )
    elif active_penalty(setup) is None:
        renewed = reference_is_policy(setup)
        why = (
            "The reference is renewed after every update of a batch, so it is always the policy "
            "that sampled: the KL is 0, and so is its gradient."
            if renewed
            else "The advantage asks which answers are right and never how much reward they got, "
            "so a KL that is taken off the reward is lost, though a reference is loaded."
        )
        remedy = "raise reference.every" if renewed else "set objective.kl_in = 'loss'"
        yield told(
            "idle",
            "penalty-and-reference",
            title=f"objective.beta = {setup.objective.beta} does nothing",
            why=why,
            remedy=f"{remedy}, or set objective.beta = 0",
        )


def adaptive_beta(setup: Setup) -> Iterator[Finding]:
    """A horizon without a target, or one that is too far for the run."""
    config, objective = setup.config, setup.objective
    if not objective.kl_target:
        idle = changed_options(setup, "kl_horizon")
        why, what = "beta is adapted to a KL that is wanted, and none is.", "is not looked at"
        remedy = "set objective.kl_target, or leave it out"
    else:
        answers = config.rollout.prompts_per_step * config.rollout.group_size
        growth = MAX_ADAPTATION * min(answers / objective.kl_horizon, 1.0)
        most = most_steps(config)
        needed = math.log(NOTICEABLE_BETA) / math.log1p(growth)
        idle = [f"objective.kl_target = {objective.kl_target}"] if most < needed else []
        why = f"A step of {answers} answers changes beta by {growth:.2%} at most: it takes "
        why += f"{needed:,.0f} steps to a factor of {NOTICEABLE_BETA}, and the run has {most:,}."
        what, remedy = "hardly moves beta", "lower objective.kl_horizon"
    if idle:
        title = f"{idle[0]} {what}"
        yield told("idle", "penalty-and-reference", title=title, why=why, remedy=remedy)


def correction_bounds(setup: Setup) -> Iterator[Finding]:
    """How a correction is bounded, where none is chosen."""
    if setup.option("correction", "none") != "none":
        return
    names = ["correction_low", "correction_high"]
    names += [] if setup.objective.corrects else ["correction_mean_one"]
    idle = changed_options(setup, *names)
    if idle:
        yield told(
            "idle",
            "sampling",
            title=f"{', '.join(idle)}: not looked at, since objective.correction is 'none'",
            why="They say how a correction is bounded, and none is chosen.",
            remedy="choose objective.correction, such as 'token_truncate', or leave them out",
        )


def nothing_to_correct(setup: Setup) -> Iterator[Finding]:
    """Corrections of a sampler that needs none."""
    if setup.objective.corrects and setup.exact:
        idle = changed_options(setup, "correction", "veto")
        yield told(
            "idle",
            "sampling",
            title=f"{', '.join(idle)}: there is nothing to correct",
            why="Sampler and trainer share their float32 weights, and agree to 1e-5.",
            remedy="leave it out; it is for bfloat16 and for truncated sampling",
        )


def filters(setup: Setup) -> Iterator[Finding]:
    """Filters that filter nothing."""
    chosen, overlap = setup.config.filter, setup.config.overlap
    cases = [
        (
            chosen.skip_zero_gradient and not setup.objective.only_surrogate,
            "filter.skip_zero_gradient = True skips nothing",
            "A penalty, an entropy bonus or picked tokens give every answer a gradient, also one "
            "without advantage.",
            "leave it out",
        ),
        (
            not chosen.dynamic_sampling and bool(changed(chosen, "max_rounds")),
            f"filter.max_rounds = {chosen.max_rounds} is not looked at",
            "It limits dynamic sampling, which is off.",
            "set filter.dynamic_sampling = true, or leave it out",
        ),
        (
            overlap.max_staleness > 0,
            f"overlap.max_staleness = {overlap.max_staleness} drops nothing",
            "A step samples with the weights that it then learns with: no answer is older than it.",
            "leave it out",
        ),
    ]
    for holds, title, why, remedy in cases:
        if holds:
            yield told("idle", "filters", title=title, why=why, remedy=remedy)


def rewards_unread(setup: Setup) -> Iterator[Finding]:
    """Parts of the reward that no advantage can see."""
    config = setup.config
    punishing = config.length_penalty.name != "none"
    if punishing and setup.advantage in BLIND_TO_REWARD:
        yield told(
            "idle",
            "rewards",
            title=f"length_penalty.name = {config.length_penalty.name!r} is not seen by "
            f"{config.objective.name}",
            why="Its advantage asks which answers are right and never how much reward they got.",
            remedy="take an algorithm that reads rewards, or leave the punishment out",
        )


def never_too_long(setup: Setup) -> Iterator[Finding]:
    """A punishment of lengths that no answer can have."""
    options, longest = setup.config.length_penalty.options, setup.config.rollout.max_tokens
    if setup.config.length_penalty.name == "soft" and Soft(**options).of(longest) == 0.0:
        yield told(
            "idle",
            "rewards",
            title=f"length_penalty.limit = {options['limit']}, cache = {options['cache']} punish "
            "nothing",
            why=f"Answers end at rollout.max_tokens = {longest}, before the punishment begins.",
            remedy="leave limit and cache out, or raise rollout.max_tokens",
        )


def two_answers(setup: Setup) -> Iterator[Finding]:
    """Groups of two, standardized."""
    if setup.advantage is not advantage.group_standardized or setup.config.rollout.group_size != 2:
        return
    size = 1.0 if setup.option("ddof", 1) == 0 else math.sqrt(0.5)
    yield told(
        "idle",
        "groups",
        title=f"rollout.group_size = 2: every advantage is +-{size:.2f}, however much better an "
        "answer is",
        why="Two rewards divided by their own deviation leave only which of them is larger.",
        remedy="raise rollout.group_size, or take an advantage that is not divided, such as "
        "objective.name = 'dr_grpo'",
    )


def unused_sections(setup: Setup) -> Iterator[Finding]:
    """Settings of an adapter that is not there, and of processes that are not started."""
    config = setup.config
    idle = changed(config.adapter, "alpha", "targets") if not config.adapter.rank else []
    if idle:
        yield told(
            "idle",
            "other-settings",
            title=f"{', '.join(idle)}: not looked at, since adapter.rank is 0",
            why="Without a rank all weights are trained, and there is no adapter.",
            remedy="set adapter.rank, such as 16, or leave them out",
        )
    idle = changed(config.scoring, "workers", "timeout", "gigabytes")
    if idle and _is_quick(config):
        yield told(
            "idle",
            "other-settings",
            title=f"{', '.join(idle)}: not looked at by reward.name = {config.reward.name!r}",
            why="It takes no time to speak of, and judges without processes of its own.",
            remedy="leave them out",
        )


def _is_quick(config: Config) -> bool:
    try:
        return reward_of(config).quick
    except CoveyError:  # it is said where a run is assembled
        return False


def _does(names: list[str]) -> str:
    return "does" if len(names) == 1 else "do"


RULES: tuple[Rule, ...] = (
    ratio_is_one,
    only_off_policy,
    old_logp_unread,
    clip_never_acts,
    penalty_settings,
    adaptive_beta,
    correction_bounds,
    nothing_to_correct,
    filters,
    rewards_unread,
    never_too_long,
    two_answers,
    unused_sections,
)
