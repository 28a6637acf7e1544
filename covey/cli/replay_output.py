"""Terminal output of `covey explain --replay`: algorithms side by side."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from covey.analysis.explain.families import Family
from covey.analysis.explain.replay import Moment, Replay, Replayed
from covey.cli.explain_output import number_column, weights_line
from covey.cli.screen import cell


def show_replay(found: Replay, console: Console) -> None:
    """Print families of algorithms, their gradients and their cosines."""
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
    console.print(f"options: {own}others their defaults{given}")
    for moment in found.moments:
        _moment(moment, found, console)
    console.print("\nequal: = bit for bit, ~ up to rounding after division by the factor behind /")
    console.print("zero: share of tokens with gradient 0")
    console.print(
        "by length: |d loss / d logp| per unit of advantage, relative to all tokens. 1 everywhere "
        "means no length bias."
    )


def _moment(moment: Moment, found: Replay, console: Console) -> None:
    when = "before the step: the policy is the one that generated"
    if moment.updates:
        when = f"after the run's {moment.updates} optimizer steps with {found.run_algorithm}"
    console.print(f"\n{when}", style="bold")
    for family in moment.families:
        if len(family.members) > 1:
            console.print(_family_line(family))
    console.print(_table(moment, found.run_algorithm))
    console.print("cosines of the parameters' gradients, one algorithm of each family:")
    for line in _cosines(moment):
        console.print(line)


def _family_line(family: Family) -> str:
    """Return the line of a family: equal bit for bit, up to rounding, or up to a factor."""
    exact = [m.name for m in family.members if m.identical]
    rest = [m for m in family.members if not m.identical]
    parts = [" = ".join(exact)]
    for member in rest:
        times = "" if abs(member.factor - 1) < 1e-5 else f" / {member.factor:.4g}"
        parts.append(f"{member.name}{times}")
    return "equal: " + " ~ ".join(parts)


def _table(moment: Moment, own: str) -> Table:
    bins = moment.algorithms[0].lengths
    columns = [f"{b.shortest}-{b.longest} tokens" for b in bins]
    table = Table(
        Column("algorithm", no_wrap=True),
        *map(number_column, ["loss", "norm", "clipped", "zero", *columns]),
        box=SIMPLE,
    )
    for algorithm in moment.algorithms:
        table.add_row(
            cell(f"{algorithm.name} (*)" if algorithm.name == own else algorithm.name),
            f"{algorithm.loss:+.3g}",
            f"{algorithm.grad_norm:.4g}",
            f"{algorithm.clipped:.1%}",
            f"{algorithm.zero_gradient:.1%}",
            *_by_length(algorithm),
        )
    return table


def _by_length(algorithm: Replayed) -> list[str]:
    whole = algorithm.per_advantage
    return [f"{b.per_advantage / whole:.2f}" if whole else "-" for b in algorithm.lengths]


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
