"""`covey explain`: the gradient of a recorded step, for the run's own algorithm and others."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.cli.explain_output import show_replay, show_rollout, show_step, wide_console
from covey.cli.startup import STARTING, AsJson, Trust, tell_edited, waiting
from covey.errors import ConfigError
from covey.escape import finite
from covey.run.folder import RunFolder

if TYPE_CHECKING:
    from covey.analysis.explain.explained_step import ExplainedRollout, Explanation

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Step = Annotated[int, typer.Option(min=1, help="The training step to explain.")]
Line = Annotated[
    int | None,
    typer.Option(
        "--rollout",
        min=1,
        metavar="K",
        help="Show one rollout token by token. K is the line number of the rollout in the rollouts "
        "file of the step.",
    ),
]
Algorithms = Annotated[
    str | None,
    typer.Option(
        "--replay",
        metavar="NAMES",
        help="Train the step again with other algorithms. NAMES is a list such as grpo,gspo, or "
        "'all' for every algorithm.",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="With --replay: set an option, such as beta=0, in all replayed algorithms that have "
        "this option.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Recover the exact weights before the step, by training all steps since the nearest "
        "checkpoint again.",
    ),
]


def explain_command(
    path: Run,
    step: Step,
    line: Line = None,
    algorithms: Algorithms = None,
    options: Options = None,
    exact: Exact = False,
    trust: Trust = None,
    as_json: AsJson = False,
) -> None:
    """Explain the gradient of a recorded training step by group, by rollout or by token.

    The command loads the nearest earlier checkpoint, and repeats the step with its recorded
    rollouts. The output says which checkpoint was loaded. With --replay, other algorithms also
    train on the rollouts of the step.
    """
    if line is not None and algorithms is not None:
        raise ConfigError(
            "--rollout and --replay cannot be combined, because --replay uses all rollouts of the "
            "step; leave out one of these options"
        )
    if options and algorithms is None:
        raise ConfigError("--set needs --replay, because it sets options of replayed algorithms")
    run = RunFolder.open(path)
    tell_edited(run)
    run.require_rollouts(step)  # raises if the step is missing, before anything is loaded
    if algorithms is not None:
        _replay(run, step, algorithms, options or [], exact, as_json)
        return

    with waiting(STARTING) as say:
        from covey.analysis.explain.explained_step import explain_step
        from covey.analysis.explain.recorded import policy_before, read_step  # imports torch

        recorded = read_step(run, step)
        if line is not None:
            _check_line(line, [a.line for a in recorded.learned], len(recorded.rollouts))
        say(_loading(step, exact))
        trainee = policy_before(run, step, exact=exact)
        say(f"training step {step} again")
        explained = explain_step(trainee, recorded)
    rollout = next((a for a in explained.rollouts if a.line == line), None)
    if as_json:
        return typer.echo(json.dumps(finite(_data(explained, rollout))))

    if rollout is None:
        show_step(explained, wide_console())
    else:
        show_rollout(explained, rollout, wide_console())


def _loading(step: int, exact: bool) -> str:
    again = ", and training up to it" if exact else ""
    return f"loading the weights before step {step}{again}"


def _check_line(line: int, trained: list[int], rollouts: int) -> None:
    if line > rollouts:
        raise ConfigError(f"--rollout {line}: the step has only {rollouts} rollouts")
    if line not in trained:
        raise ConfigError(
            f"--rollout {line}: the step did not train on this rollout, because the rollout's "
            "group was filtered out"
        )


def _data(explained: Explanation, rollout: ExplainedRollout | None) -> dict[str, Any]:
    data = {**asdict(explained), "exact": explained.origin.exact}
    if rollout is None:
        return data
    groups = [group for group in data["groups"] if group["group"] == rollout.group]
    return {**data, "rollouts": [asdict(rollout)], "groups": groups}


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
            f"--replay {algorithms!r} names no algorithm; give names such as grpo,gspo, or give "
            "'all'"
        )
    with waiting(STARTING) as say:
        from covey.analysis.explain.recorded import policy_before, read_step
        from covey.analysis.explain.replay import objectives, replay

        recorded = read_step(run, step)
        built = objectives(run, names, options)
        say(_loading(step, exact))
        trainee = policy_before(run, step, exact=exact)
        say(f"replaying step {step} with {len(built)} algorithms")
        found = replay(trainee, recorded, built, options)
    if as_json:
        typer.echo(json.dumps(finite({**asdict(found), "exact": found.origin.exact})))
        return
    show_replay(found, wide_console())
