"""The run folder: all files of a run, in formats that any program can read.

    config.toml             the resolved configuration
    environment.json        versions, machine, git commit, command, seed, config.toml at the start
    steps.jsonl             one line of metrics per step; docs/metrics.md defines them
    eval.jsonl              one line per evaluation
    evaluations/000050.jsonl   one line per held-out prompt of the evaluation after step 50
    rollouts/000012.jsonl   every completion of step 12, its text and reward first
    samples/000100.md       the completions of step 100 with the highest and lowest rewards
    checkpoints/000050/     a Hugging Face folder with optimizer state, written atomically
    checkpoints.jsonl       one line per checkpoint saved, whether or not it still exists
    failure.txt             the traceback of another process that ended the run
    changes.jsonl           settings that were changed when the run was resumed
    superseded/1/           records of later steps that a resume moved away (resume.py)

This module does not import torch, because the web page reads runs on machines without torch.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import DiskError, RunError
from covey.notices import notice
from covey.records import records
from covey.records.files import (
    append_line,
    check_free,
    finite,
    json_line,
    whole_folder,
    write_bytes,
    write_digests,
    write_text,
)
from covey.records.metric_registry import current_name
from covey.records.records import (
    ANY_OBJECT,
    Note,
    episode_row,
    read_lines,
    read_text,
    unsaid,
    usable_lines,
)
from covey.types import Group

CHANGES = "changes.jsonl"
"""Name of the file with one line for each resume that changed settings. Each line of changes.jsonl
contains the step, the old and new values of the changed settings, and the entries of
environment.json that depend on settings.
"""
FAILURE = "failure.txt"
"""Name of the file with the error that ended a run."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run on disk."""

    path: Path

    @staticmethod
    def create(path: Path, config_toml: str, environment: dict[str, Any]) -> RunFolder:
        """Create a run in a folder that does not exist or is empty."""
        check_free(path, f"choose another --run, or --resume {path}")
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            (path / "rollouts").mkdir(exist_ok=True)
        except OSError as error:
            raise DiskError(f"cannot create {path}: {error.strerror}") from None
        about = {**environment, "config": config_toml}
        write_text(path / "environment.json", json.dumps(about, indent=2) + "\n")
        write_text(path / "checkpoints.jsonl", "")
        write_text(path / "config.toml", config_toml)
        return RunFolder(path)

    @staticmethod
    def open(path: Path) -> RunFolder:
        if not (path / "config.toml").is_file():
            files = ("config.toml", "environment.json")
            whole = [p for p in path.parents if all((p / name).is_file() for name in files)]
            if whole and path.exists():
                raise RunError(f"{path} is part of a run; give the run folder: {whole[0]}")
            raise RunError(f"{path} is not a run folder: it has no config.toml")
        return RunFolder(path)

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    def environment(self, note: Note = notice) -> dict[str, Any]:
        """Return the content of environment.json; if it is damaged, return {} and write a note."""
        try:
            return records.read_object(self.path / "environment.json", records.ENVIRONMENT)
        except RunError as error:
            note(str(error))
            return {}

    def log_step(self, metrics: dict[str, Any]) -> None:
        """Append a step's metrics to steps.jsonl, with null for NaN and infinite values."""
        append_line(self.path / "steps.jsonl", finite(metrics))

    def log_evaluation(self, result: dict[str, Any]) -> None:
        append_line(self.path / "eval.jsonl", result)

    def write_table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows to a file such as rollouts/000012.jsonl.

        Values without a JSON type become strings.
        """
        (self.path / name).mkdir(exist_ok=True)
        lines = b"".join(json_line(row) for row in rows)
        write_bytes(self.path / name / f"{step:06d}.jsonl", lines)

    def items(self, step: int, note: Note = notice) -> list[dict[str, Any]]:
        """Return the valid lines of a step's evaluation file, one per held-out prompt."""
        return usable_lines(self.path / "evaluations" / f"{step:06d}.jsonl", records.ITEM, note)

    def steps(self, note: Note = notice) -> list[dict[str, Any]]:
        """Return the valid lines of steps.jsonl, with current names for renamed metrics."""
        path = self.path / "steps.jsonl"
        rows = records.by_step(path, usable_lines(path, records.STEP, note), note)
        return [{current_name(name): value for name, value in row.items()} for row in rows]

    def has_step(self, step: int) -> bool:
        return any(row["step"] == step for row in self.steps(unsaid))

    def evaluations(self, note: Note = notice) -> list[dict[str, Any]]:
        path = self.path / "eval.jsonl"
        return records.by_step(path, usable_lines(path, records.EVALUATION, note), note)

    @staticmethod
    def rollout_rows(
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float | None]],
        replayed: int = 0,
        used: Sequence[Sequence[bool]] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the rollouts of a step as rows, in which the most readable fields come first.

        `replayed` is the number of groups, at the end of `groups`, that were sampled in earlier
        steps. `used` says of each rollout whether the step trained on any of its tokens; None means
        that the step trained on every rollout with an advantage.
        """
        used = used or [[value is not None for value in values] for values in advantages]
        rows = []
        for number, (group, means, learned) in enumerate(
            zip(groups, advantages, used, strict=True)
        ):
            again = {"replayed": True} if number >= len(groups) - replayed else {}
            for rollout, advantage, trained in zip(group.rollouts, means, learned, strict=True):
                optional = {
                    "kept": rollout.segments[0].kept,  # token sets that top-k and top-p kept
                    "feedback": rollout.feedback,
                    "teacher_prompt": rollout.teacher_prompt,
                }
                row = {
                    "prompt": group.prompt.text,
                    "target": group.prompt.target,
                    "text": rollout.text,
                    "reward": rollout.reward,
                    "success": rollout.success,
                    "parts": dict(rollout.parts),
                    "advantage": advantage,
                    "finish": rollout.finish,
                    "prompt_id": rollout.prompt_id,
                    "sample": rollout.sample,
                    "prompt_tokens": rollout.prompt_tokens,
                    "tokens": rollout.tokens,
                    "trained": trained and (all(rollout.trained) or rollout.trained),
                    "sampler_logp": rollout.sampler_logp,
                    **{name: value for name, value in optional.items() if value},
                    "policy_version": rollout.policy_version,
                    "reward_id": rollout.reward_id,
                    # These fields allow a file to be scored again.
                    "task": group.prompt.task,
                    "info": dict(group.prompt.info),
                    **episode_row(rollout),
                    **again,
                }
                rows.append(row)
        return rows

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the rollouts of a step, or [] if no rollouts were saved.

        Raises RunError if a line is damaged.
        """
        return read_lines(self._rollouts_file(step), records.ROLLOUT)

    def usable_rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the readable rollouts of a step; raise RunError if no rollout is readable."""
        rows = usable_lines(self._rollouts_file(step), records.ROLLOUT, notice)
        return rows or self.require_rollouts(step)

    def require_rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the rollouts of a step.

        Raises RunError if a line is damaged, or if the step has no saved rollouts.
        """
        rows = self.rollouts(step)
        if rows:
            return rows
        if self.is_sft:
            raise RunError(f"the run {self.path} is an SFT run, which samples no completions")
        steps = [number for number, _ in self.numbered("rollouts", ".jsonl")]
        available = (
            f"it has completions of steps {steps[0]} to {steps[-1]}"
            if steps
            else "it has no completions, because save.rollouts = false or no step has ended"
        )
        raise RunError(f"the run {self.path} has no completions of step {step}; {available}")

    @property
    def is_sft(self) -> bool:
        return self.environment(unsaid).get("kind") == "sft"

    def check_kind(self, *, sft: bool) -> None:
        if self.is_sft != sft:
            kind, command = ("an SFT run", "sft") if self.is_sft else ("not an SFT run", "train")
            raise RunError(
                f"{self.path} is {kind}; resume it with: covey {command} --resume {self.path}"
            )

    def _rollouts_file(self, step: int) -> Path:
        return self.path / "rollouts" / f"{step:06d}.jsonl"

    def numbered(self, folder: str, suffix: str) -> list[tuple[int, Path]]:
        """Return the entries of a folder that are named after a step, sorted by step."""
        try:
            found = list((self.path / folder).iterdir())
        except OSError:  # the folder does not exist, or a file has its name
            return []
        ours = re.compile(rf"([0-9]{{6,}}){re.escape(suffix)}")
        matches = ((ours.fullmatch(path.name), path) for path in found)
        return sorted((int(match[1]), path) for match, path in matches if match)

    def write_samples(self, step: int, page: str) -> None:
        """Write a page of sample completions; `step` is the last step that the page covers."""
        (self.path / "samples").mkdir(exist_ok=True)
        write_text(self.path / "samples" / f"{step:06d}.md", page)

    def write_failure(self, details: str) -> None:
        """Write the details of the run's error to failure.txt; if `details` is empty, write no
        file."""
        if details:
            write_text(self.path / FAILURE, details)

    def clear_failure(self) -> None:
        """Remove the failure.txt of an earlier attempt, because the run continues."""
        (self.path / FAILURE).unlink(missing_ok=True)

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        """Yield a temporary folder for a new checkpoint.

        When the `with` block ends, the folder becomes the checkpoint of `step`.
        """
        with whole_folder(self.path / "checkpoints" / f"{step:06d}") as folder:
            yield folder
            write_digests(folder)
        # This line is written last, so a checkpoint that is listed but missing was removed.
        append_line(self.path / "checkpoints.jsonl", {"step": step})

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return the complete checkpoints, oldest first, without checking them for damage."""
        return self.numbered("checkpoints", "")

    def saved_steps(self) -> list[int] | None:
        """Return the steps of all saved checkpoints, including checkpoints that were removed later.

        Return None if checkpoints.jsonl is damaged or missing, as in runs of older versions of
        Covey.
        """
        problems: list[str] = []
        path = self.path / "checkpoints.jsonl"
        rows = usable_lines(path, records.SAVED, problems.append)
        for problem in problems:
            notice(problem)
        return None if problems or not path.exists() else [row["step"] for row in rows]

    def prune_checkpoints(self, keep: int, best: int | None = None) -> None:
        """Remove all checkpoints except the `keep` newest and the checkpoint of the best step."""
        for step, folder in self.checkpoints()[:-keep]:
            if step != best:
                shutil.rmtree(folder)

    def in_use(self) -> bool:
        if not (self.path / ".lock").exists():
            return False
        try:
            with self.locked():
                return False
        except RunError:
            return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run until the `with` block or the process ends, even if the process crashes."""
        path = self.path / ".lock"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RunError(
                f"{path} cannot be locked: {error.strerror}; if no other process uses the run, "
                "delete this file"
            ) from None
        with os.fdopen(handle, "rb", closefd=True) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunError(f"the run {self.path} is in use by another process") from None
            yield


