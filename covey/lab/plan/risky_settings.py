"""Rules about settings that may harm a run or make its results inconclusive."""

from __future__ import annotations

import math
from collections.abc import Iterator

from covey.baselines import REMEDY
from covey.errors import ConfigError
from covey.lab.plan.equivalence import active_penalty
from covey.lab.plan.finding import Said, Setup, rule
from covey.lab.plan.task_facts import TaskFacts
from covey.objective import advantage, penalty, ratio
from covey.objective import surrogate as surrogates
from covey.rollout.prompt_limit import limit_reason, longest_prompt

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


@rule("risk", "learning-rate")
def learning_rate_too_low(setup: Setup) -> Iterator[Said]:
    """Report a learning rate of 0, or a warm-up that is longer than the run."""
    optimizer, updates = setup.config.optimizer, setup.config.train.total_optimizer_steps
    if optimizer.learning_rate == 0:
        yield Said(
            ("optimizer.learning_rate",),
            title="optimizer.learning_rate = 0: no weight changes",
            why="The run generates, scores and evaluates, and learns nothing.",
            remedy="set a rate, such as 1e-6, or 1e-4 for an adapter",
        )
    elif optimizer.warmup_steps >= updates:
        reached = updates / optimizer.warmup_steps
        yield Said(
            ("optimizer.warmup_steps", "train.steps", "train.mini_batches", "train.epochs"),
            title=f"optimizer.warmup_steps = {optimizer.warmup_steps} is longer than the run of "
            f"{updates} optimizer steps",
            why=f"The learning rate reaches at most {reached:.0%} of its value, and the schedule "
            "never begins.",
            remedy="lower optimizer.warmup_steps; it counts optimizer steps, not train.steps",
        )


@rule("risk", "learning-rate")
def learning_rate_of_full_training(setup: Setup) -> Iterator[Said]:
    """Report a learning rate with which an adapter hardly changes."""
    rank, rate = setup.config.adapter.rank, setup.config.optimizer.learning_rate
    if rank and 0 < rate <= SLOW_ADAPTER:
        yield Said(
            ("optimizer.learning_rate", "adapter.rank"),
            title=f"optimizer.learning_rate = {rate:g} hardly changes an adapter",
            why="An adapter starts without any effect and has few weights, so it needs about ten "
            "times the rate of full training or more.",
            remedy="set optimizer.learning_rate = 1e-5 to 1e-4",
        )


@rule("risk", "sampling")
def equal_completions(setup: Setup) -> Iterator[Said]:
    """Report a temperature so low that the completions of a prompt are equal."""
    rollout = setup.config.rollout
    if rollout.top_k == 1:
        setting, value = "rollout.top_k", "1"
        why = (
            "Only the likeliest token is ever sampled, so all completions of a prompt are equal, "
            "and the policy learns nothing."
        )
    elif rollout.temperature <= COLD:
        setting, value = "rollout.temperature", str(rollout.temperature)
        why = "Completions of a prompt are mostly equal, and equal rewards give no gradient."
    else:
        return
    yield Said(
        (setting,),
        title=f"{setting} = {value} makes the completions of a group equal",
        why=why,
        remedy="sample at rollout.temperature = 1 without top_k; evaluate.temperature can be low",
    )


@rule("risk", "sampling")
def truncated_sampling(setup: Setup) -> Iterator[Said]:
    """Report truncated sampling that training treats as sampling from the full distribution."""
    if setup.truncates and setup.objective.correction is None and setup.config.rollout.top_k != 1:
        yield Said(
            (
                "rollout.top_k",
                "rollout.top_p",
                "rollout.min_p",
                "rollout.mask_replay",
                "objective.correction",
            ),
            title="rollout.top_k, top_p or min_p truncate the distribution without a correction",
            why="Tokens come from a truncated distribution, and the loss treats them as samples of "
            "the full distribution, so the gradient is biased towards likely tokens.",
            remedy="set rollout.mask_replay = true, which trains the truncated distribution, or "
            "sample from the full distribution",
        )


@rule("risk", "sampling")
def rounded_rollouts(setup: Setup) -> Iterator[Said]:
    """Report an engine with float8 weights or a float8 KV cache."""
    engine = setup.config.engine
    if engine.rounds:
        yield Said(
            ("engine.dtype", "engine.kv_dtype", "objective.correction"),
            title=f"engine.{engine.rounds} = 'float8' samples from a rounded policy",
            why="Completions are generated faster, but their log-probs differ from the trainer's "
            "more than in bfloat16. The correction weighs tokens by this difference, which reduces "
            "the effective sample size.",
            remedy="measure the difference and the effective sample size with `covey numerics`",
        )


