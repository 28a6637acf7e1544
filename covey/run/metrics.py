"""Registry of all metrics: name, definition, unit, source, healthy range and aliases.

Health checks, the web page and tests use this registry. The page docs/metrics.md is generated from
this registry. Metrics that open-instruct also has are named as in open-instruct. Means over tokens
include only trained tokens. A mean over tokens is the sum over all trained tokens of a training
step, divided by the number of these tokens. A mean over tokens is never a mean over the means of
micro-batches. A metric name with `*` stands for several metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from covey.run.metric import MACHINE, ROLLOUTS, RUN, Metric
from covey.run.training_metrics import DATA, TRAINING

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "step": Metric("Number of the step, from 1.", "", RUN),
        "episode": Metric("Completions sampled so far in the run.", "completions", RUN),
        "tokens": Metric("Tokens of these completions.", "tokens", RUN, trl="num_tokens"),
        "updates": Metric("Optimizer steps taken so far in the run.", "optimizer steps", RUN),
        "epoch": Metric(
            "Prompts sampled so far, over the number of training prompts.", "epochs", RUN
        ),
        "reward_id": Metric("Name, version and source hash of the reward.", "", RUN),
        "objective/scores": Metric(
            "Mean reward of the scored completions.",
            "reward",
            ROLLOUTS,
            open_instruct="objective/scores_mean",
            trl="reward",
        ),
        "objective/reward_std": Metric(
            "Standard deviation (ddof 0) of these rewards.",
            "reward",
            ROLLOUTS,
        ),
        "objective/group_std": Metric(
            "Mean over groups of the standard deviation (ddof 1) of their rewards.",
            "reward",
            ROLLOUTS,
            trl="reward_std",
        ),
        "objective/success": Metric(
            "Share of scored completions that are correct.",
            "share",
            ROLLOUTS,
            open_instruct="objective/verifiable_correct_rate",
        ),
        "objective/parts/*": Metric(
            "Mean of one unweighted part of the reward, over the completions that have it.",
            "reward",
            ROLLOUTS,
            trl="rewards/*/mean",
        ),
        "objective/unscored": Metric(
            "Completions whose scoring failed. No other statistic includes them.",
            "completions",
            ROLLOUTS,
        ),
        "rollout/zero_variance_groups": Metric(
            "Share of groups whose rewards are all equal.",
            "share",
            ROLLOUTS,
            healthy=(0.0, 0.9),
            trl="frac_reward_zero_std",
        ),
        "rollout/trained_groups": Metric(
            "Groups of this step that were trained on.", "groups", ROLLOUTS
        ),
        "rollout/rounds": Metric(
            "Sampling rounds. Only dynamic sampling needs more than one.",
            "rounds",
            ROLLOUTS,
        ),
        "rollout/dropped_unscored": Metric(
            "Groups dropped with fewer than two scored completions.",
            "groups",
            ROLLOUTS,
        ),
        "rollout/dropped_stale": Metric(
            "Groups dropped as too old, by overlap.max_staleness.",
            "groups",
            ROLLOUTS,
        ),
        "rollout/dropped_uniform": Metric(
            "Groups dropped by dynamic sampling (all correct or all wrong) or by drop_flat "
            "(rewards all equal).",
            "groups",
            ROLLOUTS,
        ),
        "rollout/dropped_surplus": Metric(
            "Groups dropped because the step was full.",
            "groups",
            ROLLOUTS,
        ),
        "rollout/lengths": Metric(
            "Mean tokens per completion, including the end token.",
            "tokens",
            ROLLOUTS,
            open_instruct="val/sequence_lengths",
            trl="completions/mean_length",
        ),
        "rollout/lengths_min": Metric(
            "Tokens of the shortest completion.",
            "tokens",
            ROLLOUTS,
            trl="completions/min_length",
        ),
        "rollout/lengths_max": Metric(
            "Tokens of the longest completion.",
            "tokens",
            ROLLOUTS,
            trl="completions/max_length",
        ),
        "rollout/lengths_solved": Metric(
            "Mean tokens of the correct completions. Only if there are any.",
            "tokens",
            ROLLOUTS,
        ),
        "rollout/lengths_unsolved": Metric(
            "Mean tokens of the wrong completions. Only if there are any.",
            "tokens",
            ROLLOUTS,
        ),
        "rollout/stop_rate": Metric(
            "Share of completions that ended before the token limit.",
            "share",
            ROLLOUTS,
        ),
        "rollout/turns": Metric(
            "Mean number of the policy's turns in an episode. Only with an environment, as are the "
            "next five metrics.",
            "turns",
        ),
        "rollout/tool_calls": Metric("Mean number of tool calls in an episode.", "calls"),
        "rollout/unreadable_calls": Metric(
            "Number of malformed calls; the policy gets an error message for each.", "calls"
        ),
        "rollout/segments": Metric(
            "Mean number of segments of a rollout; more than 1 if the chat template rewrites "
            "earlier turns.",
            "segments",
        ),
        "rollout/limit_rate": Metric(
            "Share of episodes that ended at a limit of turns, calls or tokens.", "share"
        ),
        "rollout/environment_errors": Metric(
            "Episodes that ended because the environment failed. They have no reward.",
            "episodes",
            healthy=(0, 0),
        ),
        "val/stop_token_rate": Metric(
            "Share of completions that contain a stop token.",
            "share",
            ROLLOUTS,
        ),
        "val/num_stop_token_ids": Metric("Stop tokens in all completions.", "tokens", ROLLOUTS),
        "val/format_scores": Metric(
            "Mean of the reward's part `format`. Only if the reward has this part.",
            "reward",
            ROLLOUTS,
        ),
        "other/real_batch_size_ratio": Metric(
            "Share of completions in groups whose rewards differ.",
            "share",
            ROLLOUTS,
            healthy=(0.1, 1.0),
        ),
        "rollout/repetition": Metric(
            "Share of 4-grams of tokens that occur earlier in the same completion, over"
            " up to 128 completions.",
            "share",
            ROLLOUTS,
            healthy=(0.0, 0.5),
        ),
        "rollout/distinct_answers": Metric(
            "Number of different final answers among up to 128 completions.",
            "answers",
            ROLLOUTS,
        ),
        "rollout/effective_answers": Metric(
            "Effective number of final answers: exp of the entropy of their frequencies.",
            "answers",
            ROLLOUTS,
        ),
        "rollout/effective_targets": Metric(
            "Effective number of targets of the step's prompts. Only if they are short.",
            "answers",
            ROLLOUTS,
        ),
        "rollout/top_answer_share": Metric(
            "Share of the most frequent of these answers, whatever the prompt.",
            "share",
            ROLLOUTS,
            healthy=(0.0, 0.9),
        ),
        "rollout/best_constant": Metric(
            "Share of prompts whose target is the most frequent one: the accuracy of "
            "the best constant answer.",
            "share",
            ROLLOUTS,
        ),
        "overlap/staleness": Metric(
            "Mean over sampled tokens of the optimizer steps between the weights that sampled and "
            "those that the step starts from. Only with overlap.staleness.",
            "optimizer steps",
        ),
        "overlap/staleness_max": Metric(
            "Maximum of these optimizer steps over sampled tokens.", "optimizer steps"
        ),
        "overlap/version_min": Metric(
            "Optimizer steps of the oldest weights that sampled for the step.", "optimizer steps"
        ),
        "overlap/version_max": Metric(
            "Optimizer steps of the newest weights that sampled for the step.", "optimizer steps"
        ),
        "engine/preemptions": Metric(
            "Completions that the native engine paused since the last step because the KV cache "
            "was full, and continued later. Only if there were any; a larger "
            "engine.cache_gigabytes avoids them.",
            "completions",
            MACHINE,
        ),
        "engine/restarts": Metric(
            "Engine processes that died and were started again since the last step. Only with an "
            "engine in other processes.",
            "processes",
            MACHINE,
            healthy=(0, 0),
        ),
        "scoring/restarts": Metric(
            "Scoring processes that were killed and replaced since the last step. Only if there "
            "were any.",
            "processes",
            MACHINE,
            healthy=(0, 0),
        ),
        "time/rollout": Metric("Seconds spent sampling.", "seconds", MACHINE),
        "time/score": Metric("Seconds spent scoring.", "seconds", MACHINE),
        "time/update": Metric(
            "Seconds spent on log-probabilities, gradients and optimizer steps.",
            "seconds",
            MACHINE,
            open_instruct="time/training",
        ),
        "time/wait_rollouts": Metric(
            "Seconds that training waited for rollouts. Only with overlap.mode = 'copy'.",
            "seconds",
            MACHINE,
        ),
        "time/wait_training": Metric(
            "Seconds that generation waited for training before it sampled for this step. Only "
            "with overlap.mode = 'copy'.",
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
            "6 x weights x tokens (prompts and completions) of the optimizer steps, "
            "over time/update and the peak bfloat16 rate of all GPUs that train. Only on GPUs "
            "whose rate is known.",
            "share",
            MACHINE,
        ),
        "memory/peak": Metric(
            "Peak GPU memory allocated so far by this process. Only on a GPU.",
            "GiB",
            MACHINE,
        ),
        "time/tokens_per_second": Metric(
            "Sampled tokens of the step per second; in SFT, tokens of its solutions.",
            "tokens/s",
            MACHINE,
        ),
        **DATA,
        **TRAINING,
    }
)


def metric(name: str) -> Metric | None:
    """Return the registry entry of a metric, or None if the metric is unknown."""
    if name in METRICS:
        return METRICS[name]
    return next((entry for key, entry in METRICS.items() if fnmatchcase(name, key)), None)


def meaning(name: str) -> str | None:
    """Return the definition of a metric, or None if the metric is unknown."""
    entry = metric(name)
    return None if entry is None else entry.definition


# Other names of metrics: in open-instruct and in earlier versions of Covey.

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
"""Maps the prefix of a metric name in Covey 0.1 to the current prefix."""
OPEN_INSTRUCT: Mapping[str, str] = MappingProxyType(
    {entry.open_instruct: name for name, entry in METRICS.items() if entry.open_instruct}
)
"""Maps the name of a metric in open-instruct to its name in Covey, if the names differ."""


def current_name(name: str) -> str:
    """Return the current name of a metric, given its name in open-instruct or in Covey 0.1.

    >>> current_name("val/ratio_max"), current_name("objective/entropy")
    ('policy/ratio_max', 'policy/entropy_avg')
    """
    if name in OPEN_INSTRUCT:
        return OPEN_INSTRUCT[name]
    for old, new in RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def with_open_instruct_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step under Covey's names and also under open-instruct's names.

    >>> with_open_instruct_names({"policy/ratio": 1.0})
    {'policy/ratio': 1.0, 'val/ratio': 1.0}
    """
    return {**row, **{old: row[name] for old, name in OPEN_INSTRUCT.items() if name in row}}
