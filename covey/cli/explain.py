"""`covey explain`: explain the gradient of a recorded training step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from covey.cli.startup import STARTING, AsJson, Trust, tell_edited, waiting
from covey.errors import ConfigError
from covey.escape import printable
from covey.records.files import finite
from covey.records.folder import RunFolder
from covey.screen import cell, number_column, wide_console

if TYPE_CHECKING:
    from covey.lab.explain.explained_step import (
        ExplainedRollout,
        ExplainedToken,
        Explanation,
    )
    from covey.lab.explain.recorded import Origin
    from covey.lab.explain.replay_algorithms import Moment, Replay


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Step = Annotated[int, typer.Option(min=1, help="The training step to explain.")]
Line = Annotated[
    int | None,
    typer.Option(
        "--rollout",
        min=1,
        metavar="K",
        help="Show every token of rollout K. K is the rollout's line number in the step's file "
        "of rollouts.",
    ),
]
Algorithms = Annotated[
    str | None,
    typer.Option(
        "--replay",
        metavar="NAMES",
        help="Compare the gradients of these algorithms (names separated by commas, or 'all').",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="With --replay, set an option, such as beta=0, in all algorithms that have it.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="First repeat all training steps between the nearest earlier checkpoint and the "
        "explained step, which then starts with exactly the same weights as in the run.",
    ),
]
Seconds = Annotated[
    float,
    typer.Option(
        min=0,
        help="Time for the projections of rollouts on the step's gradient; 0 leaves them out.",
    ),
]


def explain_command(
    path: Run,
    step: Step,
    line: Line = None,
    algorithms: Algorithms = None,
    options: Options = None,
    exact: Exact = False,
    seconds: Seconds = 120.0,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Show how much each group, rollout or token contributed to the gradient of a training step.

    The command loads the nearest earlier checkpoint, and repeats the training step with the
    recorded rollouts. With --replay, the command compares the gradients that several algorithms
    compute from the recorded rollouts.
    """
    if line is not None and algorithms is not None:
        raise ConfigError(
            "--rollout cannot be combined with --replay, which uses all rollouts of the step"
        )
    if options and algorithms is None:
        raise ConfigError(
            "--set needs --replay, because --set changes options of the algorithms in --replay"
        )
    run = RunFolder.open(path)
    tell_edited(run)
    run.require_rollouts(step)  # raises if the step is missing, before anything is loaded
    if algorithms is not None:
        return _replay(run, step, algorithms, options or [], exact, as_json)

    with waiting(STARTING) as say:
        from covey.lab.explain.explained_step import explain_step
        from covey.lab.explain.recorded import policy_before, read_step  # imports torch

        recorded = read_step(run, step)
        if line is not None:
            if line > len(recorded.rollouts):
                raise ConfigError(
                    f"--rollout {line}: the step has only {len(recorded.rollouts)} rollouts"
                )
            if line not in [one.line for one in recorded.learned]:
                raise ConfigError(
                    f"--rollout {line}: the step did not train on this rollout, because the "
                    "rollout's group was filtered out"
                )
        say(_loading(step, exact))
        trainee = policy_before(run, step, exact=exact)
        say(f"training step {step} again")
        explained = explain_step(trainee, recorded, seconds, say)
    rollout = next((a for a in explained.rollouts if a.line == line), None)
    if as_json:
        data = {**asdict(explained), "exact": explained.origin.exact}
        if rollout is not None:
            data["groups"] = [g for g in data["groups"] if g["group"] == rollout.group]
            data["rollouts"] = [asdict(rollout)]
        typer.echo(json.dumps(finite(data)))
    elif rollout is None:
        show_step(explained, wide_console())
    else:
        show_rollout(explained, rollout, wide_console())


def _loading(step: int, exact: bool) -> str:
    again = ", and training up to it" if exact else ""
    return f"loading the weights before step {step}{again}"


def _replay(
    run: RunFolder,
    step: int,
    algorithms: str,
    options: list[str],
    exact: bool,
    as_json: bool,
) -> None:
    for option in options:
        if "=" not in option:
            raise ConfigError(f"--set {option!r}: write an option as key=value, such as beta=0")
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    if not names:
        raise ConfigError(
            f"--replay {algorithms!r} names no algorithm; give names such as grpo,gspo, or 'all'"
        )
    with waiting(STARTING) as say:
        from covey.lab.explain.recorded import policy_before, read_step
        from covey.lab.explain.replay_algorithms import objectives, replay

        recorded = read_step(run, step)
        built = objectives(run, names, options)
        say(_loading(step, exact))
        trainee = policy_before(run, step, exact=exact)
        say(f"replaying step {step} with {len(built)} algorithms")
        found = replay(trainee, recorded, built, options)
    if as_json:
        typer.echo(json.dumps(finite({**asdict(found), "exact": found.origin.exact})))
    else:
        show_replay(found, wide_console())


# Terminal output of `covey explain`: groups, rollouts, tokens, and algorithms side by side.

