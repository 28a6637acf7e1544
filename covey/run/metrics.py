"""Registry of metrics: the name and definition of everything that a step logs.

Names follow open-instruct's where it has one. Means over tokens are over trained tokens only. They
are pooled as (sum, count) over all micro-batches and optimizer steps of a step, never a mean of
means. A name with `*` stands for several metrics.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "step": "Number of the step, from 1.",
        "episode": "Completions sampled so far in the run.",
        "tokens": "Tokens of these completions.",
        "updates": "Optimizer steps taken so far in the run.",
        "reward_id": "Name, version and source hash of the reward.",
        "lr": "Learning rate of the last optimizer step.",
        "objective/scores": "Mean reward of the scored completions.",
        "objective/reward_std": "Standard deviation (ddof 0) of these rewards.",
        "objective/success": "Share of scored completions that are correct.",
        "objective/parts/*": "Mean of one unweighted part of the reward, over the completions "
        "that have it.",
        "objective/unscored": "Completions whose scoring failed. No other statistic includes them.",
        "objective/kl_avg": "Mean over tokens of the KL estimate in use, against the reference. "
        "Only with a reference.",
        "objective/teacher_kl": "Mean over tokens of old_logp - teacher_logp: the KL from policy "
        "to teacher. Only with a teacher.",
        "objective/teacher_floored": "Share of tokens that the teacher finds less likely than "
        "exp(-20), which count as that. Only with a teacher.",
        "objective/beta": "Weight of the KL in this step. Only with a reference.",
        "policy/entropy_avg": "Mean entropy in nats of the next-token distribution.",
        "policy/approxkl_avg": "Mean of r - 1 - log r: the k3 estimate of KL(old, now).",
        "policy/approxkl_k1": "Mean of old_logp - logp; may be negative.",
        "policy/approxkl_k2": "Half the mean of (logp - old_logp)^2.",
        "policy/clipfrac_avg": "Share of tokens whose gradient the clip removed, or whose weight "
        "was truncated. With one ratio per completion: share of completions.",
        "policy/clipfrac_low": "The same, at the lower bound only.",
        "policy/clipfrac_high": "The same, at the upper bound only.",
        "policy/clipfrac_dual": "Share with A < 0 and a ratio above the dual clip. Only with one.",
        "policy/ratio_overflow": "Share of tokens with |logp - old_logp| above 20, where ratios "
        "are cut off. Anything but 0 points to an error.",
        "loss/policy_avg": "Mean loss over optimizer steps. It does not measure progress.",
        "loss/cross_entropy": "SFT: mean cross-entropy in nats over the tokens of the step's "
        "solutions, before its optimizer step.",
        "sft/epoch": "Passes over all solutions so far.",
        "sft/examples": "Solutions trained on in the step.",
        "sft/left_out": "Solutions of the step longer than sft.max_tokens, which are left out.",
        "sft/tokens": "Tokens of the step's solutions, their end tokens included.",
        "optim/grad_norm": "Mean gradient norm before clipping, over optimizer steps not skipped.",
        "optim/skipped": "Optimizer steps skipped because their gradient was not finite.",
        "policy/ratio": "Mean ratio r of the objective over tokens. With one ratio per completion: "
        "over completions.",
        "policy/ratio_var": "Variance of r, over the same.",
        "policy/ratio_max": "Largest r.",
        "policy/ratio_min": "Smallest r.",
        "reward/advantages_mean": "Mean advantage over tokens.",
        "reward/advantages_min": "Smallest advantage.",
        "reward/advantages_max": "Largest advantage.",
        "rollout/zero_variance_groups": "Share of groups whose rewards are all equal.",
        "rollout/trained_groups": "Groups trained on.",
        "rollout/rounds": "Sampling rounds. Only dynamic sampling needs more than one.",
        "rollout/dropped_unscored": "Groups dropped with fewer than two scored completions.",
        "rollout/dropped_stale": "Groups dropped as too old, by overlap.max_staleness.",
        "rollout/dropped_uniform": "Groups dropped by dynamic sampling (all correct or all wrong) "
        "or by drop_flat (rewards all equal).",
        "rollout/dropped_surplus": "Groups dropped because the step was full.",
        "policy/off_policy_dropped": "Share of tokens dropped: negative advantage, and by now too "
        "unlikely. Only with off_policy_limit.",
        "policy/correction_mean": "Mean importance weight of the correction. Only with one.",
        "policy/correction_dropped": "Share of tokens whose importance weight is 0.",
        "policy/correction_ess": "Effective sample size, (mean w)^2 / mean w^2, as a share.",
        "rollout/lengths": "Mean tokens per completion, its end token included.",
        "rollout/lengths_min": "Tokens of the shortest completion.",
        "rollout/lengths_max": "Tokens of the longest completion.",
        "rollout/lengths_solved": "Mean tokens of the correct completions. Only if there are any.",
        "rollout/lengths_unsolved": "Mean tokens of the wrong completions. Only if there are any.",
        "rollout/stop_rate": "Share of completions that ended before the token limit.",
        "rollout/turns": "Mean turns of the policy in an episode. With an environment, as the next "
        "five.",
        "rollout/tool_calls": "Mean calls of tools in an episode.",
        "rollout/unreadable_calls": "Calls that could not be read; the policy was told why.",
        "rollout/segments": "Mean segments of a rollout: more than 1 where the chat template "
        "rewrites earlier turns.",
        "rollout/limit_rate": "Share of episodes that a limit of turns, calls or tokens ended.",
        "rollout/environment_errors": "Episodes that ended because the environment failed. They "
        "have no reward.",
        "debug/sampler_logp_diff_mean": "Mean absolute difference of sampler_logp and logp "
        "before the first update.",
        "debug/sampler_logp_diff_max": "Largest absolute difference of sampler_logp and logp "
        "before the first update.",
        "debug/sampler_kl": "Mean of sampler_logp - logp, before the first update.",
        "debug/sampler_k3": "Mean of rho - 1 - log rho, with rho = exp(logp - sampler_logp).",
        "debug/sampler_chi2": "Mean of rho^2, minus 1.",
        "debug/sampler_ppl_ratio": "Mean over completions of exp(mean_t (sampler_logp - logp)).",
        "debug/rho_mean": "Mean of rho, before the first update.",
        "debug/rho_min": "Smallest rho.",
        "debug/rho_max": "Largest rho.",
        "overlap/staleness": "Mean over sampled tokens of the optimizer steps between the weights "
        "that sampled and those that the step starts from. Only with overlap.staleness.",
        "overlap/staleness_max": "The most of these optimizer steps.",
        "overlap/version_min": "Optimizer steps of the oldest weights that sampled for the step.",
        "overlap/version_max": "Optimizer steps of the newest weights that sampled for the step.",
        "engine/restarts": "Engine processes that died and were started again since the last step. "
        "Only with an engine in other processes.",
        "scoring/restarts": "Scoring processes that were killed and replaced since the last step. "
        "Only if there were any.",
        "time/rollout": "Seconds spent sampling.",
        "time/score": "Seconds spent scoring.",
        "time/update": "Seconds spent on log-probabilities, gradients and optimizer steps.",
        "time/wait_rollouts": "Seconds that training waited for rollouts. Only with overlap.mode = "
        "'copy'.",
        "time/wait_training": "Seconds that generation waited for training before it sampled for "
        "this step. Only with overlap.mode = 'copy'.",
        "time/total": "Seconds of the whole step, without evaluation and saving.",
        "time/tokens_per_second": "Sampled tokens of the step per second; in SFT, tokens of its "
        "solutions.",
    }
)


RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "val/ratio": "policy/ratio",
        "val/advantages": "reward/advantages",
        "val/zero_variance_groups": "rollout/zero_variance_groups",
        "val/learned_groups": "rollout/trained_groups",
        "val/rounds": "rollout/rounds",
        "val/dropped_": "rollout/dropped_",
        "val/off_policy_dropped": "policy/off_policy_dropped",
        "val/correction_": "policy/correction_",
        "val/sequence_lengths": "rollout/lengths",
        "val/stop_rate": "rollout/stop_rate",
        "warmup/solutions": "sft/examples",
        "warmup/": "sft/",
    }
)
"""Prefix of a metric name in version 0.1 -> prefix now."""


def current_name(name: str) -> str:
    """Return the name that a metric of version 0.1 has now.

    >>> current_name("val/ratio_max"), current_name("loss/policy_avg")
    ('policy/ratio_max', 'loss/policy_avg')
    """
    for old, new in RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def meaning(name: str) -> str | None:
    """Return the definition of a metric, or None if there is no such metric."""
    if name in METRICS:
        return METRICS[name]
    return next((text for pattern, text in METRICS.items() if fnmatchcase(name, pattern)), None)


def table() -> str:
    """Return the table as Markdown, for docs/metrics.md."""
    rows = [f"| `{name}` | {text} |" for name, text in METRICS.items()]
    return "\n".join(["| metric | meaning |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    introduction = page.read_text(encoding="utf-8").partition("| metric |")[0]
    page.write_text(introduction + table(), encoding="utf-8")
