"""The log of reward changes between runs: each change, its reason and its effect.

When a run starts, Covey compares its reward with the reward of the previous run of the same task in
the same folder. If the rewards differ, reward_change.json records the change, with the reason and
the expected effect that the configuration states. Covey computes the observed effect later, from
the evaluations of the two runs. This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from covey.errors import RunError
from covey.run.estimate_text import change_text, value_text
from covey.run.files import write_text
from covey.run.folder import RunFolder, list_runs, settings_of
from covey.run.records import read_text, unsaid
from covey.run.settings import changed_settings, setting_text

FILE = "reward_change.json"
MOST_PARTS = 6
"""A report on the observed effect of a reward change lists at most this many reward parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardChange:
    """A change of the reward between the previous run of the same task and this run."""

    previous_run: str
    """The folder name of the previous run, in the same parent folder as this run."""
    before: str
    """Identifier of the previous run's reward: name, version, and a hash of its options and source
    code."""
    after: str
    settings: Mapping[str, tuple[str, str]]
    """Maps each changed setting of the section [reward] to its old and new value. This mapping is
    empty if only the source code of the reward changed."""
    reason: str = ""
    expected_effect: str = ""

    @property
    def what(self) -> str:
        """A short text that says what changed in the reward."""
        if self.settings:
            return ", ".join(f"{name} {a} -> {b}" for name, (a, b) in self.settings.items())
        versions = [identity.partition("#")[0] for identity in (self.before, self.after)]
        return "the source of the reward" if versions[0] == versions[1] else " -> ".join(versions)


def record_change(run: RunFolder, reason: str, expected_effect: str) -> RewardChange | None:
    """Compare the rewards of a new run and the previous run; record and return any change."""
    mine = run.environment(unsaid)
    previous = _previous(run, settings_of(run))
    if previous is None or not mine.get("reward"):
        return None
    before = previous.environment(unsaid)["reward"]
    if before == mine["reward"]:
        return None
    rewards = [settings_of(each).get("reward", {}) for each in (previous, run)]
    change = RewardChange(
        previous_run=previous.path.name,
        before=before,
        after=mine["reward"],
        settings={
            name: (setting_text(old), setting_text(new))
            for name, (old, new) in changed_settings(*rewards).items()
        },
        reason=reason,
        expected_effect=expected_effect,
    )
    write_text(run.path / FILE, json.dumps(asdict(change), indent=2) + "\n")
    return change


def read_change(run: RunFolder) -> RewardChange | None:
    """Read a run's reward_change.json; return None if the file is missing or invalid."""
    try:
        found = json.loads(read_text(run.path / FILE))
        settings = {str(k): (str(a), str(b)) for k, (a, b) in found["settings"].items()}
        texts = {f.name: str(found[f.name]) for f in fields(RewardChange) if f.name != "settings"}
        return RewardChange(**texts, settings=settings)
    except (RunError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _previous(run: RunFolder, settings: Mapping[str, Any]) -> RunFolder | None:
    """Return the newest other run of the same task in this run's parent folder, or None."""
    here = run.path.resolve()
    others = [each for each in list_runs(run.path.parent) if each.path.resolve() != here]
    started = {each.path: each.environment(unsaid) for each in others}
    known = [each for each in others if started[each.path].get("reward") and not each.is_sft]
    newest = sorted(known, key=lambda each: str(started[each.path].get("started", "")))
    task = settings.get("task", {}).get("name")
    tasks = ((each, settings_of(each).get("task", {}).get("name")) for each in newest[::-1])
    return next((each for each, name in tasks if name == task), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A change of the reward, with its observed effect."""

    run: str
    change: RewardChange
    observed_effect: str

    def lines(self) -> list[str]:
        """Return lines of text about the reward change, its reason and its effects."""
        return [
            f"reward changed since {self.change.previous_run}: {self.change.what}",
            f"identity: {self.change.before} -> {self.change.after}",
            f"reason: {self.change.reason or 'not given'}",
            f"expected effect: {self.change.expected_effect or 'not given'}",
            f"observed effect: {self.observed_effect}",
        ]

    def row(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return {
            "run": self.run,
            **asdict(self.change),
            "change": self.change.what,
            "observed_effect": self.observed_effect,
        }


def logged_change(run: RunFolder) -> Logged | None:
    """Return a run's reward change with its observed effect; None if the reward did not change."""
    change = read_change(run)
    if change is None:
        return None
    effect = observed_effect(RunFolder(run.path.parent / Path(change.previous_run).name), run)
    return Logged(run=run.path.name, change=change, observed_effect=effect)


def reward_log(parent: Path) -> list[Logged]:
    """Return the reward changes of all runs in a folder, sorted by run name."""
    return [found for run in list_runs(parent) if (found := logged_change(run)) is not None]


def observed_effect(before: RunFolder, after: RunFolder) -> str:
    """Compare the metrics that the last evaluations of two runs have in common.

    Accuracies whose confidence intervals overlap differ only by noise. Accuracies are comparable
    only if both runs were evaluated with the same reward, which the setting `evaluate.reward`
    ensures.
    """
    old, new = (run.evaluations(unsaid)[-1:] for run in (before, after))
    if not old or not new:
        return "not measured: " + " and ".join(
            f"{run.path.name} has no evaluation"
            for run, found in ((before, old), (after, new))
            if not found
        )
    a, b = old[0]["greedy"], new[0]["greedy"]
    apart = b["low"] > a["high"] or b["high"] < a["low"]
    mine, theirs = old[0].get("parts", {}), new[0].get("parts", {})
    shared = [name for name in mine if name in theirs][:MOST_PARTS]
    shown = [
        _change("greedy", a["value"], b["value"], "" if apart else ", within noise"),
        *(_change(f"parts/{name}", mine[name], theirs[name]) for name in shared),
    ]
    rewards = [run.environment(unsaid).get("evaluation_reward") for run in (before, after)]
    caution = "" if rewards[0] == rewards[1] else "; each run was evaluated with its own reward"
    return ", ".join(shown) + caution


def _change(name: str, old: float, new: float, remark: str = "") -> str:
    change = f"{change_text(name, new - old)}{remark}"
    return f"{name} {value_text(name, old)} -> {value_text(name, new)} ({change})"
