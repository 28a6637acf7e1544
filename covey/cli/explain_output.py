"""A step that was explained, for people to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from covey.analysis.explain.recorded import Origin
from covey.analysis.explain.step import ExplainedAnswer, ExplainedGroup, ExplainedToken, Explanation
from covey.cli.screen import Screen, cell
from covey.escape import printable

CHECKED = ("loss/policy_avg", "policy/clipfrac_avg", "optim/grad_norm")
"""Metrics by which learning a step again is held against the log."""
FORMS = {
    "advantage": "+.2f", "logp": ".3f", "old_logp": ".3f", "ref_logp": ".3f", "ratio": ".3f",
    "kl": ".1e", "entropy": ".3f", "weight": ".1e", "push": "+.1e",
}  # fmt: skip
"""The columns of a token, and how its numbers are written."""
LEAST_WIDTH = 120
"""Tables are this wide even where a pipe or a narrow terminal says otherwise: numbers must stay."""


def wide_console() -> Console:
    """Return a console on which tables are never cut."""
    console = Screen(soft_wrap=True, highlight=False)
    console.width = max(console.width, LEAST_WIDTH)
    return console


def number_column(name: str) -> Column:
    """Return a column of numbers."""
    return Column(name, justify="right", no_wrap=True)


def weights_line(origin: Origin) -> str:
    """Say with which weights figures were computed."""
    start = f"checkpoint {origin.checkpoint}" if origin.checkpoint else "the model at the start"
    again = ""
    if origin.learned_again:
        again = f", and {origin.learned_again} recorded steps learned again from there"
    what = f"weights: {start} ({origin.path}){again}: "
    if origin.exact:
        return what + "those that sampled these answers"
    return (
        what + f"{origin.behind} steps older than those that sampled these answers, so figures are "
        "of these answers, but of an older policy; --exact learns the steps in between again"
    )


def show_step(explained: Explanation, console: Console) -> None:
    """Print what the step learned from, group by group."""
    _head(explained, console)
    teaching = sum(g.share > 0 for g in explained.groups)
    flat = sum(g.flat for g in explained.groups)
    lines = [
        f"{teaching} of {len(explained.groups)} groups teach; in {flat} all rewards are equal",
        f"{explained.tokens} tokens trained, {explained.silent} of them without any gradient; "
        f"{explained.clipped} clipped",
        f"{explained.raised:.1%} of the gradient makes tokens likelier, the rest less likely",
        f"half of the gradient is of {explained.half_from} of {len(explained.answers)} answers",
    ]
    if explained.left_out:
        lines.append(f"{explained.left_out} answers more were left out of the step")
    for line in lines:
        console.print(line, markup=False)
    console.print(_group_table(explained))
    console.print("share: of the step's sum of |d loss / d logp|. --rollout K shows answer K.")


def _head(explained: Explanation, console: Console) -> None:
    count = "one update" if explained.updates == 1 else f"{explained.updates} updates"
    console.print(
        f"step {explained.step}: {explained.algorithm}, {len(explained.answers)} answers, learned "
        f"in {count}",
        style="bold",
        markup=False,
    )
    console.print(weights_line(explained.origin), markup=False)
    metrics = explained.metrics
    if "debug/sampler_logp_diff_mean" in metrics:  # not if every answer was masked
        console.print(
            "check: log-probabilities differ from those recorded by "
            f"{metrics['debug/sampler_logp_diff_mean']:.1e} on average, "
            f"{metrics['debug/sampler_logp_diff_max']:.1e} at most",
            markup=False,
        )
    both = [
        f"{name} {metrics[name]:.6g} (logged {explained.logged[name]:.6g})"
        for name in CHECKED
        if metrics.get(name) is not None and explained.logged.get(name) is not None
    ]
    if both:
        console.print("check: learned again, " + ", ".join(both) + "\n", markup=False)


def _group_table(explained: Explanation) -> Table:
    table = Table(
        Column("answers", no_wrap=True), "prompt", "rewards", "advantages",
        *map(number_column, ("tokens", "clipped", "share")), box=SIMPLE,
    )  # fmt: skip
    answers = {answer.line: answer for answer in explained.answers}
    for group in explained.groups:
        _add_group(table, group, [answers[line] for line in group.lines])
    return table


def _add_group(table: Table, group: ExplainedGroup, answers: Sequence[ExplainedAnswer]) -> None:
    rewards = ["unscored" if a.reward is None else f"{a.reward:.3g}" for a in answers]
    lengths = [len(a.tokens) for a in answers]
    table.add_row(
        f"{group.lines[0]}-{group.lines[-1]}",
        cell(_shortened(group.question)),
        _counted(rewards),
        _counted([f"{a.advantage:+.2f}" for a in answers]),
        f"{min(lengths)}-{max(lengths)}",
        f"{group.clipped:.1%}",
        f"{group.share:.1%}",
        style="dim" if group.share == 0 else None,
    )


def _counted(values: Sequence[str]) -> str:
    """Say how often each value occurs, the most frequent first."""
    return ", ".join(f"{count} x {value}" for value, count in Counter(values).most_common())


def _shortened(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def show_answer(explained: Explanation, answer: ExplainedAnswer, console: Console) -> None:
    """Print an answer, its tokens coloured by what the step does to them, and all their numbers."""
    _head(explained, console)
    group = next(g for g in explained.groups if g.group == answer.group)
    console.print(group.question, style="bold", markup=False)
    console.print(_coloured(answer.tokens))
    reward = "unscored" if answer.reward is None else f"reward {answer.reward:.3g}"
    total = sum(a.gradient for a in explained.answers)
    console.print(
        f"\nanswer {answer.line}: {reward}, advantage {answer.advantage:+.4g} (recorded "
        f"{answer.recorded_advantage:+.4g}), learned in optimizer step {answer.update} of "
        f"{explained.updates}, {answer.clipped:.1%} clipped, "
        f"{answer.gradient / total if total else 0.0:.1%} of the step's gradient",
        markup=False,
    )
    console.print(_token_table(answer.tokens))
    console.print(
        "push: -d loss / d logp; above 0 (green) the step makes the token likelier, below 0 (red) "
        "less likely."
    )


def _coloured(tokens: Sequence[ExplainedToken]) -> Text:
    """Return the text, green where it is made likelier and red where less likely."""
    largest = max((abs(t.gradient) for t in tokens if t.gradient is not None), default=0.0)
    text = Text()
    for token in tokens:
        text.append(printable(token.text), style=_style(token, largest))
    return text


def _style(token: ExplainedToken, largest: float) -> str:
    if not token.gradient:
        return "dim"
    strength = abs(token.gradient) / largest
    bright = int(90 + 165 * strength)
    colour = f"rgb(0,{bright},0)" if token.gradient < 0 else f"rgb({bright},0,0)"
    return f"bold {colour}" if strength > 0.5 else colour


def _token_table(tokens: Sequence[ExplainedToken]) -> Table:
    # A reference has columns of its own, only where there is one.
    known = {name for name in FORMS for token in tokens if _value(token, name) is not None}
    shown = {name: form for name, form in FORMS.items() if name in known}
    table = Table(
        number_column(""), Column("token", no_wrap=True), Column("clip", no_wrap=True),
        *map(number_column, shown), box=SIMPLE,
    )  # fmt: skip
    largest = max((abs(t.gradient) for t in tokens if t.gradient is not None), default=0.0)
    for place, token in enumerate(tokens, start=1):
        values = [(_value(token, name), form) for name, form in shown.items()]
        table.add_row(
            str(place),
            cell(_shortened(repr(token.text)[1:-1], 24)),
            token.clipped or "",
            *("" if value is None else format(value, form) for value, form in values),
            style=_style(token, largest),
        )
    return table


def _value(token: ExplainedToken, name: str) -> float | None:
    if name == "push":
        return None if token.gradient is None else 0.0 - token.gradient
    value: float | None = getattr(token, name)
    return value
