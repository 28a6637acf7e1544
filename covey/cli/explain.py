"""`covey explain`: what a recorded step learned, and what other algorithms would have."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.cli.startup import STARTING, Trust, tell_edited, waiting
from covey.errors import ConfigError
from covey.run.folder import RunFolder

if TYPE_CHECKING:
    from covey.analysis.explain.step import ExplainedAnswer, Explanation

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Step = Annotated[int, typer.Option(min=1, help="Which step of the run.")]
Line = Annotated[
    int | None,
    typer.Option(
        "--rollout", min=1, metavar="K", help="One answer, token by token: line K of its file."
    ),
]
Algorithms = Annotated[
    str | None,
    typer.Option(
        "--replay",
        metavar="NAMES",
        help="Put the step's answers through these algorithms, such as grpo,gspo, or all.",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="With --replay: an option for every algorithm that has it, such as beta=0.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Learn the recorded steps since the nearest checkpoint again, to have the step's "
        "own weights.",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain a recorded step: what it learned from, answer by answer or token by token.

    Its answers are learned from again, with the weights of the nearest checkpoint before the step;
    the output says which those are. With --replay, other algorithms learn from them as well.
    """
    if line is not None and algorithms is not None:
        raise ConfigError("--rollout shows one answer, and --replay all of them; give one")
    if options and algorithms is None:
        raise ConfigError("--set gives options to the algorithms of --replay, which is not there")
    run = RunFolder.open(path)
    tell_edited(run)
    run.require_rollouts(step)  # a step that is not there is said before anything is loaded
    if algorithms is not None:
        _replay(run, step, algorithms, options or [], exact, as_json)
        return

    with waiting(STARTING) as say:
        from covey.analysis.explain.recorded import bring_back, read_step  # imports torch
        from covey.analysis.explain.step import explain_step

        recorded = read_step(run, step)
        if line is not None:
            _check_line(line, [a.line for a in recorded.learned], len(recorded.answers))
        say(_bringing(step, exact))
        trainee = bring_back(run, step, exact=exact)
        say(f"learning from step {step}")
        explained = explain_step(trainee, recorded)
    answer = next((a for a in explained.answers if a.line == line), None)
    if as_json:
        typer.echo(json.dumps(_finite(_data(explained, answer))))
        return

    from covey.cli.explain_output import show_answer, show_step, wide_console

    if answer is None:
        show_step(explained, wide_console())
    else:
        show_answer(explained, answer, wide_console())


def _bringing(step: int, exact: bool) -> str:
    again = ", and learning again up to it" if exact else ""
    return f"loading the weights before step {step}{again}"


def _check_line(line: int, learned: list[int], answers: int) -> None:
    if line > answers:
        raise ConfigError(f"--rollout {line}: the step has {answers} answers")
    if line not in learned:
        raise ConfigError(
            f"--rollout {line}: the step did not learn from this answer, its group was left out"
        )


def _data(explained: Explanation, answer: ExplainedAnswer | None) -> dict[str, Any]:
    data = {**asdict(explained), "exact": explained.origin.exact}
    if answer is None:
        return data
    return {**data, "answers": [asdict(answer)], "groups": [
        group for group in data["groups"] if group["group"] == answer.group
    ]}  # fmt: skip


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
            raise ConfigError(f"--set takes key=value, such as beta=0, not {option!r}")
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--replay {algorithms!r} names no algorithm; give some, or all")
    with waiting(STARTING) as say:
        from covey.analysis.explain.recorded import bring_back, read_step
        from covey.analysis.explain.replay import objectives, replay

        recorded = read_step(run, step)
        built = objectives(run, names, options)
        say(_bringing(step, exact))
        trainee = bring_back(run, step, exact=exact)
        say(f"learning from step {step} with {len(built)} algorithms")
        found = replay(trainee, recorded, built, options)
    if as_json:
        typer.echo(json.dumps(_finite({**asdict(found), "exact": found.origin.exact})))
        return

    from covey.cli.explain_output import wide_console
    from covey.cli.replay_output import show_replay

    show_replay(found, wide_console())


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not finite is null."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
