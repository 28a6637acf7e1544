"""`covey rewards`: list rewards, score completions, or test a reward."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text

from covey.cli.lists import described, show_options
from covey.cli.startup import STARTING, AsJson, Trust, check_out, resolved, waiting
from covey.config import Config
from covey.errors import RewardError
from covey.screen import Screen, cell, echo

if TYPE_CHECKING:
    from covey.lab.rewards.cases import Case
    from covey.lab.rewards.checks import Check
    from covey.scoring import Scorer

app = typer.Typer(
    rich_markup_mode=None,
    help="List rewards, score a file of completions, or test a reward.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="Configuration of the reward: a TOML file, such as the config.toml of a run, or the "
        "name of a recipe.",
    ),
]
ConfigOption = Annotated[
    str,
    typer.Option(
        "--config",
        metavar="CONFIG",
        help="The configuration of the reward: a TOML file or the name of a recipe.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, for example reward.name=math."
    ),
]
LabelledOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON Lines file of completions with human labels. The field `correct` contains the "
        "label, true or false.",
    ),
]
AllowedOption = Annotated[
    float,
    typer.Option(
        "--allow-errors",
        min=0.0,
        max=1.0,
        help="Maximum fraction of human labels that the reward may contradict.",
    ),
]


@app.command("list")
def list_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Name of a reward, or MODULE:FUNCTION for your own reward."
        ),
    ] = None,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """List the rewards, or describe one reward with its options."""
    from covey.rewards.registry import REWARDS, find_reward, gamed_by

    names = list(REWARDS) if name is None else [name]
    rows = [described(n, find_reward(n)) for n in names]
    if as_json:
        typer.echo(json.dumps(rows if name is None else rows[0]))
        return
    if name is not None:
        return show_options("reward", rows[0])
    table = Table(Column("name", style="bold", no_wrap=True), "scores", box=SIMPLE)
    for row in rows:
        known = gamed_by(REWARDS[row["name"]])
        games = f"\nGamed by: {'; '.join(known)}." if known else ""
        table.add_row(row["name"], row["text"].partition("\n")[0] + games)
    console = Screen()
    console.print(table)
    console.print("covey rewards list NAME shows the full description and the options.")


@app.command("score")
def score_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON Lines file with the fields `completion` (or `text`) and `target`, such as "
            "a run's file of rollouts.",
        ),
    ],
    source: ConfigOption = "arithmetic",
    overrides: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the score of every completion to this JSON Lines file."),
    ] = None,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Score completions, and print the mean reward, accuracy, reward parts and failures."""
    from covey.lab.rewards.cases import read_cases
    from covey.records.files import write_text

    check_out(out)
    cases = read_cases(file)
    with waiting(STARTING):
        config = resolved(source, overrides or (), model=False)

        from covey.scoring import scorer_of

        started = scorer_of(config)
    with closing(started) as scorer:
        rows = _scored(scorer, cases, show=not as_json)
    summary = {"reward_id": scorer.identity, **_summary(rows)}
    if out is not None:
        write_text(out, "".join(json.dumps(row) + "\n" for row in rows))
    count, first_error = summary["completions"], summary["first_error"]
    if summary["unscored"] == count:
        raise RewardError(
            f"{file}: none of the {count} completions could be scored; the first error: "
            f"{first_error}"
        )
    echo(json.dumps(summary) if as_json else _summary_lines(summary))


def _scored(scorer: Scorer, cases: list[Case], show: bool) -> list[dict[str, Any]]:
    from covey.scoring import Job

    futures = [scorer.submit(Job(prompt=c.prompt, texts=(c.text,), progress=1.0)) for c in cases]
    rows = []
    with Progress(console=Screen(stderr=True), disable=not show) as progress:
        for case, future in progress.track(zip(cases, futures, strict=True), total=len(cases)):
            result = future.result()[0]
            score = {"reward": None} if result.score is None else asdict(result.score)
            error = {"error": result.error} if result.error else {}
            rows.append({"id": case.prompt.id, **score, **error})
    return rows


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    scored = [row for row in rows if row["reward"] is not None]
    errors = [row["error"] for row in rows if "error" in row]
    names = sorted({name for row in scored for name in row["parts"]})
    parts = {n: [row["parts"][n] for row in scored if n in row["parts"]] for n in names}
    count = max(1, len(scored))
    return {
        "completions": len(rows),
        "unscored": len(errors),
        "first_error": errors[0] if errors else None,
        "mean_reward": sum(row["reward"] for row in scored) / count,
        "success": sum(row["success"] for row in scored) / count,
        "parts": {name: sum(values) / len(values) for name, values in parts.items()},
    }


