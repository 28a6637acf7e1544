"""Rules about settings that may harm, or make a run that nobody can learn anything from."""

from __future__ import annotations

import math
from collections.abc import Iterator

from covey.analysis.plan.finding import Finding, Rule, Setup, told
from covey.analysis.plan.same import active_penalty
from covey.objective import advantage, penalty, ratio
from covey.objective import surrogate as gains
from covey.training.schedule import total_updates

COLD = 0.3
"""At this temperature and below, answers to a prompt mostly agree."""
TIGHT_CLIP = 0.01
"""Bounds below this fit the ratio of an answer; a token leaves them at the first update."""
POINTS = 0.05
"""The difference that one would like to see."""
FEWEST_PAIRS = 6
"""So many prompts, all changed to one side, are the least that is significant: 2 / 2^6 < 0.05."""
FEWEST_PROMPTS = math.ceil(FEWEST_PAIRS / POINTS)
UNFINISHED = 0.25
"""Right answers that do not fit are worth a word from this share on."""

OF_FORM = frozenset(
    {
        "think_answer_form", "think_tool_form", "agent_example_form",
        "efficiency", "safety", "citations", "coherence",
    }
)  # fmt: skip
"""Rewards that judge how something is said: their `success` is not about being right."""


def learns_nothing(setup: Setup) -> Iterator[Finding]:
    """Learning rates that are 0, or never what they are said to be."""
    optimizer, updates = setup.config.optimizer, total_updates(setup.config.train)
    if optimizer.learning_rate == 0:
        yield told(
            "risk",
            "learning-rate",
            title="optimizer.learning_rate = 0: no weight changes",
            why="Everything is sampled, judged and measured, and nothing is learned.",
            remedy="set a rate, such as 1e-6, or 1e-4 for an adapter",
        )
    elif optimizer.warmup_steps >= updates:
        reached = updates / optimizer.warmup_steps
        yield told(
            "risk",
            "learning-rate",
            title=f"optimizer.warmup_steps = {optimizer.warmup_steps} is not over before the run "
            f"is: it has {updates} updates",
            why=f"The rate gets to {reached:.0%} of learning_rate at most, and the schedule never "
            "begins.",
            remedy="lower optimizer.warmup_steps; it counts optimizer steps, not train.steps",
        )


def answers_agree(setup: Setup) -> Iterator[Finding]:
    """Sampling so sharp that the answers to a prompt are all alike."""
    rollout = setup.config.rollout
    if rollout.top_k == 1:
        title = "rollout.top_k = 1"
        why = "Only the likeliest token is ever taken: all answers to a prompt are the same, every "
        why += "group is flat, and there is nothing to learn."
    elif rollout.temperature <= COLD:
        title = f"rollout.temperature = {rollout.temperature}"
        why = "Answers to a prompt mostly agree, and a group of equal rewards teaches nothing."
    else:
        return
    yield told(
        "risk",
        "sampling",
        title=f"{title} lets the answers of a group agree",
        why=why,
        remedy="sample at rollout.temperature = 1 without top_k; measure as cool as you like with "
        "evaluate.temperature",
    )


def truncated_sampling(setup: Setup) -> Iterator[Finding]:
    """Answers that are sampled from one distribution and learned from as if from another."""
    if setup.truncates and setup.objective.correction is None and setup.config.rollout.top_k != 1:
        yield told(
            "risk",
            "sampling",
            title="rollout.top_k, top_p or min_p cut the distribution, and nothing corrects for it",
            why="Tokens are drawn from what is left of the distribution; the loss takes them for "
            "draws from the whole of it, so the gradient is biased towards the likely ones.",
            remedy="sample from the whole distribution, or set objective.correction = "
            "'token_truncate'",
        )


def success_of_form(setup: Setup) -> Iterator[Finding]:
    """Things that ask who is right, of a reward that does not know."""
    config = setup.config
    users = ["filter.dynamic_sampling = True"] if config.filter.dynamic_sampling else []
    if "success" in setup.objective.needs:
        users.append(f"objective.name = {config.objective.name!r}")
    if users and config.reward.name in OF_FORM:
        yield told(
            "risk",
            "rewards",
            title=f"{' and '.join(users)} asks which answers are right, and reward.name = "
            f"{config.reward.name!r} only knows which are well said",
            why="Groups are kept and tokens pushed by whether a form holds; once it always does, "
            "every group is dropped.",
            remedy="take a reward that judges answers, or a mix with an accuracy part",
        )


