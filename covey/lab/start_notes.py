"""Prints notes in the console when a run starts or resumes."""

from __future__ import annotations

from collections.abc import Collection

import torch

from covey.lab.plan.findings import findings
from covey.lab.plan.task_facts import facts_of
from covey.records.folder import edited_settings
from covey.records.trackers.console import ConsoleTracker, console_tracker
from covey.rollout.prompts import prompt_notes
from covey.screen import Screen
from covey.start import Opened


def console_with_notes(
    opened: Opened, *, quiet: bool = False, not_own: Collection[str] = ()
) -> ConsoleTracker:
    """Return a console tracker that has already printed notes about the run.

    `not_own` contains the settings that --smoke changed.
    """
    run, model = opened.run, opened.run.policy.model
    reporter = console_tracker(run.folder, Screen(soft_wrap=True, quiet=quiet))
    reporter.note(f"sampling: {run.engine.info.backend}")
    if model.flash:
        from covey.accel.attention_kernels import description

        shape = (model.model.config, model.device, model.head.linear.weight.dtype)
        reporter.note(f"training: {description(*shape, run.config.rollout.max_tokens)}")
    environment = run.folder.environment()
    changed = edited_settings(run.folder, environment)
    if changed is not None:
        reporter.note(changed)
    threads, now = environment.get("threads"), torch.get_num_threads()
    if threads is not None and threads != now:
        reporter.note(
            f"this run was started with {threads} threads and resumes with {now} threads: results "
            "may differ in the last bits"
        )
    if run.bad_rows:
        reporter.note(f"{len(run.bad_rows)} bad rows skipped; the first error: {run.bad_rows[0]}")
    reward, current = environment.get("reward"), run.scorer.identity
    if reward and reward != current:  # a resume that allows it
        reporter.note(
            f"the reward has changed since this run was started: from {reward} to {current}"
        )
    if run.solutions is not None:
        return reporter
    for note in prompt_notes(model, run.prompts):
        reporter.note(note)
    if opened.start.checkpoint is None and run.world.is_main:
        facts = facts_of(run.config, run.prompts, run.held_out, model.tokenizer.encode)
        for finding in findings(run.config, facts):
            # `covey plan` prints equivalent algorithms.
            if finding.kind != "same" and not finding.depends_on(not_own):
                reporter.note(finding.line())
    return reporter
