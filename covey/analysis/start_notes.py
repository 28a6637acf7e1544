"""Prints notes in the console when a run starts or resumes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from covey.analysis.plan.findings import findings
from covey.analysis.plan.task_facts import facts_of
from covey.rollout.prompts import prompt_notes
from covey.run.folder import RunFolder
from covey.run.reward_changes import read_change
from covey.run.settings import edited_settings
from covey.run.trackers import Tracker
from covey.run.trackers.console import ConsoleTracker, console_tracker
from covey.screen import Screen
from covey.training.build import Components, Parts
from covey.training.run_start import OpenRun


def console_with_notes(
    run: OpenRun[Any], *, quiet: bool = False, not_own: Collection[str] = ()
) -> ConsoleTracker:
    """Return a console tracker that has already printed notes about the run.

    `not_own` contains the settings that --smoke changed.
    """
    reporter = console_tracker(run.folder, Screen(soft_wrap=True, quiet=quiet))
    tell_notes(reporter, run.folder, run.parts)
    if isinstance(run.parts, Parts):
        tell_start(reporter, run.parts, new=run.start.checkpoint is None, not_own=not_own)
    return reporter


def tell_notes(reporter: Tracker, folder: RunFolder, parts: Components) -> None:
    """Print the engine's backend, changes since the run started, and skipped data rows."""
    reporter.note(f"sampling: {parts.engine.info.backend}")
    model = parts.policy.model
    if model.flash:
        from covey.accel.attention_kernels import description

        shape = (model.model.config, model.device, model.head.linear.weight.dtype)
        reporter.note(f"training: {description(*shape, parts.config.rollout.max_tokens)}")
    environment = folder.environment()
    changed = edited_settings(folder, environment)
    if changed is not None:
        reporter.note(changed)
    threads, now = environment.get("threads"), torch.get_num_threads()
    if threads is not None and threads != now:
        reporter.note(
            f"this run was started with {threads} threads and resumes with {now} threads: results "
            "may differ in the last bits"
        )
    if parts.bad_rows:
        reporter.note(
            f"{len(parts.bad_rows)} bad rows skipped; the first error: {parts.bad_rows[0]}"
        )
    change = read_change(folder)
    if change is not None:
        why = "" if change.reason else "; say why in reward_change.reason, for `covey rewards log`"
        reporter.note(f"the reward differs from that of {change.previous_run}: {change.what}{why}")
    reward, current = environment.get("reward"), parts.scorer.identity
    if reward and reward != current:  # a resume that allows it
        reporter.note(
            f"the reward has changed since this run was started: from {reward} to {current}"
        )


def tell_start(reporter: Tracker, parts: Parts, *, new: bool, not_own: Collection[str]) -> None:
    """Print notes about the prompts and, for a new run, about useless or risky settings.

    Do not print notes about settings in `not_own`. Do not print notes about equivalent algorithms,
    because `covey plan` prints them.
    """
    for note in prompt_notes(parts.policy.model, parts.train_prompts):
        reporter.note(note)
    if not new or not parts.world.is_main:
        return
    facts = facts_of(
        parts.config,
        parts.train_prompts,
        parts.held_out_prompts,
        parts.policy.model.tokenizer.encode,
    )
    for finding in findings(parts.config, facts):
        if finding.kind != "same" and not finding.depends_on(not_own):
            reporter.note(finding.line())