@rule("risk", "rewards")
def success_of_format(setup: Setup) -> Iterator[Said]:
    """Report a format-only reward with an algorithm or a filter that needs correctness."""
    config = setup.config
    users = ["filter.dynamic_sampling = True"] if config.filter.dynamic_sampling else []
    if "success" in setup.objective.needs:
        users.append(f"objective.name = {config.objective.name!r}")
    if users and config.reward.name in FORMAT_REWARDS:
        yield Said(
            ("reward.name", "objective.name", "filter.dynamic_sampling"),
            title=f"{' and '.join(users)} needs correct completions, but reward.name = "
            f"{config.reward.name!r} only checks their format",
            why="The run then keeps groups and reinforces tokens by their format. When every "
            "completion has the correct format, the run drops every group.",
            remedy="use a reward that checks final answers, or a mix with an accuracy part",
        )


@rule("risk", "penalty-and-reference")
def penalty_without_pull(setup: Setup) -> Iterator[Said]:
    """Report KL penalties whose gradient ignores the reference or does not scale with beta."""
    objective = setup.objective
    if active_penalty(setup) is None:
        return
    if objective.kl_in == "loss" and objective.penalty is penalty.k1:
        yield Said(
            ("objective.kl", "objective.kl_in", "objective.beta"),
            title="objective.kl = 'k1' in the loss does not pull towards the reference",
            why="The gradient of logp - ref_logp equals the gradient of logp. It is noise with a "
            "mean of 0 over sampled tokens, and does not depend on the reference.",
            remedy="set objective.kl = 'k2' or 'k3', or objective.kl_in = 'reward'",
        )
    if objective.kl_in == "reward" and setup.advantage is advantage.group_standardized:
        yield Said(
            ("objective.kl_in", "objective.beta", "objective.name"),
            title=f"objective.beta = {objective.beta} is divided by the standard deviation of the "
            "rewards",
            why="The KL is part of the reward, and the reward is standardized. In a group of only "
            "correct completions, only the KL varies, and beta cancels out.",
            remedy="set objective.kl_in = 'loss', or use an advantage that is not standardized",
        )


@rule("risk", "groups")
def split_groups(setup: Setup) -> Iterator[Said]:
    """Report mini-batches that are smaller than a group."""
    rollout, parts = setup.config.rollout, setup.config.train.mini_batches
    completions = rollout.prompts_per_step * rollout.group_size
    if "groups" in setup.objective.needs and parts > rollout.prompts_per_step:
        yield Said(
            ("train.mini_batches", "rollout.prompts_per_step", "rollout.group_size"),
            title=f"train.mini_batches = {parts} splits groups: a mini-batch has "
            f"{completions / parts:.3g} completions, a group {rollout.group_size}",
            why="Good and bad completions of a prompt are in different optimizer steps, so an "
            "optimizer step may see only the good or only the bad completions of a prompt.",
            remedy=f"set train.mini_batches to {rollout.prompts_per_step} or less, or raise "
            "rollout.prompts_per_step",
        )


@rule("risk", "clip-range-of-a-sequence-ratio")
def tight_clip(setup: Setup) -> Iterator[Said]:
    """Report token ratios with a clip range meant for a sequence-level ratio."""
    low, high = (setup.option(name, 1.0) for name in ("clip_low", "clip_high"))
    of_tokens = setup.objective.ratio is ratio.token and setup.surrogate is surrogates.clipped
    if not setup.single_optimizer_step and of_tokens and max(low, high) < TIGHT_CLIP:
        yield Said(
            ("objective.clip_low", "objective.clip_high", "objective.name", "train.mini_batches"),
            title=f"objective.clip_low = {low}, clip_high = {high} clip token ratios at the first "
            "optimizer step",
            why="Bounds of this size are for sequence-level ratios, which change far less than "
            "token ratios.",
            remedy="set objective.clip_low = 0.2 and objective.clip_high = 0.2, or objective.name "
            "= 'gspo'",
        )


