"""Writes the model card (README.md) of an exported model, without importing torch."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.escape import printable
from covey.records.folder import RunFolder
from covey.records.metric_registry import estimate_text
from covey.records.records import read_text
from covey.records.watch import Best, best_of

HUB_NAMES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Maps a model's short name in Covey to its name on the Hugging Face Hub."""
UNKNOWN = "unknown"
"""The text that the model card shows for a setting that the configuration lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported model: its source, its dtype, and whether an adapter was merged."""

    name: str
    source: str
    """The folder or the name from which the model was loaded."""
    step: int | None
    """The training step of the checkpoint; None if the model is not a checkpoint of a run."""
    dtype: str
    stop_ids: Sequence[int]
    merged: bool = False
    """Whether an adapter was merged into the weights."""


def model_card(exported: Exported, run: RunFolder | None) -> str:
    """Return a model's README.md as text, which describes the run that trained the model, if
    any."""
    merged = " Its adapter is merged into the weights." if exported.merged else ""
    if run is None:
        origin = f"Exported by Covey from {_code(exported.source)}, in {exported.dtype}.{merged}"
        parts = [
            _front_matter(exported.source),
            _title(exported),
            origin,
            _use(exported, {}),
        ]
        return printable(without_folders("\n\n".join(parts))) + "\n"
    settings = read_text(run.config_file).strip()
    config, environment = tomllib.loads(settings), run.environment()
    base = config.get("model", {}).get("path", exported.source)
    training, tags = _training(config, sft=run.is_sft)
    task = config.get("task", {})
    options = [f"- {_line(name)}: {_code(value)}" for name, value in task.items() if name != "name"]
    fence = "`" * max(3, 1 + _longest_ticks(settings))
    parts = [
        _front_matter(base, tags),
        _title(exported),
        f"{_code(base)} after {exported.step} {training}. The weights are {exported.dtype}."
        f"{merged}",
        _use(exported, config.get("model", {})),
        _results(run.evaluations(), exported.step, best_of(run)),
        f"## Data\n\nTask {_code(task.get('name', UNKNOWN))}\n\n"
        + "\n".join(options or ["- no options"]),
        _made_with(environment),
        f"## Configuration\n\n{fence}toml\n{settings}\n{fence}",
    ]
    return printable(without_folders("\n\n".join(parts))) + "\n"


def without_folders(text: str) -> str:
    """Return a text in which an absolute path is only its last part, because a card is published.

    >>> without_folders("`/home/me/bin/covey train --run runs/a --set model.path='~/models/b'`")
    "`covey train --run runs/a --set model.path='b'`"
    """
    return _FOLDERS.sub("", text)


_PART = r"[^/\s\"'`,\])]+/"
_FOLDERS = re.compile(rf"(?<![^\s\"'`=\[(,])(?:~/|/{_PART})(?:{_PART})*(?=[^/\s\"'`])")


def _line(value: object) -> str:
    return printable(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def _title(exported: Exported) -> str:
    return "# " + re.sub(r"([`\[\]<])", r"\\\1", _line(exported.name))


def _code(value: object) -> str:
    text = _line(value)
    ticks = "`" * (1 + _longest_ticks(text))
    return f"{ticks} {text} {ticks}" if "`" in text else f"`{text}`"


def _longest_ticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _training(config: Mapping[str, Any], *, sft: bool) -> tuple[str, list[str]]:
    named = (config.get(part, {}) for part in ("objective", "task", "reward"))
    algorithm, task, reward = (str(section.get("name", UNKNOWN)) for section in named)
    if sft:
        file = config.get("sft", {}).get("file")
        solutions = (
            f"the completions in {_code(file)}"
            if file
            else f"worked solutions of task {_code(task)}"
        )
        return f"steps of supervised fine-tuning with Covey, on {solutions}", ["sft"]
    steps = config.get("train", {}).get("steps", UNKNOWN)
    return (
        f"of {steps} steps of reinforcement learning with Covey: "
        f"algorithm {_code(algorithm)}, task {_code(task)}, reward {_code(reward)}",
        ["reinforcement-learning", *([algorithm] if re.fullmatch(r"\w+", algorithm) else [])],
    )


def _front_matter(base: str, tags: Sequence[str] = ()) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    hub = HUB_NAMES.get(base, base)
    # A name with one slash is a hub name, unless it is a local folder.
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", hub) and not Path(base).exists():
        lines.append(f"base_model: {hub}")
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in ("covey", *tags)), "---"])


def _use(exported: Exported, model: Mapping[str, Any]) -> str:
    form, prefill = model.get("template", "auto"), model.get("prefill", "")
    rendered = {
        "auto": "with the tokenizer's chat template, or joined by line ends if it has none",
        "chat": "with the tokenizer's chat template",
        "plain": "as plain text, with messages joined by line ends and no chat template",
    }.get(form, f"as the text {_code(repr(form))}, without the chat template")
    stops = ", ".join(str(stop) for stop in exported.stop_ids)
    lines = [
        f"Prompts were rendered {rendered}.",
        *(
            [f"Every completion began with {_code(repr(prefill))}; end prompts with it."]
            if prefill
            else []
        ),
        f"Tokens that end a completion: {stops}.",
    ]
    return "## Use\n\n" + " ".join(lines)


def _results(evaluations: Sequence[Mapping[str, Any]], step: int | None, best: Best | None) -> str:
    if not evaluations:
        return "## Results\n\nThe run was not evaluated."
    labelled = [("first", evaluations[0])]
    if best is not None:
        labelled += [("best", row) for row in evaluations if row["step"] == best.step]
    labelled += [("last", evaluations[-1])]
    labelled += [("exported", row) for row in evaluations if row["step"] == step]
    names = [n for n, v in evaluations[-1].items() if isinstance(v, dict) and "low" in v]
    table = ["| | step | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for label, row in labelled:
        cells = [estimate_text(name, row[name]) if name in row else "-" for name in names]
        table.append(f"| {label} | {row['step']} | " + " | ".join(cells) + " |")
    chosen = ""
    if best is not None:
        chosen = f" The best checkpoint is {best.line()}."
        if best.of_evaluations:
            chosen += " It was chosen on the same prompts, so its value is biased upwards."
    return (
        f"## Results\n\nOn {evaluations[-1]['prompts']} held-out prompts, with 95 % intervals."
        f"{chosen}\n\n" + "\n".join(table)
    )


def _made_with(environment: Mapping[str, Any]) -> str:
    packages = environment.get("packages", {})
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    commit = environment.get("git", {}).get("commit")
    lines = [
        f"- command: {_code(shlex.join(environment.get('command', [])))}",
        f"- versions: python {environment.get('python')}, {versions}",
        # The rest of the text names the kernel, which may name a provider or a customer.
        f"- machine: {str(environment.get('platform')).partition('-')[0]}, on "
        f"{environment.get('device')}",
        f"- seed: {environment.get('seed')}",
        *([f"- git commit of the working folder: {commit}"] if commit else []),
        *([f"- reward: {environment['reward']}"] if environment.get("reward") else []),
    ]
    return "## Made with\n\n" + "\n".join(map(_line, lines))
