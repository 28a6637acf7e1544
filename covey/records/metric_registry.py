"""Registry of all metrics: name, definition, unit, source, healthy range and aliases.

Health checks, the web page and tests use this registry, and docs/metrics.md is generated from it.
Metrics of the forward and backward passes are computed in `covey/objective/diagnostics.py` and
`covey/step.py`.

Metrics that open-instruct also has are logged under open-instruct's name; of two names for one
number, under one of them. A name with `*` stands for several metrics. A mean over tokens is the sum
over all trained tokens of a training step, divided by the number of these tokens. A mean over
tokens is never computed as a mean of the means of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any, TypeGuard

RUN = "run"
ROLLOUTS = "rollouts"
PASSES = "passes"
OPTIMIZER = "optimizer"
SFT = "sft"
MACHINE = "machine"
SOURCES: Mapping[str, str] = {
    RUN: "the metric is counted from the start of the run.",
    ROLLOUTS: "the metric covers all completions of the step, trained on or not.",
    PASSES: "the metric covers trained tokens in the forward and backward passes of the step.",
    OPTIMIZER: "the metric covers the optimizer steps of the training step.",
    SFT: "the metric covers the solutions of an SFT step.",
    MACHINE: "the metric is a time or an amount of memory.",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's definition, unit, source, healthy range and names in other libraries."""

    definition: str
    unit: str = ""
    """The unit; empty for plain numbers, such as ratios."""
    source: str = ROLLOUTS
    healthy: tuple[float | None, float | None] | None = None
    """Smallest and largest value of the metric in a healthy run; None means no bound."""
    open_instruct: str = ""
    """Second name of the metric in open-instruct, which logs it under both."""
    trl: str = ""
    """Name of the metric in TRL."""