def penalty_as_noise(setup: Setup) -> Iterator[Finding]:
    """Penalties that do not pull where one thinks."""
    objective = setup.objective
    if active_penalty(setup) is None:
        return
    if objective.kl_in == "loss" and objective.penalty is penalty.k1:
        yield told(
            "risk",
            "penalty-and-reference",
            title="objective.kl = 'k1' in the loss does not pull towards the reference",
            why="The gradient of logp - ref_logp is that of logp, whose mean over sampled tokens "
            "is 0: it is noise, whatever the reference says.",
            remedy="set objective.kl = 'k2' or 'k3', or objective.kl_in = 'reward'",
        )
    if objective.kl_in == "reward" and setup.advantage is advantage.group_standardized:
        yield told(
            "risk",
            "penalty-and-reference",
            title=f"objective.beta = {objective.beta} is divided by the deviation of the rewards",
            why="The KL is part of the reward, and the reward is standardized. In a group whose "
            "answers are all right only the KL is left, and beta cancels: it counts in full.",
            remedy="set objective.kl_in = 'loss', or take an advantage that is not divided",
        )


def split_groups(setup: Setup) -> Iterator[Finding]:
    """Optimizer steps that are smaller than a group."""
    rollout, parts = setup.config.rollout, setup.config.train.mini_batches
    answers = rollout.prompts_per_step * rollout.group_size
    if "groups" in setup.objective.needs and parts > rollout.prompts_per_step:
        yield told(
            "risk",
            "groups",
            title=f"train.mini_batches = {parts} cuts groups: an optimizer step has "
            f"{answers / parts:.3g} answers, a group {rollout.group_size}",
            why="The good and the bad answers to a prompt push in different optimizer steps, so "
            "that the first of them push without a counterweight.",
            remedy=f"set train.mini_batches to {rollout.prompts_per_step} at most, or raise rollout.prompts_per_step",
        )


def tight_clip(setup: Setup) -> Iterator[Finding]:
    """The clip of an answer's ratio on the ratios of tokens."""
    bounds = [setup.option(name, 1.0) for name in ("clip_low", "clip_high")]
    of_tokens = setup.objective.ratio is ratio.token and setup.surrogate is gains.clipped
    if not setup.one_update and of_tokens and max(bounds) < TIGHT_CLIP:
        yield told(
            "risk",
            "the-clip-of-a-sequence-ratio",
            title=f"objective.clip_low = {bounds[0]}, high = {bounds[1]} clip the ratios of tokens at "
            "the first update",
            why="Bounds of this size are for the ratio of a whole answer, which moves far less "
            "than that of a token.",
            remedy="set objective.clip_low = 0.2 and objective.clip_high = 0.2, or objective.name = 'gspo'",
        )


def few_held_out(setup: Setup) -> Iterator[Finding]:
    """Evaluations that cannot show what one looks for."""
    config = setup.config
    known = (setup.seen.held_out, config.evaluate.prompts, config.task.options.get("held_out_size"))
    prompts = next((number for number in known if number), None)
    if config.evaluate.every and isinstance(prompts, int) and 0 < prompts < FEWEST_PROMPTS:
        shown = FEWEST_PAIRS / prompts
        yield told(
            "risk",
            "evaluation",
            title=f"{prompts} held-out prompts cannot show a difference of {POINTS:.0%} between "
            "two checkpoints",
            why=f"At least {FEWEST_PAIRS} prompts must change, and all to one side, before an "
            f"exact test calls it more than chance: here that is {shown:.0%}.",
            remedy=f"evaluate on {FEWEST_PROMPTS} prompts at the very least, by evaluate.prompts; "
            "500 are better",
        )


def too_short(setup: Setup) -> Iterator[Finding]:
    """Answers that end before they can be right."""
    lengths, limit = setup.seen.solutions, setup.config.rollout.max_tokens
    cut = sum(length > limit for length in lengths)
    if lengths and cut / len(lengths) >= UNFINISHED:
        middle = sorted(lengths)[len(lengths) // 2]
        yield told(
            "risk",
            "sampling",
            title=f"rollout.max_tokens = {limit} cuts off the right answer to {cut} of "
            f"{len(lengths)} prompts",
            why=f"Written as the task writes it, it takes {middle} tokens in the middle and "
            f"{max(lengths)} at most; what is cut off has no answer, and no reward.",
            remedy=f"set rollout.max_tokens to {max(lengths)} or more",
        )


RULES: tuple[Rule, ...] = (
    learns_nothing,
    answers_agree,
    truncated_sampling,
    success_of_form,
    penalty_as_noise,
    split_groups,
    tight_clip,
    few_held_out,
    too_short,
)