def list_runs(parent: Path) -> list[RunFolder]:
    """Return the runs in a folder, sorted by name; run-2 comes before run-10."""

    def natural(path: Path) -> list[tuple[bool, int, str]]:
        parts = re.split(r"([0-9]+)", path.name)
        return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]

    found = (path.parent for path in parent.glob("*/config.toml") if path.is_file())
    return [RunFolder(path) for path in sorted(found, key=natural)]


def settings_of(run: RunFolder) -> dict[str, Any]:
    """Return the configuration of a run as a dict, or {} if config.toml cannot be read.

    A section that is not a table is left out.
    """
    try:
        settings = tomllib.loads(records.read_text(run.config_file))
    except (RunError, ValueError, RecursionError):
        return {}
    outside = ("seed", "trackers")  # settings outside any section
    return {k: v for k, v in settings.items() if isinstance(v, dict) or k in outside}


def limit_of(settings: Mapping[str, Any]) -> tuple[str, int]:
    """Return the unit of the limit that ends a run ("step", "tokens" or "updates"), and the
    limit."""
    train = settings.get("train", {})
    stop = train.get("stop_after")
    limits = {"step": train.get("steps"), **(stop if isinstance(stop, dict) else {})}
    given = {name: value for name, value in limits.items() if isinstance(value, int) and value}
    name = next((name for name in ("tokens", "updates") if name in given), "step")
    return name, given.get(name, 0)


