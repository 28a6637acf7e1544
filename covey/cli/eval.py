"""`covey eval`: measure a model on held-out prompts."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from covey.config import Config, load_config, toml_value


def eval_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL", help="A run folder, a checkpoint, a model folder, or 'embedded'."
        ),
    ],
    source: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="CONFIG", help="Task and reward, if not those of the run."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Sampled answers a prompt for mean@k and pass@k.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure greedy accuracy, and with --samples mean@k and pass@k, with 95 % intervals.

    Given a run, its newest checkpoint is measured on the run's own task.
    """
    path = Path(target)
    run = next((p for p in (path, path.parent.parent) if (p / "config.toml").is_file()), None)
    settings = [*(overrides or []), f"evaluate.samples={samples}"]
    model = target
    if run is not None:
        source = source or str(run / "config.toml")
        model = str(_newest_checkpoint(run) if path == run else path)
    config = load_config(source or "arithmetic", [*settings, f"model.path={toml_value(model)}"])
    row = _evaluate(config, show=not as_json)
    if as_json:
        typer.echo(json.dumps({"model": model, **row}))


def _newest_checkpoint(run: Path) -> Path:
    from covey.errors import RunError
    from covey.run.folder import RunFolder

    checkpoints = RunFolder(run).checkpoints()
    if not checkpoints:
        raise RunError(f"{run} has no checkpoint yet")
    return checkpoints[-1][1]


def _evaluate(config: Config, show: bool) -> dict[str, Any]:
    from covey.cli.report import evaluation_line
    from covey.collect import ask
    from covey.evaluate import evaluate
    from covey.sampler.native import NativeSampler
    from covey.train.assemble import (
        held_out_of,
        load_model,
        resolve,
        sampling_of,
        scorer_of,
        task_of,
    )

    config = resolve(config)
    prompts = held_out_of(config, task_of(config))
    model = load_model(config)
    with (
        closing(scorer_of(config)) as scorer,
        Progress(console=Console(stderr=True), disable=not show) as progress,
    ):
        answers = len(prompts) * (1 + config.evaluate.samples)
        task = progress.add_task("answering", total=answers)
        evaluation = evaluate(
            ask(model, prompts),
            sampler=NativeSampler(model),
            scorer=scorer,
            sampling=sampling_of(config),
            samples=config.evaluate.samples,
            temperature=config.evaluate.temperature,
            progress=partial(progress.advance, task),
        )
    if show:
        typer.echo(evaluation_line(evaluation))
    return evaluation.row()