METRICS: Mapping[str, Metric] = {
    "step": Metric("Number of the step, from 1.", source=RUN),
    "episode": Metric("Completions sampled so far in the run.", "completions", RUN),
    "tokens": Metric(
        "Completion tokens sampled so far in the run.", "tokens", RUN, trl="num_tokens"
    ),
    "updates": Metric("Optimizer steps taken so far in the run.", "optimizer steps", RUN),
    "epoch": Metric(
        "Prompts sampled so far, divided by the number of training prompts.", "epochs", RUN
    ),
    "reward_id": Metric("Name, version and source hash of the reward.", source=RUN),
    "objective/scores": Metric(
        "Mean reward of the scored completions.",
        "reward",
        open_instruct="objective/scores_mean",
        trl="reward",
    ),
    "objective/reward_std": Metric(
        "Standard deviation (ddof 0) of the rewards of all scored completions.", "reward"
    ),
    "objective/group_std": Metric(
        "Mean over groups of the standard deviation (ddof 1) of rewards in a group.",
        "reward",
        trl="reward_std",
    ),
    "objective/verifiable_correct_rate": Metric(
        "Share of scored completions that are correct.",
        "share",
    ),
    "objective/parts/*": Metric(
        "Mean of one unweighted part of the reward, over the completions that have it.",
        "reward",
        trl="rewards/*/mean",
    ),
    "objective/parts/length_penalty": Metric(
        "Mean length penalty, which is 0 or negative, and which objective/scores includes. Logged "
        "only with a length_penalty.",
        "reward",
    ),
    "objective/unscored": Metric(
        "Completions whose scoring failed, and which no other statistic includes.", "completions"
    ),
    "rollout/zero_variance_groups": Metric(
        "Share of groups whose rewards are all equal.",
        "share",
        healthy=(0.0, 0.9),
        trl="frac_reward_zero_std",
    ),
    "rollout/trained_groups": Metric("Groups of this step that were trained on.", "groups"),
    "rollout/rounds": Metric(
        "Sampling rounds; more than one only with dynamic sampling.", "rounds"
    ),
    "rollout/dropped_unscored": Metric(
        "Groups dropped because they have fewer than two scored completions.", "groups"
    ),
    "rollout/dropped_stale": Metric(
        "Groups dropped because they are older than overlap.max_staleness.", "groups"
    ),
    "rollout/dropped_uniform": Metric(
        "Groups dropped by dynamic sampling (all correct or all wrong) or by drop_flat (rewards "
        "all equal).",
        "groups",
    ),
    "rollout/dropped_surplus": Metric(
        "Groups dropped because the step had enough groups without them.", "groups"
    ),
    "val/sequence_lengths": Metric(
        "Mean tokens per completion, including the end token.",
        "tokens",
        trl="completions/mean_length",
    ),
    "val/sequence_lengths_min": Metric(
        "Tokens of the shortest completion.", "tokens", trl="completions/min_length"
    ),
    "val/sequence_lengths_max": Metric(
        "Tokens of the longest completion.", "tokens", trl="completions/max_length"
    ),
    "val/sequence_lengths_solved": Metric(
        "Mean tokens of the correct completions. Logged only if there are any.", "tokens"
    ),
    "val/sequence_lengths_unsolved": Metric(
        "Mean tokens of the wrong completions. Logged only if there are any.", "tokens"
    ),
    "rollout/stop_rate": Metric(
        "Share of completions that ended before the token limit; with an environment, share of "
        "episodes that ended neither at rollout.max_tokens nor at environment.max_tokens.",
        "share",
    ),
    "rollout/turns": Metric(
        "Mean number of the policy's turns in an episode. Logged only with an environment, like "
        "the next five metrics.",
        "turns",
    ),
    "rollout/tool_calls": Metric("Mean number of tool calls in an episode.", "calls"),
    "rollout/unreadable_calls": Metric(
        "Number of malformed calls; the policy gets an error message for each.", "calls"
    ),
    "rollout/segments": Metric(
        "Mean number of segments of a rollout; more than 1 if the chat template rewrites earlier "
        "turns.",
        "segments",
    ),
    "rollout/limit_rate": Metric(
        "Share of episodes that ended at a limit of turns, of calls, or of the tokens of a turn "
        "(rollout.max_tokens) or an episode (environment.max_tokens).",
        "share",
    ),
    "rollout/environment_errors": Metric(
        "Episodes that ended without a reward, because the environment failed.",
        "episodes",
        healthy=(0, 0),
    ),
    "val/stop_token_rate": Metric(
        "Share of completions that contain a stop token.",
        "share",
    ),
    "val/num_stop_token_ids": Metric(
        "Number of stop tokens in all completions.",
        "tokens",
    ),
    "other/real_batch_size_ratio": Metric(
        "Share of completions in groups whose rewards differ.", "share", healthy=(0.1, 1.0)
    ),
    "rollout/repetition": Metric(
        "Share of 4-grams of tokens that occur earlier in the same completion, over up to 128 "
        "completions.",
        "share",
        healthy=(0.0, 0.5),
    ),
    "rollout/distinct_answers": Metric(
        "Number of different final answers among up to 128 completions.", "answers"
    ),
    "rollout/effective_answers": Metric(
        "Effective number of final answers: exp of the entropy of their frequencies.", "answers"
    ),
    "rollout/effective_targets": Metric(
        "Effective number of targets of the step's prompts. Logged only if targets are short.",
        "answers",
    ),
    "rollout/top_answer_share": Metric(
        "Share of completions with the most frequent final answer, whatever their prompt.",
        "share",
        healthy=(0.0, 0.9),
    ),
    "rollout/best_constant": Metric(
        "Share of prompts whose target is the most frequent one: the accuracy of the best constant "
        "answer.",
        "share",
    ),
    "overlap/staleness": Metric(
        "Mean over sampled tokens of the optimizer steps between the weights that sampled the "
        "token and the weights at the start of the step. Logged only with overlap.staleness.",
        "optimizer steps",
    ),
    "overlap/staleness_max": Metric(
        "Maximum over sampled tokens of the optimizer steps between the weights that sampled the "
        "token and the weights at the start of the step.",
        "optimizer steps",
    ),
    "overlap/version_min": Metric(
        "Version of the oldest weights that sampled for the step, in optimizer steps.",
        "optimizer steps",
    ),
    "overlap/version_max": Metric(
        "Version of the newest weights that sampled for the step, in optimizer steps.",
        "optimizer steps",
    ),
    "engine/preemptions": Metric(
        "Completions that the engine paused since the last step because the KV cache was full, "
        "and continued later. Logged only if there were any; a larger engine.cache_gigabytes "
        "(with vLLM, a larger engine.vllm.memory) avoids them.",
        "completions",
        MACHINE,
    ),
    "engine/restarts": Metric(
        "Engine processes that died and were started again since the last step. Logged only with "
        "an engine in other processes.",
        "processes",
        MACHINE,
        healthy=(0, 0),
    ),
    "scoring/restarts": Metric(
        "Scoring processes that were killed and replaced since the last step. Logged only if "
        "there were any.",
        "processes",
        MACHINE,
        healthy=(0, 0),
    ),
    "time/rollout": Metric("Seconds spent sampling.", "seconds", MACHINE),
    "time/score": Metric("Seconds spent scoring.", "seconds", MACHINE),
    "time/training": Metric(
        "Seconds spent on log-probabilities, gradients and optimizer steps.",
        "seconds",
        MACHINE,
    ),
    "time/wait_rollouts": Metric(
        "Seconds that training waited for rollouts. Logged only with overlap.mode = 'copy'.",
        "seconds",
        MACHINE,
    ),
    "time/wait_training": Metric(
        "Seconds that generation waited for training before it sampled for this step. Logged "
        "only with overlap.mode = 'copy'.",
        "seconds",
        MACHINE,
    ),
    "time/total": Metric(
        "Seconds of the whole step, without evaluation and saving.",
        "seconds",
        MACHINE,
        trl="step_time",
    ),
    "time/from_scratch": Metric(
        "Seconds of all steps since the run began, without evaluation and saving.",
        "seconds",
        MACHINE,
    ),
    "time/mfu": Metric(
        "Model FLOPs utilization: 6 x weights x tokens (prompts and completions) of the "
        "optimizer steps, divided by time/training and by the peak bfloat16 rate of all GPUs that "
        "train. Logged only on GPUs whose rate is known.",
        "share",
        MACHINE,
    ),
    "memory/peak": Metric(
        "Peak GPU memory allocated so far by this process. Logged only on a GPU.", "GiB", MACHINE
    ),
    "time/tokens_per_second": Metric(
        "Sampled tokens of the step per second; in SFT, tokens of its solutions.",
        "tokens/s",
        MACHINE,
    ),
    # Curriculum and replay.
    "data/seen_prompts": Metric(
        "Number of training prompts that had results before this step. Logged only with a "
        "curriculum.",
        "prompts",
    ),
    "data/pass_rate": Metric(
        "Mean running pass rate of the prompts that had results before this step.", "share"
    ),
    "data/drawn_pass_rate": Metric(
        "Mean running pass rate of this step's prompts before the step, with 0.5 for a new prompt.",
        "share",
    ),
    "data/dropped_prompts": Metric(
        "Prompts whose pass rate is at or above curriculum.drop_above.", "prompts"
    ),
    "data/drawn_again": Metric(
        "Prompts of this step whose pass rate is at or above curriculum.drop_above, drawn "
        "because too few others are left.",
        "prompts",
        healthy=(0.0, 0.0),
    ),
    "data/parts/*": Metric(
        "Share of this step's prompts that come from one part of a mixed task.", "share"
    ),
    "data/replayed_groups": Metric(
        "Groups of earlier steps that this step also trained on.", "groups"
    ),
    "data/replay_size": Metric("Groups in the replay buffer.", "groups"),
    "data/replay_age": Metric(
        "Mean optimizer steps since the replayed groups were sampled.", "optimizer steps"
    ),
    # Forward and backward passes, optimizer steps and supervised training.
    "lr": Metric(
        "Learning rate of the last optimizer step.", source=OPTIMIZER, trl="learning_rate"
    ),
    "objective/kl": Metric(
        "Mean over completions of the sum over tokens of logp - ref_logp, under the policy that "
        "sampled the completions: the k1 estimate of its KL(policy, reference). The policy that "
        "sampled is that of the start of the step (old_logp); with stale rollouts, the engine's "
        "(sampler_logp). Optimizer steps of this step show in the next one, and a run that starts "
        "from its reference starts at 0. Logged only with a reference and with sampled "
        "completions.",
        "nats",
        PASSES,
        healthy=(None, 15.0),
    ),
    "objective/kl2": Metric(
        "Mean over completions of the sum over tokens of (logp - ref_logp)^2 / 2, with the "
        "log-probs of objective/kl.",
        "nats",
        PASSES,
    ),
    "objective/kl3": Metric(
        "Mean over completions of the sum over tokens of exp(ref_logp - logp) - 1 - (ref_logp - "
        "logp), with the log-probs of objective/kl.",
        "nats",
        PASSES,
    ),
    "objective/non_score_reward": Metric(
        "objective/beta times objective/kl. Not logged for dpo and ipo, whose beta weighs no KL.",
        "reward",
        PASSES,
    ),
    "objective/rlhf_reward": Metric(
        "objective/scores minus objective/non_score_reward. Not logged for dpo and ipo.",
        "reward",
        PASSES,
    ),
    "objective/kl_avg": Metric(
        "Mean over tokens of the KL estimate that objective.kl selects, against the reference: of "
        "the current policy if the KL is in the loss, of the policy at the start of the step if it "
        "is in the reward. objective.kl_target is compared with this metric. Logged only with a "
        "KL penalty.",
        "nats",
        PASSES,
        trl="kl",
    ),
    "objective/teacher_kl": Metric(
        "Mean over tokens of old_logp - teacher_logp: the KL from policy to teacher. Logged only "
        "with a teacher.",
        "nats",
        PASSES,
    ),
    "objective/teacher_floored": Metric(
        "Share of tokens to which the teacher gives a probability below exp(-20), which is "
        "raised to exp(-20). Logged only with a teacher.",
        "share",
        PASSES,
    ),
    "objective/taught": Metric(
        "Share of rollouts with privileged text, from which the policy can teach itself. Logged "
        "only with a self-teacher (sdpo).",
        "share",
        PASSES,
    ),
    "objective/beta": Metric(
        "Value of objective.beta in this step: the weight of the KL, or, for dpo and ipo, the "
        "scale of the log-ratios of a pair. Logged only with a reference.",
        source=OPTIMIZER,
    ),
    "policy/entropy_avg": Metric(
        "Mean entropy in nats of the next-token distribution.",
        "nats",
        PASSES,
        open_instruct="objective/entropy",
        trl="entropy",
    ),
    "policy/approxkl_avg": Metric(
        "Mean of r - 1 - log r: the k3 estimate of KL(old, now).",
        "nats",
        PASSES,
        healthy=(None, 0.1),
    ),
    "policy/approxkl_k1": Metric("Mean of old_logp - logp; may be negative.", "nats", PASSES),
    "policy/approxkl_k2": Metric("Half the mean of (logp - old_logp)^2.", "nats", PASSES),
    "policy/clipfrac_avg": Metric(
        "Share of tokens whose gradient the clip (or the algorithm's selection, as in clip_cov) "
        "removed or whose weight was truncated; with one ratio per completion, the share of "
        "completions. With objective.top_entropy, the share of the tokens that it keeps; TRL "
        "counts all tokens.",
        "share",
        PASSES,
        healthy=(0.0, 0.5),
        trl="clip_ratio/region_mean",
    ),
    "policy/clipfrac_low": Metric(
        "As policy/clipfrac_avg, at the lower bound only.",
        "share",
        PASSES,
        trl="clip_ratio/low_mean",
    ),
    "policy/clipfrac_high": Metric(
        "As policy/clipfrac_avg, at the upper bound only.",
        "share",
        PASSES,
        trl="clip_ratio/high_mean",
    ),
    "policy/clipfrac_dual": Metric(
        "Share of tokens with a negative advantage and a ratio above the dual clip. Logged only "
        "with a dual clip.",
        "share",
        PASSES,
    ),
    "val/ratio_overflow": Metric(
        "Share of tokens with |logp - old_logp| above 20, beyond which ratios are cut off. A "
        "share above 0 points to an error.",
        "share",
        PASSES,
        healthy=(0.0, 0.0),
    ),
    "loss/policy_avg": Metric(
        "Mean loss over optimizer steps, which does not measure progress.",
        source=OPTIMIZER,
        open_instruct="objective/loss",
        trl="loss",
    ),
    "loss/value": Metric(
        "Mean loss of the critic over its optimizer steps. Logged only with a critic.",
        source=OPTIMIZER,
    ),
    "critic/explained_variance": Metric(
        "1 - Var(target - value) / Var(target) over tokens, before the critic is trained on "
        "them: 1 for a perfect critic, and 0 for one that predicts the mean target. Logged only "
        "with a critic.",
        "share",
        PASSES,
    ),
    "critic/clipfrac": Metric(
        "Share of tokens whose value has moved further than value_clip allows, and which "
        "therefore has no gradient. Logged only with a critic.",
        "share",
        PASSES,
    ),
    "critic/value_mean": Metric(
        "Mean value over tokens before the critic is trained on them. Logged only with a critic.",
        "reward",
        PASSES,
    ),
    "critic/target_mean": Metric(
        "Mean target of the critic over tokens. Logged only with a critic.", "reward", PASSES
    ),
    "critic/grad_norm": Metric(
        "Mean gradient norm of the critic before clipping, over optimizer steps that were not "
        "skipped.",
        source=OPTIMIZER,
    ),
    "critic/skipped": Metric(
        "Share of the critic's optimizer steps that were skipped because their gradient was not "
        "finite.",
        "share",
        OPTIMIZER,
        healthy=(0, 0),
    ),
    "pairs/count": Metric(
        "Pairs of the step: groups whose best and worst completion differ in reward. Logged only "
        "with an objective of pairs.",
        "pairs",
        OPTIMIZER,
    ),
    "pairs/ties": Metric(
        "Groups without a pair, because their rewards are equal. Logged only with an objective "
        "of pairs.",
        "groups",
        OPTIMIZER,
    ),
    "pairs/margin": Metric(
        "Mean over pairs of the log-ratio to the reference, chosen minus rejected: sums over "
        "tokens, or means with objective.average. Logged only with an objective of pairs.",
        "nats",
        PASSES,
    ),
    "pairs/accuracy": Metric(
        "Share of pairs with a margin above 0, before each optimizer step. Logged only with an "
        "objective of pairs.",
        "share",
        PASSES,
        trl="rewards/accuracies",
    ),
    "loss/cross_entropy": Metric(
        "SFT: mean cross-entropy in nats over the tokens of the step's solutions, before its "
        "optimizer step.",
        "nats",
        SFT,
    ),
    "sft/epoch": Metric("Passes over all solutions so far.", "epochs", SFT),
    "sft/examples": Metric("Solutions trained on in the step.", "solutions", SFT),
    "sft/left_out": Metric(
        "Solutions of the step longer than sft.max_tokens, which are left out.", "solutions", SFT
    ),
    "sft/tokens": Metric(
        "Tokens of the step's solutions, including their end tokens.", "tokens", SFT
    ),
    "optim/grad_norm": Metric(
        "Mean gradient norm before clipping, over optimizer steps that were not skipped.",
        source=OPTIMIZER,
        trl="grad_norm",
    ),
    "optim/skipped": Metric(
        "Number of optimizer steps that were skipped because their gradient was not finite.",
        "optimizer steps",
        OPTIMIZER,
        healthy=(0, 0),
    ),
    "val/ratio": Metric(
        "Mean of the objective's ratio r over tokens, or over completions with one ratio per "
        "completion.",
        source=PASSES,
        healthy=(0.9, 1.1),
    ),
    "val/ratio_var": Metric(
        "Variance of the objective's ratio r, over tokens or over completions like val/ratio.",
        source=PASSES,
    ),
    "val/ratio_max": Metric("Largest r.", source=PASSES),
    "val/ratio_min": Metric("Smallest r.", source=PASSES),
    "reward/advantages_mean": Metric("Mean advantage over tokens.", source=PASSES),
    "reward/advantages_min": Metric("Smallest advantage.", source=PASSES),
    "reward/advantages_max": Metric("Largest advantage.", source=PASSES),
    "policy/off_policy_dropped": Metric(
        "Share of tokens dropped because their advantage is negative and their probability fell "
        "too far. Logged only with off_policy_limit.",
        "share",
        PASSES,
    ),
    "policy/correction_mean": Metric(
        "Mean importance weight of the off-policy correction. Logged only with a correction.",
        source=PASSES,
    ),
    "policy/correction_dropped": Metric(
        "Share of tokens whose importance weight w is 0.", "share", PASSES
    ),
    "policy/correction_ess": Metric(
        "Effective sample size of the importance weights w, (mean w)^2 / mean w^2, as a share.",
        "share",
        PASSES,
        healthy=(0.3, 1.0),
    ),
    "other/packed_ratio": Metric(
        "Rows in the forward passes of the optimizer steps, divided by completions: 1 without "
        "packing, and less with packing, where a micro-batch is one row.",
        "share",
        PASSES,
    ),
    "debug/sampler_logp_diff_mean": Metric(
        "Mean absolute difference of sampler_logp and logp before the first optimizer step.",
        "nats",
        PASSES,
        trl="sampling/sampling_logp_difference/mean",
    ),
    "debug/sampler_logp_diff_max": Metric(
        "Largest absolute difference of sampler_logp and logp before the first optimizer step.",
        "nats",
        PASSES,
        trl="sampling/sampling_logp_difference/max",
    ),
    "debug/sampler_kl": Metric(
        "Mean of sampler_logp - logp, before the first optimizer step.", "nats", PASSES
    ),
    "debug/sampler_k3": Metric(
        "Mean of rho - 1 - log rho, with rho = exp(logp - sampler_logp).",
        "nats",
        PASSES,
        healthy=(0.0, 0.01),
    ),
    "debug/kept_tokens": Metric(
        "Mean number of tokens that top_k, top_p and min_p kept, with rollout.mask_replay.",
        source=PASSES,
    ),
    "debug/sampler_chi2": Metric(
        "Mean of rho^2, minus 1, with rho = exp(logp - sampler_logp).", source=PASSES
    ),
    "debug/sampler_ppl_ratio": Metric(
        "Mean over completions of exp(mean_t (sampler_logp - logp)).", source=PASSES
    ),
    "debug/rho_mean": Metric(
        "Mean of rho = exp(logp - sampler_logp), before the first optimizer step.", source=PASSES
    ),
    "debug/rho_min": Metric("Smallest rho.", source=PASSES),
    "debug/rho_max": Metric("Largest rho.", source=PASSES),
}