# The folder of a new run. A run that failed before its first step is renamed, so that a new run
# can use its folder.


def check_new_run(path: Path, instead: str = "") -> None:
    """Raise RunError if the folder for a new run already contains files.

    A folder is accepted if its run failed before the first step. `instead` is advice for the user,
    which is appended to the error message.
    """
    if _failed_early(path):
        return
    instead = instead or f"choose another --run, or --resume {path}"
    if _has_no_step(path):
        instead += "; the run there has finished no step: delete the folder if the run has ended"
    check_free(path, instead)


def set_aside_failed(path: Path) -> str:
    """Rename the folder of a run that failed before its first step; return a note for the user."""
    if not _failed_early(path):
        return ""
    aside = path.rename(next_run_path(path.parent, f"{path.name}-failed"))
    return f"the run in {path} had failed before its first step; its files are now in {aside}"


def _failed_early(path: Path) -> bool:
    run = RunFolder(path)
    failed = _has_no_step(path) and (path / FAILURE).is_file()
    return failed and not any((path / "checkpoints").glob("*")) and not run.in_use()


def _has_no_step(path: Path) -> bool:
    return (path / "config.toml").is_file() and not RunFolder(path).steps(unsaid)


def next_run_path(parent: Path, label: str) -> Path:
    """Return the first of `label-1`, `label-2`, ... that does not exist."""
    numbered = (parent / f"{label}-{number}" for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())


