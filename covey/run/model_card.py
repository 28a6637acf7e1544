"""The model card: what an exported model is, how it came about and what it can do.

No torch here: all that a card says is in the run folder.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.escape import printable
from covey.run.folder import RunFolder

HUB_NAMES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""What the hub calls models that have a short name here."""

UNKNOWN = "unknown"
"""What a configuration that was edited no longer says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What is exported."""

    name: str
    source: str
    """The folder or the name that it was loaded from."""
    step: int | None
    """The training step, if it is a checkpoint of a run."""
    dtype: str
    stop_ids: Sequence[int]
    merged: bool = False
    """Whether an adapter was added into the weights."""


def model_card(exported: Exported, run: RunFolder | None) -> str:
    """Return README.md for a model, with all that its run knows, if it has one."""
    config = {} if run is None else tomllib.loads(run.config_file.read_text(encoding="utf-8"))
    environment = {} if run is None else run.environment()
    base = config.get("model", {}).get("path", exported.source)
    training = None if run is None else _training(config, environment.get("kind"))
    parts = [_front_matter(base, training), f"# {exported.name}"]
    parts.append(_origin(exported, base, training))
    parts.append(_use(exported, config.get("model", {})))
    if run is not None:
        parts.append(_results(run.evaluations(), exported.step))
        parts.append(_data(config))
        parts.append(_made_with(environment))
        settings = run.config_file.read_text(encoding="utf-8").strip()
        parts.append(f"## Configuration\n\n```toml\n{settings}\n```")
    return printable("\n\n".join(parts)) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """What a run did to a model, in words."""

    steps: str
    """What its steps were, after their number."""
    tags: Sequence[str]


def _training(config: Mapping[str, Any], kind: str | None) -> _Training:
    named = (config.get(part, {}) for part in ("objective", "task", "reward"))
    algorithm, task, reward = (str(section.get("name", UNKNOWN)) for section in named)
    if kind in ("sft", "warmup"):
        file = config.get(kind, {}).get("file")
        solutions = f"the answers in `{file}`" if file else f"worked solutions of task `{task}`"
        return _Training(
            steps=f"steps of supervised learning with Covey, from {solutions}", tags=["sft"]
        )
    steps = config.get("train", {}).get("steps", UNKNOWN)
    return _Training(
        steps=f"of {steps} steps of reinforcement learning with Covey: "
        f"algorithm `{algorithm}`, task `{task}`, reward `{reward}`",
        tags=["reinforcement-learning", *([algorithm] if re.fullmatch(r"\w+", algorithm) else [])],
    )


def _front_matter(base: str, training: _Training | None) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    hub = HUB_NAMES.get(base, base)
    # One slash: a hub's name, if it is not a folder's.
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", hub) and not Path(base).exists():
        lines.append(f"base_model: {hub}")
    tags = ["covey", *(training.tags if training is not None else [])]
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _origin(exported: Exported, base: str, training: _Training | None) -> str:
    merged = " Its adapter is part of the weights." if exported.merged else ""
    if training is None:
        return f"Exported by Covey from `{base}`, in {exported.dtype}.{merged}"
    return (
        f"`{base}` after {exported.step} {training.steps}. "
        f"The weights are {exported.dtype}.{merged}"
    )


def _use(exported: Exported, model: Mapping[str, Any]) -> str:
    form, prefill = model.get("template", "auto"), model.get("prefill", "")
    put = {
        "auto": "by the tokenizer's chat template, or joined by line ends if it has none",
        "chat": "by the tokenizer's chat template",
        "plain": "as they are, several messages joined by line ends, without the chat template",
    }.get(form, f"as the text {form!r}, without the chat template")
    stops = ", ".join(str(stop) for stop in exported.stop_ids)
    lines = [
        f"Questions were put {put}.",
        *([f"Every answer began with {prefill!r}; ask in the same way."] if prefill else []),
        f"Tokens that end an answer: {stops}.",
    ]
    return "## Use\n\n" + " ".join(lines)


def _results(evaluations: Sequence[Mapping[str, Any]], step: int | None) -> str:
    """Show the first, the best and the last evaluation, and that of the exported step."""
    if not evaluations:
        return "## Results\n\nThe run was not evaluated."
    best = max(evaluations, key=lambda row: row["greedy"]["value"])
    labelled = [("first", evaluations[0]), ("best", best), ("last", evaluations[-1])]
    labelled += [("exported", row) for row in evaluations if row["step"] == step]
    names = [n for n, v in evaluations[-1].items() if isinstance(v, dict) and "low" in v]
    table = ["| | step | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for label, row in labelled:
        cells = [_estimate(row.get(name)) for name in names]
        table.append(f"| {label} | {row['step']} | " + " | ".join(cells) + " |")
    return (
        f"## Results\n\nOn {evaluations[-1]['prompts']} held-out prompts, with 95 % intervals. The "
        "best was picked on these same prompts, which flatters it.\n\n" + "\n".join(table)
    )


def _estimate(estimate: Mapping[str, float] | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate['value']:.1%} [{estimate['low']:.1%}, {estimate['high']:.1%}]"


def _data(config: Mapping[str, Any]) -> str:
    task = config.get("task", {})
    name = task.get("name", UNKNOWN)
    options = {k: v for k, v in task.items() if k != "name"}
    lines = [f"- {option}: `{value}`" for option, value in options.items()]
    return f"## Data\n\nTask `{name}`\n\n" + "\n".join(lines or ["- no options"])


def _made_with(environment: Mapping[str, Any]) -> str:
    packages = environment.get("packages", {})
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    commit = environment.get("git", {}).get("commit")
    lines = [
        f"- command: `{shlex.join(environment.get('command', []))}`",
        f"- versions: python {environment.get('python')}, {versions}",
        f"- machine: {environment.get('platform')}, on {environment.get('device')}",
        f"- seed: {environment.get('seed')}",
        *([f"- git commit of the working folder: {commit}"] if commit else []),
        *([f"- reward: {environment['reward']}"] if environment.get("reward") else []),
    ]
    return "## Made with\n\n" + "\n".join(lines)
