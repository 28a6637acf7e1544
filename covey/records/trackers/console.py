"""The console tracker: a progress bar in a terminal, plain lines in logs and pipes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from covey.escape import printable
from covey.records.folder import RunFolder
from covey.records.metric_registry import change_text, estimate_text, is_reward
from covey.records.trackers.protocol import Tracker
from covey.records.watch import best_of

if TYPE_CHECKING:
    from covey.evaluation.evaluate import Evaluation

NARROW = 90
"""Minimum terminal width, in columns, for showing all main metrics of a step."""
BAR = 50
"""Minimum terminal width, in columns, for showing a progress bar beside the metrics."""
PLAIN_LOG_SECONDS = 5.0
"""Minimum seconds between two printed lines. The first and the last step are always printed."""


def duration(seconds: float) -> str:
    """Return a time in hours, minutes and seconds.

    >>> duration(61.7), duration(3 * 3600 + 5)
    ('1:01', '3:00:05')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def summary(metrics: Mapping[str, Any], *, short: bool = False) -> str:
    """Return the main metrics of a step in one line. A `short` line fits a narrow terminal."""
    if short and "objective/scores" in metrics:
        success = metrics["objective/verifiable_correct_rate"]
        return f"reward {metrics['objective/scores']:.3f}  {success:.0%}"
    if "loss/cross_entropy" in metrics:
        return (
            f"loss {metrics['loss/cross_entropy']:.4f}  "
            f"epoch {metrics['sft/epoch']:.2f}  "
            f"grad {metrics['optim/grad_norm']:.2f}  "
            f"{metrics['time/tokens_per_second']:,.0f} tok/s"
        )
    if "sft/left_out" in metrics:
        return f"nothing to train on: {metrics['sft/left_out']} solutions are too long"
    # A step without groups to train on has no KL.
    names = {"objective/kl_avg": "kl", "policy/approxkl_avg": "kl old"}
    kl = next((f"{label} {metrics[m]:.4f}" for m, label in names.items() if m in metrics), "no kl")
    penalty = metrics.get("objective/parts/length_penalty")
    of = "" if penalty is None else f" (length penalty {penalty:.3f})"
    return (
        f"reward {metrics['objective/scores']:.3f}{of}  "
        f"success {metrics['objective/verifiable_correct_rate']:5.1%}  "
        f"length {metrics['val/sequence_lengths']:.0f}  "
        f"{kl}  "
        f"{metrics['time/tokens_per_second']:,.0f} tok/s"
    )


def evaluation_line(evaluation: Evaluation) -> str:
    """Return an evaluation as one line of text; include the mean reward if it differs from the
    accuracy."""
    numbers = "  ".join(
        f"{name} {estimate_text(name, estimate.row())}"
        for name, estimate in evaluation.estimates.items()
        if not is_reward(name) or (name == "reward" and evaluation.graded)
    )
    lost = f", {evaluation.unscored} completions not scored" if evaluation.unscored else ""
    constant, known = evaluation.best_constant, evaluation.baselines
    answer = f" ({known.constant.answer!r})" if known and known.constant else ""
    best = "" if constant is None else f", best constant answer{answer} {constant:.1%}"
    return (
        f"{numbers} on {evaluation.prompts} held-out prompts, {evaluation.distinct_answers} "
        f"distinct answers{best}{lost}"
    )