CHECKED = ("loss/policy_avg", "policy/clipfrac_avg", "optim/grad_norm")
"""Metrics whose values in the explained step are compared with the values in the run's log."""
FORMS = {
    "advantage": "+.2f", "logp": ".3f", "old_logp": ".3f", "ref_logp": ".3f", "ratio": ".3f",
    "kl": ".1e", "entropy": ".3f", "weight": ".1e", "push": "+.1e",
}  # fmt: skip


def weights_line(origin: Origin) -> str:
    start = f"checkpoint {origin.checkpoint}" if origin.checkpoint else "the initial model"
    again = ""
    if origin.replayed_steps:
        again = f", then {origin.replayed_steps} recorded steps trained again"
    what = f"weights: {start} ({origin.path}){again}: "
    if origin.exact:
        return what + "the weights that generated these rollouts"
    return (
        what
        + f"{origin.steps_behind} steps older than the weights that generated these rollouts, so "
        "the figures are those of an older policy; --exact trains the steps in between again"
    )


def show_step(explained: Explanation, console: Console) -> None:
    _head(explained, console)
    with_gradient = sum(g.token_share > 0 for g in explained.groups)
    equal = sum(g.zero_variance for g in explained.groups)
    count = len(explained.rollouts)
    lines = [
        f"{with_gradient} of {len(explained.groups)} groups have a gradient; in {equal} all "
        "rewards are equal",
        f"{explained.tokens} trained tokens, {explained.zero_gradient} with gradient 0, "
        f"{explained.clipped} clipped",
        f"{explained.token_share_raised:.1%} of the sum of |d loss / d logp| makes tokens "
        "likelier, the rest less likely",
        f"half of the sum of |d loss / d logp| comes from {explained.half_token_share_from} of "
        f"{count} rollouts",
    ]
    known = sum(r.projection is not None for r in explained.rollouts)
    if explained.half_gradient_from is not None:
        lines.append(
            "half of the gradient, by projection, comes from "
            f"{explained.half_gradient_from} of {count} rollouts"
        )
    elif known:
        lines.append(f"projected {known} of {count} rollouts in the time that --seconds allows")
    if explained.filtered_out:
        lines.append(f"{explained.filtered_out} more rollouts were filtered out of the step")
    for line in lines:
        console.print(line)
    console.print(_group_table(explained))
    console.print(
        "gradient: projection of the group's gradient on the step's; all add up to 100 %, and a "
        "negative one works against the step.\n|dL/dlogp|: part of the step's sum of |d loss / d "
        "logp|, which ignores how the tokens' gradients add up.\n--rollout K shows rollout K."
    )


def _head(explained: Explanation, console: Console) -> None:
    count = f"{explained.updates} optimizer step{'s' * (explained.updates != 1)}"
    console.print(
        f"step {explained.step}: {explained.algorithm}, {len(explained.rollouts)} rollouts, "
        f"{count}",
        style="bold",
    )
    console.print(weights_line(explained.origin))
    metrics = explained.metrics
    if "debug/sampler_logp_diff_mean" in metrics:  # absent if all rollouts are masked
        console.print(
            "check: log-probs differ from the recorded ones by "
            f"{metrics['debug/sampler_logp_diff_mean']:.1e} on average, "
            f"{metrics['debug/sampler_logp_diff_max']:.1e} at most",
        )
    both = [
        f"{name} {metrics[name]:.6g} (logged {explained.logged[name]:.6g})"
        for name in CHECKED
        if metrics.get(name) is not None and explained.logged.get(name) is not None
    ]
    if both:
        console.print("check: trained again, " + ", ".join(both) + "\n")


def _group_table(explained: Explanation) -> Table:
    table = Table(
        Column("rollouts", no_wrap=True), "prompt", "rewards", "advantages",
        *map(number_column, ("tokens", "clipped", "gradient", "|dL/dlogp|")), box=SIMPLE,
    )  # fmt: skip
    by_line = {rollout.line: rollout for rollout in explained.rollouts}
    for group in explained.groups:
        rollouts = [by_line[line] for line in group.lines]
        lengths = [len(r.tokens) for r in rollouts]
        table.add_row(
            f"{group.lines[0]}-{group.lines[-1]}",
            cell(_shortened(group.prompt)),
            _counted("unscored" if r.reward is None else f"{r.reward:.3g}" for r in rollouts),
            _counted(f"{r.advantage:+.2f}" for r in rollouts),
            f"{min(lengths)}-{max(lengths)}",
            f"{group.clipped:.1%}",
            "" if group.projection is None else f"{group.projection:.1%}",
            f"{group.token_share:.1%}",
            style="dim" if group.token_share == 0 else None,
        )
    return table


def _counted(values: Iterable[str]) -> str:
    """Return text with each value and its number of occurrences, most frequent values first."""
    return ", ".join(f"{count} x {value}" for value, count in Counter(values).most_common())