@rule("risk", "evaluation")
def few_held_out(setup: Setup) -> Iterator[Said]:
    """Report evaluations with too few prompts."""
    config = setup.config
    known = (
        setup.facts.held_out,
        config.evaluate.prompts,
        config.task.options.get("held_out_size"),
    )
    prompts = next((number for number in known if number), None)
    if config.evaluate.every and isinstance(prompts, int) and 0 < prompts < FEWEST_PROMPTS:
        shown = (
            f"here that is {FEWEST_PAIRS / prompts:.0%} of the prompts"
            if prompts >= FEWEST_PAIRS
            else f"with {prompts} prompts, no change can be significant"
        )
        yield Said(
            ("evaluate.prompts",),
            title=f"{prompts} held-out prompts cannot show a difference of {POINTS:.0%} between "
            "two checkpoints",
            why=f"At least {FEWEST_PAIRS} prompts must change, all in one direction, before an "
            f"exact test calls a change significant: {shown}.",
            remedy=f"set evaluate.prompts to {FEWEST_PROMPTS} or more; 500 are better",
        )


@rule("risk", "evaluation")
def same_prompts(setup: Setup) -> Iterator[Said]:
    """Report held-out prompts that are also training prompts."""
    facts = setup.facts
    if facts.overlap:
        yield Said(
            ("task.name",),
            title=f"{facts.overlap} of {facts.held_out} held-out prompts are training prompts too",
            why="Evaluations on prompts that were trained on measure memory, not skill.",
            remedy="remove these prompts from the training data or from the held-out data; with "
            "one file or split for both, leave the held-out file or split out of the settings and "
            "set task.held_out_share",
        )


@rule("risk", "baselines")
def shortcuts(setup: Setup) -> Iterator[Said]:
    """Report tasks that a constant answer, an empty text or the prompt itself often solves."""
    known = setup.facts.baselines
    for found in known.flagged() if known is not None else ():
        yield Said(
            ("task.name", "reward.name"),
            title=f"{found}, without any skill",
            why="A policy that finds this shortcut has a rising reward curve, but does not learn "
            "the task. Evaluations and reports show the gain above the shortcut.",
            remedy=REMEDY,
        )


@rule("risk", "sampling")
def long_prompts(setup: Setup) -> Iterator[Said]:
    """Report prompts so long that no completion fits into the model's context."""
    facts, rollout = setup.facts, setup.config.rollout
    if facts.context is None:
        return
    try:
        limit = longest_prompt(setup.config, facts.context)
    except ConfigError:  # no prompt fits, so the run cannot start
        return
    lengths = facts.long_prompts or facts.prompt_tokens
    count = sum(length > limit for length in lengths)
    if not count:
        return
    what = {"error": "the run stops before it begins", "skip": "they are left out",
            "truncate": "their first tokens are cut off"}[rollout.long_prompts]  # fmt: skip
    yield Said(
        ("rollout.max_tokens", "rollout.max_prompt_tokens", "rollout.long_prompts"),
        title=f"{_share(facts, count)} have more than {limit} tokens: {what}",
        why=f"The longest has {facts.longest_prompt:,} tokens; "
        f"{limit_reason(setup.config, facts.context)}.",
        remedy="set rollout.long_prompts = 'skip' or 'truncate', or shorten the data"
        if rollout.long_prompts == "error"
        else "check which text is lost",
    )


def _share(facts: TaskFacts, count: int) -> str:
    """Return how many prompts are too long, as a text about all prompts or about a sample."""
    if not facts.long_prompts:
        return f"{count} of {len(facts.prompt_tokens)} prompts that were measured"
    least = "at least " * (count == len(facts.long_prompts))
    return f"{least}{count} of {facts.prompts:,} prompts"


@rule("risk", "sampling")
def too_short(setup: Setup) -> Iterator[Said]:
    """Report a value of `rollout.max_tokens` that truncates correct completions."""
    lengths, limit = setup.facts.solution_tokens, setup.config.rollout.max_tokens
    cut = sum(length > limit for length in lengths)
    if lengths and cut / len(lengths) >= UNFINISHED:
        median = sorted(lengths)[len(lengths) // 2]
        yield Said(
            ("rollout.max_tokens",),
            title=f"rollout.max_tokens = {limit} truncates the solutions of {cut} of "
            f"{len(lengths)} prompts",
            why=f"The task's own solutions have {median} tokens in the median and {max(lengths)} "
            "at most; a truncated completion has no final answer and no reward.",
            remedy=f"set rollout.max_tokens to {max(lengths)} or more",
        )