class ConsoleTracker(Tracker):
    """Prints plain lines of text, for output to log files and pipes."""

    def __init__(self, run: RunFolder, console: Console) -> None:
        self.run = run
        self.console = console
        self.steps = 0
        self.done = 0
        self.began = time.monotonic()
        self.printed = 0.0

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        self.steps, self.done, self.began = steps, done, time.monotonic()
        verb = f"resuming after step {done}" if done else "training"
        self.note(f"{verb}: {steps} steps of {rollouts} rollouts, in {self.run.path}")

    def step(self, metrics: Mapping[str, Any]) -> None:
        step = metrics["step"]
        if time.monotonic() - self.printed < PLAIN_LOG_SECONDS and step not in (1, self.steps):
            return
        self.printed = time.monotonic()
        left = duration(self.seconds_left(step))
        self.note(f"step {step}/{self.steps}  {summary(metrics)}  {left} left")

    def seconds_left(self, step: int) -> float:
        """Estimate the remaining seconds of the run from the mean time per step so far."""
        mean = (time.monotonic() - self.began) / max(1, step - self.done)
        return mean * (self.steps - step)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.note(f"step {step}: {evaluation_line(evaluation)}")

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def finished(self, done: int, steps: int, signal: str | None, command: str = "train") -> None:
        """Print the results and the path of the model; after an early stop, print the resume
        command."""
        if done < steps:
            saved = f"saved step {done} of {steps}" if done else "no step has ended, none is saved"
            self.note(f"{signal}: {saved}")
            self.note(f"resume with: covey {command} --resume {self.run.path}")
            return
        table = before_and_after(self.run)
        if table is not None:
            self.console.print(table)
        newest, best = self.run.checkpoints()[-1][1], best_of(self.run)
        self.note(f"run          {self.run.path}")
        if command == "train":
            self.note(f"completions  covey runs {self.run.path} --step {done}")
        self.note(f"model        {newest}")
        if best is not None and best.step is not None:
            self.note(f"best model   {newest.parent / f'{best.step:06d}'}  ({best.line()})")


class LiveTracker(ConsoleTracker):
    """Shows a progress bar with the metrics of the last step during training."""

    def __init__(self, run: RunFolder, console: Console) -> None:
        super().__init__(run, console)
        self.progress = Progress(
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
            *([BarColumn(bar_width=8)] if console.width >= BAR else []),
            TextColumn("{task.fields[summary]}", table_column=Column(no_wrap=True, ratio=1)),
            TextColumn("{task.fields[sampled]}", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True, min_width=5)),
            console=console,
            expand=True,
        )
        self.task = self.progress.add_task("step", total=None, sampled="", summary="", left="")
        self.count = 0

    def started(self, *, steps: int, done: int, rollouts: int) -> None:
        super().started(steps=steps, done=done, rollouts=rollouts)
        self.progress.update(self.task, total=steps, completed=done)
        self.progress.start()

    def sampled(self, count: int) -> None:
        """Count finished completions, so that the bar shows progress within a long step."""
        self.count += count
        self.progress.update(self.task, sampled=f"+{self.count}")

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.count = 0
        step = metrics["step"]
        self.progress.update(
            self.task,
            completed=step,
            summary=summary(metrics, short=self.console.width < NARROW),
            sampled="",
            left=duration(self.seconds_left(step)),
        )

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self.count = 0
        super().evaluation(step, evaluation)

    def close(self) -> None:
        self.progress.stop()


def console_tracker(run: RunFolder, console: Console) -> ConsoleTracker:
    """Return a tracker that shows a progress bar in a terminal, and plain lines elsewhere."""
    return LiveTracker(run, console) if console.file.isatty() else ConsoleTracker(run, console)


def before_and_after(run: RunFolder) -> Table | None:
    """Return a table of the first and last evaluation, or None if there are fewer than two."""
    evaluations = run.evaluations()
    if len(evaluations) < 2:
        return None
    first, last = evaluations[0], evaluations[-1]
    table = Table(title=f"{first['prompts']} held-out prompts, 95 % intervals")
    for heading in ("", f"before (step {first['step']})", f"after (step {last['step']})", "change"):
        table.add_column(heading, justify="left" if not heading else "right")
    estimates = [n for n in first if isinstance(first[n], dict) and "value" in first[n]]
    for name in [n for n in estimates if n in last]:
        a, b = first[name], last[name]
        table.add_row(
            Text(printable(f"greedy: {name.removeprefix('parts/')}" if is_reward(name) else name)),
            estimate_text(name, a),
            estimate_text(name, b),
            change_text(name, b["value"] - a["value"]),
        )
    if "distinct_answers" in first and "distinct_answers" in last:
        counts = [row["distinct_answers"] for row in (first, last)]
        table.add_row("distinct answers", *map(str, counts), f"{counts[1] - counts[0]:+d}")
    if "best_constant" in last:
        constant = last["best_constant"]
        gain = change_text("greedy", last["greedy"]["value"] - constant)
        table.caption = (
            f"gain above the best constant answer, whose accuracy is {constant:.1%}: {gain}"
        )
    return table
