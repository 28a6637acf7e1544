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
    "supervised": ("warmup",),
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


# Settings, by fixed key. A key that is not here is called so in the package, or its section is below.
KEYS: Mapping[str, str] = {
    "rollout.prompts_per_step": "rollout.prompts",
    "rollout.group_size": "rollout.samples",
    "engine.max_concurrent": "rollout.slots",
    "train.micro_batch_tokens": "train.token_budget",
    "overlap.max_staleness": "select.max_age",
    "objective.clip_low": "objective.low",
    "objective.clip_high": "objective.high",
    "save.samples_every": "save.review_every",
    "save.samples_count": "save.review_answers",
}
SECTIONS: Mapping[str, str] = {"filter": "select", "sft": "warmup"}


def setting(key: str, value: Any) -> dict[str, Any]:
    """Return a setting of a fixed key as the package takes it."""
    if key == "train.stop_after":
        amount, unit = value
        return {"train.budget": unit, "train.amount": amount}
    section, _, rest = key.partition(".")
    return {KEYS.get(key, f"{SECTIONS.get(section, section)}.{rest}" if rest else key): value}


def settings_toml(settings: Mapping[str, Any]) -> str:
    """Write settings of fixed keys as a configuration file."""
    own = {k: v for key, value in settings.items() for k, v in setting(key, value).items()}
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in own.items())


# Metrics: present name -> fixed name, where they differ.
METRICS: Mapping[str, str] = {}
# Metrics that say when, how fast and by which source a step was done.
UNRECORDED_METRICS = ("time/", "reward_id")

# Fields of eval.jsonl, report.json and of what `--json` prints: present name -> fixed name.
FIELDS: Mapping[str, str] = {}


def fixed(name: str) -> str:
    """Return the fixed name of a metric or field."""
    return METRICS.get(name, FIELDS.get(name, name))


# Fields that hold times, or what the cases record themselves.
UNRECORDED_FIELDS = frozenset({"seconds", "weights"})
# Texts, by fixed name, are wording and not recorded, but for what a model wrote and which prompts it got right.
TEXT_FIELDS = frozenset({"text", "answer", "right"})
REPORT_SECTIONS = ("verdict", "runs", "curves", "agreement", "answers", "health")

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
