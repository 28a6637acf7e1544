"""Every name of the package that the recorded numbers depend on: a rename is made here and nowhere else.

The cases and the fixture use fixed names. Each table below says what the package calls a thing at present.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Commands, by fixed name: how the command line is called from Python and as a process.
COMMANDS: Mapping[str, Sequence[str]] = {
    "train": ("train",),
    "supervised": ("sft",),
    "evaluate": ("eval",),
    "compare": ("compare",),
    "explain": ("explain",),
    "serve": ("reference", "serve"),
}

# The exit code of a run that Ctrl-C has stopped.
INTERRUPTED = 130


def run_command(name: str, *arguments: str) -> int:
    """Run a command in this process and return its exit code."""
    from covey.cli.main import run

    return run([*COMMANDS[name], *arguments])


def process_of(name: str, *arguments: str) -> list[str]:
    """Return the command line of a process of its own."""
    return [sys.executable, "-m", "covey", *COMMANDS[name], *arguments]


# Settings, by fixed key, where the package has another name.
KEYS: Mapping[str, str] = {"filter.dynamic": "filter.dynamic_sampling"}


def setting(key: str, value: Any) -> dict[str, Any]:
    """Return a setting of a fixed key as the package takes it."""
    if key == "train.stop_after":
        amount, unit = value
        return {f"train.stop_after.{unit}": amount}
    return {KEYS.get(key, key): value}


def settings_toml(settings: Mapping[str, Any]) -> str:
    """Write settings of fixed keys as a configuration file."""
    own = {k: v for key, value in settings.items() for k, v in setting(key, value).items()}
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in own.items())


# Metrics: present name -> fixed name, where they differ.
METRICS: Mapping[str, str] = {
    "objective/verifiable_correct_rate": "objective/success",
    "val/ratio_overflow": "policy/ratio_overflow",
    "sft/epoch": "warmup/epoch",
    "sft/examples": "warmup/solutions",
    "sft/left_out": "warmup/left_out",
    "sft/tokens": "warmup/tokens",
    "reward/advantages_mean": "val/advantages_mean",
    "reward/advantages_min": "val/advantages_min",
    "reward/advantages_max": "val/advantages_max",
    "rollout/zero_variance_groups": "val/zero_variance_groups",
    "rollout/trained_groups": "val/learned_groups",
    "rollout/rounds": "val/rounds",
    "rollout/dropped_unscored": "val/dropped_unscored",
    "rollout/dropped_stale": "val/dropped_stale",
    "rollout/dropped_uniform": "val/dropped_uniform",
    "rollout/dropped_surplus": "val/dropped_surplus",
    "policy/off_policy_dropped": "val/off_policy_dropped",
    "policy/correction_mean": "val/correction_mean",
    "policy/correction_dropped": "val/correction_dropped",
    "policy/correction_ess": "val/correction_ess",
    "rollout/stop_rate": "val/stop_rate",
}
# Metrics that say when, how fast and by which source a step was done.
UNRECORDED_METRICS = ("time/", "reward_id")

# Fields of eval.jsonl, report.json and of what `--json` prints: present name -> fixed name.
FIELDS: Mapping[str, str] = {
    "conclusion": "verdict",
    "completions": "answers",
    "examples": "problems",
    "num_prompts": "problems",
    "correct": "right",
    "evaluations": "points",
    "time_to_accuracy": "reach",
    "difference_new_prompts": "other_problems",
    "completion length": "answer length",
    "rollouts": "answers",
    "replayed_steps": "learned_again",
    "steps_behind": "behind",
    "zero_variance": "flat",
    "zero_gradient": "silent",
    "filtered_out": "left_out",
    "share_raised": "raised",
    "half_gradient_from": "half_from",
    "run_algorithm": "own",
}


def fixed(name: str) -> str:
    """Return the fixed name of a metric or field."""
    return METRICS.get(name, FIELDS.get(name, name))


# Fields of a line of `covey eval --out`: present name -> fixed name.
ITEM_FIELDS: Mapping[str, str] = {"target": "expected", "completion": "answer", "success": "right"}


# Fields that hold times, or what the cases record themselves.
UNRECORDED_FIELDS = frozenset({"seconds", "weights"})
# Texts, by fixed name, are wording and not recorded, but for what a model wrote and which prompts it got right.
TEXT_FIELDS = frozenset({"text", "answer", "right"})
REPORT_SECTIONS = ("conclusion", "runs", "curves", "agreement", "completions", "health")

# The run folder.
STEPS_FILE = "steps.jsonl"
EVALUATIONS_FILE = "eval.jsonl"
ROLLOUTS_FILE = "rollouts/{step:06d}.jsonl"
CHECKPOINT_FOLDER = "checkpoints/{step:06d}"
WEIGHTS_FILES = ("model.safetensors", "adapter_model.safetensors")
# Fields of a line of rollouts.
TOKENS, SAMPLER_LOGP, REWARD, ADVANTAGE = "tokens", "sampler_logp", "reward", "advantage"

# The folder of a comparison.
REPORT_FILE = "report.json"
ARM_FOLDER = "runs/{arm}/seed-{seed}"

# What the server of a reference prints when it is ready ends in its address.
SERVING = r"(http://\S+)"
