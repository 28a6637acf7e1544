"""Every metric that a step logs, and what it means: the one table.

Names follow open-instruct's where there is one; definitions are token-exact, over trained tokens
only, pooled as (sum, count) over all micro-batches and optimizer steps of a step, never as a mean
of means. A name with `*` stands for several.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "step": "Number of the step, from 1.",
        "episode": "Answers sampled so far in the run.",
        "lr": "Learning rate of the last optimizer step.",
        "objective/scores": "Mean reward of the answers that were scored.",
        "objective/reward_std": "Standard deviation (ddof 0) of those rewards over the step.",
        "objective/success": "Share of answers that are right.",
        "objective/parts/*": "Mean of one unweighted part of the reward.",
        "objective/unscored": "Answers whose scoring failed. They belong to no statistic.",
        "objective/kl_avg": "Mean over tokens of the KL estimate that is in the loss, against the "
        "reference. Only with a reference.",
        "policy/entropy_avg": "Mean entropy in nats of the next-token distribution.",
        "policy/approxkl_avg": "Mean of r - 1 - log r: the k3 estimate of KL(old, now).",
        "policy/clipfrac_avg": "Share of tokens whose gradient the clip removed.",
        "policy/clipfrac_low": "Share removed at the lower bound (A < 0).",
        "policy/clipfrac_high": "Share removed at the upper bound (A > 0).",
        "loss/policy_avg": "Mean over optimizer steps of the loss. Its size is not progress.",
        "optim/grad_norm": "Mean over optimizer steps, but those skipped, of the gradient "
        "norm before clipping.",
        "optim/skipped": "Optimizer steps left out because their gradient was not finite.",
        "val/ratio": "Mean of the ratio r = exp(logp - old_logp).",
        "val/ratio_var": "Variance of r over tokens.",
        "val/ratio_max": "Largest r.",
        "val/ratio_min": "Smallest r.",
        "val/advantages_mean": "Mean advantage over tokens.",
        "val/advantages_min": "Smallest advantage.",
        "val/advantages_max": "Largest advantage.",
        "val/zero_variance_groups": "Share of groups whose rewards are all equal.",
        "val/dropped_groups": "Groups left out: fewer than two of their answers were scored.",
        "val/sequence_lengths": "Mean number of tokens of an answer, its end token included.",
        "val/sequence_lengths_min": "Shortest answer.",
        "val/sequence_lengths_max": "Longest answer.",
        "val/sequence_lengths_solved": "Mean length of the right answers. Only if there are any.",
        "val/sequence_lengths_unsolved": "Mean length of the wrong answers. Only if there are any.",
        "val/stop_rate": "Share of answers that ended by themselves rather than at the limit.",
        "debug/sampler_logp_diff_mean": "Mean absolute difference of sampler_logp and logp "
        "before the first update.",
        "debug/sampler_logp_diff_max": "Largest absolute difference of sampler_logp and logp "
        "before the first update.",
        "time/rollout": "Seconds spent sampling.",
        "time/score": "Seconds spent scoring.",
        "time/update": "Seconds spent on log-probabilities, gradients and optimizer steps.",
        "time/total": "Seconds of the whole step, without evaluation and saving.",
        "time/tokens_per_second": "Sampled tokens of the step over its seconds.",
    }
)


def meaning(name: str) -> str | None:
    """Return what a metric means, or None if there is no such metric."""
    if name in METRICS:
        return METRICS[name]
    return next((text for pattern, text in METRICS.items() if fnmatchcase(name, pattern)), None)


def table() -> str:
    """Return the table as Markdown, for docs/metrics.md."""
    rows = [f"| `{name}` | {text} |" for name, text in METRICS.items()]
    return "\n".join(["| metric | meaning |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