def _summary_lines(summary: dict[str, Any]) -> str:
    parts = "".join(f"\n  {name:24} {value:.4f}" for name, value in summary["parts"].items())
    error = f" (the first error: {summary['first_error']})" if summary["unscored"] else ""
    return (
        f"{summary['completions']} completions scored by {summary['reward_id']}\n"
        f"mean reward {summary['mean_reward']:.4f}, correct {summary['success']:.1%}, "
        f"unscored {summary['unscored']}{error}{parts}"
    )


@app.command("lab")
def lab_command(
    source: ConfigArgument = "arithmetic",
    overrides: SetOption = None,
    prompts: Annotated[
        int, typer.Option(min=1, help="Number of held-out prompts to test the reward on.")
    ] = 64,
    labelled: LabelledOption = None,
    allowed: AllowedOption = 0.0,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Test a reward for mistakes and hacks before you train with it.

    Correct completions must get the full reward, and known reward hacks must not get it. The score
    of a completion must be the same in every process. The exit code is 0 if all checks pass, and 1
    otherwise.
    """
    from covey.lab.rewards.cases import read_labelled
    from covey.lab.rewards.checks import Lab, examine
    from covey.rewards.identity import identity
    from covey.rewards.registry import gamed_by
    from covey.scoring import Pool, check_timeout

    rows = read_labelled(labelled) if labelled else []
    with waiting(STARTING):
        config = resolved(source, overrides or (), model=False)
        from covey.config.resolve import reward_of, task_of

        reward, limits = reward_of(config), config.scoring
        held_out = list(task_of(config).held_out()[:prompts])
    reward_id = identity(config.reward.name, reward)
    check_timeout(config.reward.name, reward, limits.timeout)
    # Even a quick reward runs in worker processes, because it may hang or end its process.
    workers = max(2, limits.workers)
    pool = Pool(
        reward, reward_id, workers=workers, timeout=limits.timeout, gigabytes=limits.gigabytes
    )
    with closing(pool), waiting("starting workers") as say:
        pool.start()
        lab = Lab(reward=reward, scorer=pool, progress=say)
        checks = examine(lab, held_out, rows, allowed)
    passed = all(check.passed for check in checks)
    if as_json:
        found = {"reward_id": reward_id, "passed": passed, "gamed_by": gamed_by(reward)}
        typer.echo(json.dumps({**found, "checks": [asdict(c) for c in checks]}))
    else:
        _show(reward_id, config, checks, gamed_by(reward))
    raise typer.Exit(0 if passed else 1)


def _show(reward_id: str, config: Config, checks: list[Check], games: tuple[str, ...]) -> None:
    console = Screen()
    title = cell(f"{reward_id} on task {config.task.name}")
    table = Table(
        Column("", no_wrap=True), "check", "found", box=SIMPLE, title=title, title_justify="left"
    )
    for check in checks:
        state = Text("ok", "green") if check.passed else Text("FAIL", "bold red")
        table.add_row(state, cell(check.name), cell(check.figure))
    console.print(table)
    failed = [check for check in checks if not check.passed]
    for check in failed:
        console.print(f"{check.name}: {check.why}", style="bold")
        for example in check.examples:
            console.print(f"  {example}")
    passed = len(checks) - len(failed)
    console.print(f"{passed} of {len(checks)} checks passed")
    if games:
        known = f"{config.reward.name} is kept as published. Known hacks: "
        console.print(known + "; ".join(games))
