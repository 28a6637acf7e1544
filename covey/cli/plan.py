"""`covey plan`: estimate the memory of a run, and list settings without effect."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from covey.cli.startup import (
    AsJson,
    Model,
    Overrides,
    Source,
    Trust,
    import_torch_when_used,
    resolved,
    settings_of,
    source_of,
    tell_defaults,
    waiting,
)
from covey.config import Config, load_config
from covey.errors import CoveyError
from covey.models.model_path import prepare_hub
from covey.screen import Screen

if TYPE_CHECKING:
    from covey.lab.plan.equivalence import Finding
    from covey.lab.plan.forecast import Forecast
    from covey.lab.plan.task_facts import TaskFacts


HEADINGS = {"same": "equivalent", "idle": "no effect", "risk": "may harm"}
Gpu = Annotated[
    float | None,
    typer.Option(
        "--gpu",
        min=1,
        metavar="GIB",
        help="Plan for a GPU with this much memory (in GiB) instead of this machine's device.",
    ),
]
MeasureSteps = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Train a few steps on this machine, and forecast how long the run will take.",
    ),
]

Ranks = Annotated[
    int,
    typer.Option(
        "--ranks",
        min=1,
        max=4096,
        metavar="N",
        help="Plan for training on N ranks with one device each, and show the memory of each rank.",
    ),
]


def plan_command(
    source: Source = None,
    overrides: Overrides = None,
    model: Model = None,
    gpu: Gpu = None,
    ranks: Ranks = 1,
    trust: Trust = None,
    measure_steps: MeasureSteps = False,
    as_json: AsJson = False,
) -> None:
    """Describe a planned run, estimate its memory, and list settings that have no effect.

    The command estimates memory from the model's configuration and tokenizer. With --measure, it
    loads the weights, trains a few steps, and forecasts the time. If the run
    cannot start, the command says why, and its exit code is 2.
    """
    from covey.lab.plan.task_facts import measuring

    settings = settings_of(overrides, model)
    label = source_of(source, settings)
    prepare_hub(load_config(label, settings).model.path)  # before a process starts that needs it
    import_torch_when_used()  # for the usual models, a plan does not use torch
    with waiting("reading the settings") as say, measuring() as measure:
        config = resolved(label, settings, model=False)

        from covey.config.resolve import over_epochs
        from covey.lab.plan.findings import findings
        from covey.lab.plan.summary import summarize
        from covey.lab.plan.task_facts import task_facts

        say("reading the task")
        facts = task_facts(config, measure)
        config = over_epochs(config, facts.prompts)
        tell_defaults(label, config)
        if measure_steps:
            return show_time(config, as_json)
        plan = summarize(config, facts)
        say(f"measuring {config.model.path}")
        stopping = _obstacles(config, facts, ranks, here=gpu is None)
        memory, problem, fits = _memory(config, facts, gpu, ranks)
        found = [*fits, *findings(config, facts)]
    if as_json:
        data = {
            "text": plan.paragraph(),
            "plan": plan.row(),
            "memory": memory and memory.row(),
            "memory_unknown": problem,
            "findings": [{**each.row(), "settings": list(each.settings)} for each in found],
            "task_unreadable": facts.unreadable,
            "cannot_start": stopping,
        }
        typer.echo(json.dumps(data))
    else:
        console = Screen()
        console.print(plan.paragraph(), "", sep="\n")
        for why in stopping:
            console.print(f"cannot start: {why}\n", soft_wrap=True)
        memory_text = memory.text() if memory else f"memory: unknown, {problem}"
        console.print(memory_text, soft_wrap=True)
        if not stopping and not found:
            console.print("\nNo findings: every setting has an effect, and none is known to harm.")
        for finding in found:
            console.print(f"\n{HEADINGS[finding.kind]}: {finding.title}", style="bold")
            console.print(f"  {finding.why}")
            console.print(f"  What to do: {finding.remedy} ({finding.docs}).")
    if stopping:
        raise typer.Exit(2)


def _obstacles(config: Config, facts: TaskFacts, ranks: int, *, here: bool) -> list[str]:
    from covey.config.check import obstacles
    from covey.rollout.prompt_limit import longest_prompt

    trainers = config.cluster.trainers if config.cluster.address else 0
    found = obstacles(config, max(ranks, trainers), here=here)
    found += [facts.unreadable] * bool(facts.unreadable)
    if facts.context is not None:
        try:
            longest_prompt(config, facts.context)
        except CoveyError as error:
            found.append(str(error))
    return found


def _memory(
    config: Config, facts: TaskFacts, gpu: float | None, ranks: int
) -> tuple[Forecast | None, str, list[Finding]]:
    from covey.lab.plan.forecast import Device
    from covey.lab.plan.memory import forecast, memory_findings
    from covey.lab.plan.model_shape import shape_of

    try:
        device = Device.here(config.model.device) if gpu is None else Device.gpu(gpu)
        shape = shape_of(config)
        memory = forecast(config, device, facts, shape, ranks)
        return memory, "", list(memory_findings(config, memory, facts, shape, ranks))
    except CoveyError as error:
        return None, str(error), []


def show_time(config: Config, as_json: bool) -> None:
    with waiting("measuring a few training steps"):
        from covey.lab.plan.summary import measure_time

        forecast = measure_time(config)
    typer.echo(json.dumps(forecast.row()) if as_json else forecast.text())