def _shortened(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def show_rollout(explained: Explanation, rollout: ExplainedRollout, console: Console) -> None:
    _head(explained, console)
    group = next(g for g in explained.groups if g.group == rollout.group)
    console.print(group.prompt, style="bold")
    for line, trained in rollout.turns:
        console.print(f"  {line}", style="default" if trained else "dim")
    largest = max((abs(t.gradient) for t in rollout.tokens if t.gradient is not None), default=0.0)
    text = Text()
    for token in rollout.tokens:
        text.append(printable(token.text), style=_style(token, largest))
    console.print(text)
    reward = "unscored" if rollout.reward is None else f"reward {rollout.reward:.3g}"
    total = sum(a.gradient for a in explained.rollouts)
    console.print(
        f"\nrollout {rollout.line}: {reward}, advantage {rollout.advantage:+.4g} (recorded "
        f"{rollout.recorded_advantage:+.4g}), trained in optimizer step {rollout.update} of "
        f"{explained.updates}, {rollout.clipped:.1%} clipped, "
        + (
            ""
            if rollout.projection is None
            else f"{rollout.projection:.1%} of the step's gradient by projection, "
        )
        + f"{rollout.gradient / total if total else 0.0:.1%} of its sum of |d loss / d logp|",
    )
    console.print(_token_table(rollout.tokens, largest))
    console.print(
        "push: -d loss / d logp; above 0 (green) the step makes the token likelier, below 0 (red) "
        "less likely."
    )


def _style(token: ExplainedToken, largest: float) -> str:
    """Return the color of a token: green if its probability increases, red if it decreases."""
    if not token.gradient:
        return "dim"
    strength = abs(token.gradient) / largest
    bright = int(90 + 165 * strength)
    colour = f"rgb(0,{bright},0)" if token.gradient < 0 else f"rgb({bright},0,0)"
    return f"bold {colour}" if strength > 0.5 else colour


def _token_table(tokens: Sequence[ExplainedToken], largest: float) -> Table:
    # Columns without any value, such as those of a reference, are omitted.
    known = {name for name in FORMS for token in tokens if _value(token, name) is not None}
    shown = {name: form for name, form in FORMS.items() if name in known}
    table = Table(
        number_column(""), Column("token", no_wrap=True), Column("clip", no_wrap=True),
        *map(number_column, shown), box=SIMPLE,
    )  # fmt: skip
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


def show_replay(found: Replay, console: Console) -> None:
    console.print(
        f"step {found.step}: {found.rollouts} rollouts, {len(found.moments[0].algorithms)} "
        "algorithms, each with one optimizer step over all rollouts",
        style="bold",
    )
    console.print(weights_line(found.origin))
    given = "".join(f", {key} = {value}" for key, value in found.options.items())
    names = [a.name for a in found.moments[0].algorithms]
    own = (
        f"{found.run_algorithm} (*) has the run's options, " if found.run_algorithm in names else ""
    )
    console.print(f"options: {own}others have their defaults{given}")
    for moment in found.moments:
        _moment(moment, found, console)
    console.print(
        "\nequal: = means bit for bit; ~ means up to rounding, after division by the factor after /"
    )
    console.print("zero: share of tokens with gradient 0")
    console.print(
        "by length: |d loss / d logp| per unit of advantage, relative to all tokens. 1 everywhere "
        "means no length bias."
    )


def _moment(moment: Moment, found: Replay, console: Console) -> None:
    when = "before the step: the policy is the one that generated the rollouts"
    if moment.updates:
        when = f"after the run's {moment.updates} optimizer steps with {found.run_algorithm}"
    console.print(f"\n{when}", style="bold")
    for family in moment.families:
        if len(family.members) > 1:
            parts = [" = ".join(m.name for m in family.members if m.identical)]
            for member in family.members:
                if not member.identical:
                    times = "" if abs(member.factor - 1) < 1e-5 else f" / {member.factor:.4g}"
                    parts.append(f"{member.name}{times}")
            console.print("equal: " + " ~ ".join(parts))
    bins = [f"{b.shortest}-{b.longest} tokens" for b in moment.algorithms[0].lengths]
    columns = map(number_column, ["loss", "norm", "clipped", "zero", *bins])
    table = Table(Column("algorithm", no_wrap=True), *columns, box=SIMPLE)
    for each in moment.algorithms:
        whole = each.per_advantage
        table.add_row(
            cell(f"{each.name} (*)" if each.name == found.run_algorithm else each.name),
            f"{each.loss:+.3g}",
            f"{each.grad_norm:.4g}",
            f"{each.clipped:.1%}",
            f"{each.zero_gradient:.1%}",
            *(f"{b.per_advantage / whole:.2f}" if whole else "-" for b in each.lengths),
        )
    console.print(table)
    console.print("cosines of the parameters' gradients, one algorithm of each family:")
    for line in _cosines(moment):
        console.print(line)


def _cosines(moment: Moment) -> list[str]:
    names = [a.name for a in moment.algorithms]
    leaders = [family.leader for family in moment.families]
    places = [names.index(name) for name in leaders]
    width = max(len(name) for name in leaders) + 4
    lines = [" " * width + "".join(f"{n:>6}" for n in range(1, len(places) + 1))]
    for number, place in enumerate(places, start=1):
        cells = [moment.cosine[place][other] for other in places]
        shown = "".join("     -" if cell is None else f"{cell:6.2f}" for cell in cells)
        lines.append(f"{number:2} {names[place]:<{width - 3}}{shown}")
    return lines