def metric(name: str) -> Metric | None:
    if name in METRICS:
        return METRICS[name]
    return next((entry for key, entry in METRICS.items() if fnmatchcase(name, key)), None)


def meaning(name: str) -> str | None:
    """Return the definition of a metric, or None if the metric is unknown."""
    entry = metric(name)
    return None if entry is None else entry.definition


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and isfinite(value)


# Names of metrics in run folders of the version before.

FORMER: Mapping[str, str] = {
    "objective/success": "objective/verifiable_correct_rate",
    "rollout/lengths": "val/sequence_lengths",
    "rollout/lengths_min": "val/sequence_lengths_min",
    "rollout/lengths_max": "val/sequence_lengths_max",
    "rollout/lengths_solved": "val/sequence_lengths_solved",
    "rollout/lengths_unsolved": "val/sequence_lengths_unsolved",
    "rollout/stop_token_rate": "val/stop_token_rate",
    "rollout/stop_tokens": "val/num_stop_token_ids",
    "time/update": "time/training",
    "policy/ratio": "val/ratio",
    "policy/ratio_var": "val/ratio_var",
    "policy/ratio_min": "val/ratio_min",
    "policy/ratio_max": "val/ratio_max",
    "policy/ratio_overflow": "val/ratio_overflow",
    "val/format_scores": "objective/parts/format",
    **{entry.open_instruct: name for name, entry in METRICS.items() if entry.open_instruct},
}
"""Maps former and second names of metrics to their names."""


