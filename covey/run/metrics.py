"""Every metric that a step logs, and what it means: the one table.

Names follow open-instruct's where there is one; definitions are token-exact, over trained tokens
only, pooled as (sum, count) over all micro-batches and optimizer steps of a step, never as a mean
of means. A name with `*` stands for several.
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
        "episode": "Answers sampled so far in the run.",
        "tokens": "Tokens of these answers.",
        "updates": "Optimizer steps taken so far in the run.",
        "reward_id": "Name, version and source hash of the reward.",
        "lr": "Learning rate of the last optimizer step.",
        "objective/scores": "Mean reward of the answers that were scored.",
        "objective/reward_std": "Standard deviation (ddof 0) of those rewards over the step.",
        "objective/success": "Share of answers that are right.",
        "objective/parts/*": "Mean of one unweighted part of the reward, over the answers that "
        "have it.",
        "objective/unscored": "Answers whose scoring failed. They belong to no statistic.",
        "objective/kl_avg": "Mean over tokens of the KL estimate in use, against the reference. "
        "Only with a reference.",
        "objective/beta": "Weight of the KL in this step. Only with a reference.",
        "policy/entropy_avg": "Mean entropy in nats of the next-token distribution.",
        "policy/approxkl_avg": "Mean of r - 1 - log r: the k3 estimate of KL(old, now).",
        "policy/approxkl_k1": "Mean of old_logp - logp; may be negative.",
        "policy/approxkl_k2": "Half the mean of (logp - old_logp)^2.",
        "policy/clipfrac_avg": "Share of tokens whose gradient the clip removed (of weights that "
        "were cut down, where weights are truncated). Where all tokens of an answer share one "
        "ratio: of answers.",
        "policy/clipfrac_low": "Of these, at the lower bound.",
        "policy/clipfrac_high": "Of these, at the upper bound.",
        "policy/clipfrac_dual": "Share with A < 0 and a ratio above the dual clip. Only with one.",
        "policy/ratio_overflow": "Share of tokens with |logp - old_logp| above 20, where ratios "
        "are cut off. Anything but 0 means that something is wrong.",
        "loss/policy_avg": "Mean over optimizer steps of the loss. Its size is not progress.",
        "loss/cross_entropy": "Warm-up: mean cross-entropy in nats over the tokens of the step's "
        "solutions, before its optimizer step.",
        "sft/epoch": "Passes over all solutions so far.",
        "sft/examples": "Solutions learned from in the step.",
        "sft/left_out": "Solutions left out of the step: longer than sft.max_tokens.",
        "sft/tokens": "Tokens of the step's solutions, their end tokens included.",
        "optim/grad_norm": "Mean over optimizer steps, but those skipped, of the gradient "
        "norm before clipping.",
        "optim/skipped": "Optimizer steps left out because their gradient was not finite.",
        "policy/ratio": "Mean of the ratio that the objective uses, over tokens; over answers where "
        "all tokens of an answer share it.",
        "policy/ratio_var": "Variance of r, likewise.",
        "policy/ratio_max": "Largest r.",
        "policy/ratio_min": "Smallest r.",
        "reward/advantages_mean": "Mean advantage over tokens.",
        "reward/advantages_min": "Smallest advantage.",
        "reward/advantages_max": "Largest advantage.",
        "rollout/zero_variance_groups": "Share of groups whose rewards are all equal.",
        "rollout/trained_groups": "Groups that the update learned from.",
        "rollout/rounds": "How often answers were sampled; more than once only to fill a step.",
        "rollout/dropped_unscored": "Groups left out: fewer than two of their answers were scored.",
        "rollout/dropped_stale": "Groups left out: sampled too many optimizer steps ago.",
        "rollout/dropped_uniform": "Groups left out by dynamic sampling: all right or all wrong.",
        "rollout/dropped_surplus": "Groups left out because the step was full.",
        "policy/off_policy_dropped": "Share of tokens dropped as bad and too unlikely by now. Only "
        "with off_policy_limit.",
        "policy/correction_mean": "Mean correction for the sampler. Only with one.",
        "policy/correction_dropped": "Share of tokens whose correction is 0.",
        "policy/correction_ess": "Effective sample size, (mean w)^2 / mean w^2, as a share.",
        "rollout/lengths": "Mean number of tokens of an answer, its end token included.",
        "rollout/lengths_min": "Shortest answer.",
        "rollout/lengths_max": "Longest answer.",
        "rollout/lengths_solved": "Mean length of the right answers. Only if there are any.",
        "rollout/lengths_unsolved": "Mean length of the wrong answers. Only if there are any.",
        "rollout/stop_rate": "Share of answers that ended by themselves rather than at the limit.",
        "debug/sampler_logp_diff_mean": "Mean absolute difference of sampler_logp and logp "
        "before the first update.",
        "debug/sampler_logp_diff_max": "Largest absolute difference of sampler_logp and logp "
        "before the first update.",
        "debug/sampler_kl": "Mean of sampler_logp - logp, before the first update.",
        "debug/sampler_k3": "Mean of rho - 1 - log rho, rho = exp(logp - sampler_logp), likewise.",
        "debug/sampler_chi2": "Mean of rho^2, less 1, likewise.",
        "debug/sampler_ppl_ratio": "Mean over answers of exp(mean_t (sampler_logp - logp)).",
        "debug/rho_mean": "Mean of rho, before the first update.",
        "debug/rho_min": "Smallest rho.",
        "debug/rho_max": "Largest rho.",
        "time/rollout": "Seconds spent sampling.",
        "time/score": "Seconds spent scoring.",
        "time/update": "Seconds spent on log-probabilities, gradients and optimizer steps.",
        "time/total": "Seconds of the whole step, without evaluation and saving.",
        "time/tokens_per_second": "Sampled tokens of the step over its seconds; in a warm-up, "
        "those of its solutions.",
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
"""What names of version 0.1 began with -> what they begin with now."""


def current_name(name: str) -> str:
    """Return what a metric of a step is called now.

    >>> current_name("val/ratio_max"), current_name("loss/policy_avg")
    ('policy/ratio_max', 'loss/policy_avg')
    """
    for old, new in RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


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
    page = Path(sys.argv[1])
    introduction = page.read_text(encoding="utf-8").partition("| metric |")[0]
    page.write_text(introduction + table(), encoding="utf-8")
