"""Definitions of the metrics of training passes, optimizer steps and supervised training.

This file defines the names and descriptions of metrics. `covey/objective/diagnostics.py` and
`covey/training/step.py` compute the values of the metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from covey.run.metric import OPTIMIZER, PASSES, ROLLOUTS, SFT, Metric

TRAINING: Mapping[str, Metric] = MappingProxyType(
    {
        "lr": Metric(
            "Learning rate of the last optimizer step.", "", OPTIMIZER, trl="learning_rate"
        ),
        "objective/kl": Metric(
            "Mean over completions of the sum over tokens of logp - ref_logp: the k1 "
            "estimate of KL(policy, reference). Only with a reference.",
            "nats",
            PASSES,
            healthy=(None, 15.0),
        ),
        "objective/kl2": Metric(
            "Mean over completions of the sum over tokens of (logp - ref_logp)^2 / 2.",
            "nats",
            PASSES,
        ),
        "objective/kl3": Metric(
            "Mean over completions of the sum over tokens of exp(ref_logp - logp) - 1 - "
            "(ref_logp - logp).",
            "nats",
            PASSES,
        ),
        "objective/non_score_reward": Metric(
            "objective/beta times objective/kl.", "reward", PASSES
        ),
        "objective/rlhf_reward": Metric(
            "objective/scores minus objective/non_score_reward.",
            "reward",
            PASSES,
        ),
        "objective/kl_avg": Metric(
            "Mean over tokens of the KL estimate in use, against the reference. Only "
            "with a reference.",
            "nats",
            PASSES,
            trl="kl",
        ),
        "objective/teacher_kl": Metric(
            "Mean over tokens of old_logp - teacher_logp: the KL from policy to teacher. Only with "
            "a teacher.",
            "nats",
            PASSES,
        ),
        "objective/teacher_floored": Metric(
            "Share of tokens to which the teacher gives a probability below exp(-20), which is "
            "raised to exp(-20). Only with a teacher.",
            "share",
            PASSES,
        ),
        "objective/taught": Metric(
            "Share of rollouts with privileged text, which the policy can teach itself from. Only "
            "with a self-teacher (sdpo).",
            "share",
            PASSES,
        ),
        "objective/beta": Metric(
            "Weight of the KL in this step. Only with a reference.",
            "",
            OPTIMIZER,
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
            "Share of tokens whose gradient the clip removed, or whose weight was "
            "truncated. With one ratio per completion: share of completions.",
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
            "Share of tokens with a negative advantage and a ratio above the dual clip. Only with "
            "a dual clip.",
            "share",
            PASSES,
        ),
        "policy/ratio_overflow": Metric(
            "Share of tokens with |logp - old_logp| above 20, where ratios are cut "
            "off. A value above 0 points to an error.",
            "share",
            PASSES,
            healthy=(0.0, 0.0),
        ),
        "loss/policy_avg": Metric(
            "Mean loss over optimizer steps. It does not measure progress.",
            "",
            OPTIMIZER,
            open_instruct="objective/loss",
            trl="loss",
        ),
        "loss/value": Metric(
            "Mean loss of the critic over its optimizer steps. Only with a critic.",
            "",
            OPTIMIZER,
        ),
        "critic/explained_variance": Metric(
            "1 - Var(target - value) / Var(target) over tokens, before the critic is trained on "
            "them: 1 is a perfect critic, 0 one that knows the mean. Only with a critic.",
            "share",
            PASSES,
        ),
        "critic/clipfrac": Metric(
            "Share of tokens whose value has moved further than value_clip allows, and has no "
            "gradient. Only with a critic.",
            "share",
            PASSES,
        ),
        "critic/value_mean": Metric(
            "Mean value over tokens before the critic is trained on them. Only with a critic.",
            "reward",
            PASSES,
        ),
        "critic/target_mean": Metric(
            "Mean target of the critic over tokens. Only with a critic.", "reward", PASSES
        ),
        "critic/grad_norm": Metric(
            "Mean gradient norm of the critic before clipping, over optimizer steps not skipped.",
            "",
            OPTIMIZER,
        ),
        "critic/skipped": Metric(
            "Share of the critic's optimizer steps skipped because their gradient was not finite.",
            "share",
            OPTIMIZER,
            healthy=(0, 0),
        ),
        "pairs/count": Metric(
            "Pairs of the step: groups whose best and worst completion differ in reward. Only with "
            "an objective of pairs.",
            "pairs",
            OPTIMIZER,
        ),
        "pairs/ties": Metric(
            "Groups without a pair, since their rewards are equal. Only with such an objective.",
            "groups",
            OPTIMIZER,
        ),
        "pairs/margin": Metric(
            "Mean over pairs of the log-ratio to the reference, chosen minus rejected: sums over "
            "tokens, or means with objective.average. Only with such an objective.",
            "nats",
            PASSES,
        ),
        "pairs/accuracy": Metric(
            "Share of pairs with a margin above 0, before each optimizer step. Only with such an "
            "objective.",
            "share",
            PASSES,
            trl="rewards/accuracies",
        ),
        "loss/cross_entropy": Metric(
            "SFT: mean cross-entropy in nats over the tokens of the step's solutions,"
            " before its optimizer step.",
            "nats",
            SFT,
        ),
        "sft/epoch": Metric("Passes over all solutions so far.", "epochs", SFT),
        "sft/examples": Metric("Solutions trained on in the step.", "solutions", SFT),
        "sft/left_out": Metric(
            "Solutions of the step longer than sft.max_tokens, which are left out.",
            "solutions",
            SFT,
        ),
        "sft/tokens": Metric(
            "Tokens of the step's solutions, including their end tokens.",
            "tokens",
            SFT,
        ),
        "optim/grad_norm": Metric(
            "Mean gradient norm before clipping, over optimizer steps that were not skipped.",
            "",
            OPTIMIZER,
            trl="grad_norm",
        ),
        "optim/skipped": Metric(
            "Optimizer steps skipped because their gradient was not finite.",
            "optimizer steps",
            OPTIMIZER,
            healthy=(0, 0),
        ),
        "policy/ratio": Metric(
            "Mean ratio r of the objective over tokens. With one ratio per "
            "completion: over completions.",
            "",
            PASSES,
            healthy=(0.9, 1.1),
            open_instruct="val/ratio",
        ),
        "policy/ratio_var": Metric(
            "Variance of r, over the same tokens or completions.",
            "",
            PASSES,
            open_instruct="val/ratio_var",
        ),
        "policy/ratio_max": Metric("Largest r.", "", PASSES),
        "policy/ratio_min": Metric("Smallest r.", "", PASSES),
        "reward/advantages_mean": Metric("Mean advantage over tokens.", "", PASSES),
        "reward/advantages_min": Metric("Smallest advantage.", "", PASSES),
        "reward/advantages_max": Metric("Largest advantage.", "", PASSES),
        "policy/off_policy_dropped": Metric(
            "Share of tokens dropped because their advantage is negative and their probability "
            "fell too far. Only with off_policy_limit.",
            "share",
            PASSES,
        ),
        "policy/correction_mean": Metric(
            "Mean importance weight of the correction. Only with a correction.",
            "",
            PASSES,
        ),
        "policy/correction_dropped": Metric(
            "Share of tokens whose importance weight is 0.",
            "share",
            PASSES,
        ),
        "policy/correction_ess": Metric(
            "Effective sample size, (mean w)^2 / mean w^2, as a share.",
            "share",
            PASSES,
            healthy=(0.3, 1.0),
        ),
        "other/packed_ratio": Metric(
            "Rows in the forward passes of the optimizer steps, divided by completions: 1 "
            "without packing. With packing, a micro-batch is one row.",
            "share",
            PASSES,
        ),
        "debug/sampler_logp_diff_mean": Metric(
            "Mean absolute difference of sampler_logp and logp before the first update.",
            "nats",
            PASSES,
            trl="sampling/sampling_logp_difference/mean",
        ),
        "debug/sampler_logp_diff_max": Metric(
            "Largest absolute difference of sampler_logp and logp before the first update.",
            "nats",
            PASSES,
            trl="sampling/sampling_logp_difference/max",
        ),
        "debug/sampler_kl": Metric(
            "Mean of sampler_logp - logp, before the first update.",
            "nats",
            PASSES,
        ),
        "debug/sampler_k3": Metric(
            "Mean of rho - 1 - log rho, with rho = exp(logp - sampler_logp).",
            "nats",
            PASSES,
            healthy=(0.0, 0.01),
        ),
        "debug/kept_tokens": Metric(
            "Mean number of tokens that top_k, top_p and min_p kept, with rollout.mask_replay.",
            "",
            PASSES,
        ),
        "debug/sampler_chi2": Metric("Mean of rho^2, minus 1.", "", PASSES),
        "debug/sampler_ppl_ratio": Metric(
            "Mean over completions of exp(mean_t (sampler_logp - logp)).",
            "",
            PASSES,
        ),
        "debug/rho_mean": Metric("Mean of rho, before the first update.", "", PASSES),
        "debug/rho_min": Metric("Smallest rho.", "", PASSES),
        "debug/rho_max": Metric("Largest rho.", "", PASSES),
    }
)


# Metrics of curriculum and replay.

DATA: Mapping[str, Metric] = MappingProxyType(
    {
        "data/seen_prompts": Metric(
            "Number of training prompts with results before this step. Only with a curriculum.",
            "prompts",
            ROLLOUTS,
        ),
        "data/pass_rate": Metric("Mean running pass rate of these prompts.", "share", ROLLOUTS),
        "data/drawn_pass_rate": Metric(
            "Mean running pass rate, before this step, of its prompts; 0.5 for a new prompt.",
            "share",
            ROLLOUTS,
        ),
        "data/dropped_prompts": Metric(
            "Prompts at or above curriculum.drop_above.", "prompts", ROLLOUTS
        ),
        "data/drawn_again": Metric(
            "Prompts of this step that are at or above curriculum.drop_above, because too few "
            "others are left.",
            "prompts",
            ROLLOUTS,
            healthy=(0.0, 0.0),
        ),
        "data/parts/*": Metric(
            "Share of a part of the mixed task in the draw of this step.", "share", ROLLOUTS
        ),
        "data/replayed_groups": Metric(
            "Groups of earlier steps that this step also trained on.", "groups", ROLLOUTS
        ),
        "data/replay_size": Metric("Groups that could be replayed.", "groups", ROLLOUTS),
        "data/replay_age": Metric(
            "Mean optimizer steps since the replayed groups were sampled.",
            "optimizer steps",
            ROLLOUTS,
        ),
    }
)