def current_name(name: str) -> str:
    """Return the name of a metric that a file or a user gives under a former or a second name.

    >>> current_name("rollout/lengths"), current_name("objective/entropy")
    ('val/sequence_lengths', 'policy/entropy_avg')
    """
    return FORMER.get(name, name)


# Formats the numbers of evaluations: accuracies in percent, rewards as plain numbers.


def is_reward(name: str) -> bool:
    """Whether an evaluation metric is a reward or a reward part, and not a rate.

    >>> is_reward("parts/format"), is_reward("pass@4")
    (True, False)
    """
    return name == "reward" or name.startswith("parts/")


def value_text(name: str, value: float) -> str:
    """Format a metric's value: a reward as a plain number, a rate or accuracy in percent.

    >>> value_text("greedy", 0.125), value_text("reward", -0.125)
    ('12.5%', '-0.125')
    """
    return f"{value:.3f}" if is_reward(name) else f"{value:.1%}"


def change_text(name: str, change: float) -> str:
    """Format a metric's change: a reward as a plain number, a rate in percentage points.

    >>> change_text("greedy", 0.125), change_text("reward", 0.125)
    ('+12.5 points', '+0.125')
    """
    return f"{change:+.3f}" if is_reward(name) else f"{100 * change:+.1f} points"


def estimate_text(name: str, estimate: Mapping[str, float]) -> str:
    """Return an estimate as text, with its confidence interval unless the interval's length is 0.

    >>> estimate_text("greedy", {"value": 0.0, "low": 0.0, "high": 0.037})
    '0.0% [0.0%, 3.7%]'
    """
    value, low, high = (value_text(name, estimate[key]) for key in ("value", "low", "high"))
    return value if estimate["low"] == estimate["high"] else f"{value} [{low}, {high}]"