# Compares the settings of two runs, and finds settings of a run that were edited after it
# started.


MOST_NAMED = 8
"""Maximum number of edited settings that a message lists by name."""


def edited_settings(run: RunFolder, environment: Mapping[str, Any]) -> str | None:
    """Return a message about settings edited since the run started; None if none were edited.

    Settings that the user changed when resuming the run do not count as edited. Return None for
    runs of older Covey versions, which did not record their settings at the start.
    """
    if environment.get("config") is None:
        return None
    try:
        then = tomllib.loads(environment["config"])
        now = tomllib.loads(read_text(run.config_file))
        resumes = usable_lines(run.path / CHANGES, ANY_OBJECT, notice)
    except (RunError, ValueError, RecursionError):
        return None  # loading the configuration reports the error
    known = {key for resume in resumes for key in resume.get("settings", ())}
    changed = [
        f"{key} was {setting_text(old)} and is {setting_text(new)}"
        for key, (old, new) in changed_settings(then, now).items()
        if key not in known
    ]
    if not changed:
        return None
    more = f", and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
    named = ", ".join(changed[:MOST_NAMED])
    return f"{run.config_file} was edited since the run was started: {named}{more}"


def reward_of_run(run: RunFolder, note: Note = notice) -> str:
    """Return the identity of a run's reward, as of its start or of the last allowed change."""
    changes = usable_lines(run.path / CHANGES, ANY_OBJECT, note)
    changed = [change["reward"][1] for change in changes if change.get("reward")]
    return str(changed[-1] if changed else run.environment(note).get("reward") or "")


def flat_settings(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name of every setting, such as `train.steps`, and its value."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changed_settings(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the old and new value of each changed setting, with None for a missing value.

    >>> changed_settings({"train": {"steps": 5, "epochs": 1}}, {"train": {"steps": 7, "epochs": 1}})
    {'train.steps': (5, 7)}
    """
    old, new = dict(flat_settings(before)), dict(flat_settings(after))
    return {
        key: (old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def setting_text(value: Any) -> str:
    return "not set" if value is None else repr(value)
