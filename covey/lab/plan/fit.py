"""Suggests changes of settings that make a run fit into device memory, cheapest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from covey.config import Config, parse_config, toml_value
from covey.config.resolve import objective_of
from covey.lab.plan.finding import Finding
from covey.lab.plan.forecast import Device, Forecast, size_text
from covey.lab.plan.memory import MARGIN, forecast
from covey.lab.plan.model_shape import Shape
from covey.lab.plan.task_facts import TaskFacts

LEAST_CONCURRENT = 64
"""The smallest value of `engine.max_concurrent` that Covey suggests, because lower values slow
generation and save little memory."""
RANK = 16
"""LoRA rank of a suggested adapter."""

RANKS = (2, 4, 8, 16, 32, 64)
"""The numbers of ranks that `ranks_that_fit` tries."""

Settings = Mapping[str, Any]


def memory_findings(
    config: Config, found: Forecast, facts: TaskFacts, shape: Shape, ranks: int = 1
) -> Iterator[Finding]:
    """Yield a finding if the run needs more memory than its device has."""
    if found.fits:
        return
    needs, memory = size_text(found.peak), size_text(found.device.memory)
    enough = f"{size_text(found.peak / (1 - MARGIN))}, which leaves a tenth free"
    needed = ranks_that_fit(config, found.device, facts, shape)
    if ranks == 1:
        changes = settings_that_fit(config, found.device, facts, shape)
        settings, docs = tuple(changes or ("model.path",)), "docs/memory.md"
        subject, remedy = "the run", f"use a device with {enough}"
        if changes is not None:
            remedy = "set " + ", ".join(f"{key} = {toml_value(v)}" for key, v in changes.items())
            peak = forecast(changed(config, changes), found.device, facts).peak
            remedy += f": the peak is then {size_text(peak)}"
        if needed is not None:
            remedy += f"; or train on {needed} such devices with parallel.strategy = 'fsdp'"
    else:
        settings, docs = ("parallel.strategy",), "docs/scaling.md"
        subject, remedy = f"each of {ranks} ranks", f"use devices with {enough}"
        if needed is not None:
            remedy = f"train on {needed} ranks with parallel.strategy = 'fsdp'"
    phase = found.peak_phase
    largest = max((p for p in found.parts if phase in p.phases), key=lambda p: p.bytes)
    yield Finding(
        kind="risk",
        title=f"{subject} needs {needs}, but {found.device.name} has {memory}",
        why="The run would run out of memory. Largest part: "
        f"{largest.name}, {size_text(largest.bytes)} ({largest.why}).",
        remedy=remedy,
        docs=docs,
        settings=settings,
    )


def ranks_that_fit(config: Config, device: Device, facts: TaskFacts, shape: Shape) -> int | None:
    """Return the smallest number of devices on which a sharded run fits with 10 % of memory free.

    Return None if no number of devices in `RANKS` is enough. Even many devices may not be enough,
    because each device also needs the engine's full copy of the weights.
    """
    sharded = changed(config, {"parallel.strategy": "fsdp"})
    for ranks in RANKS:
        found = forecast(sharded, device, facts, shape, ranks)
        if found.peak <= (1 - MARGIN) * device.memory:
            return ranks
    return None


def settings_that_fit(
    config: Config, device: Device, facts: TaskFacts, shape: Shape
) -> Settings | None:
    """Return the cheapest changes of settings that leave 10 % of the device's memory free."""

    def fitting(changes: Settings) -> Settings | None:
        """Return `changes`, and lower `train.micro_batch_tokens` if the micro-batch does not fit.

        Return None if no micro-batch size fits into memory.
        """
        same_shape = shape if "adapter.rank" not in changes else None
        found = forecast(changed(config, changes), device, facts, same_shape)
        tokens = found.suggested_micro_batch_tokens
        if tokens is None or tokens >= found.micro_batch_tokens:
            fits = tokens is not None and found.peak <= (1 - MARGIN) * device.memory
            return changes if fits else None
        return {**changes, "train.micro_batch_tokens": tokens}

    chosen: dict[str, Any] = {}
    found: Settings | None = None
    for change in _changes(config):
        chosen |= change
        if (found := fitting(chosen)) is not None:
            break
    for key in list(chosen)[:-1] if found is not None else ():
        fewer = {k: v for k, v in chosen.items() if k != key}
        if (less := fitting(fewer)) is not None:  # a later change made this one unnecessary
            chosen, found = fewer, less
    return found


def _changes(config: Config) -> Iterator[Settings]:
    """Yield changes of settings to try, from the cheapest to the most drastic."""
    yield {}  # a smaller train.micro_batch_tokens alone
    if not config.model.gradient_checkpointing:
        yield {"model.gradient_checkpointing": True}
    if not config.model.offload_activations:
        yield {"model.gradient_checkpointing": True, "model.offload_activations": True}
    if config.reference.kind == "frozen" and "reference" in objective_of(config).needs:
        yield {"reference.kind": "offloaded"}
    if config.engine.max_concurrent > LEAST_CONCURRENT:
        yield {"engine.max_concurrent": LEAST_CONCURRENT}
    if config.optimizer.state != "compact":
        yield {"optimizer.state": "compact"}
    if not config.adapter.rank:
        yield {"adapter.rank": RANK}


def changed(config: Config, changes: Settings) -> Config:
    """Return a changed copy of a configuration; `changes` maps dotted names to new values."""
    data = config.model_dump()
    for key, value in changes.items():
        table, _, name = key.partition(".")
        data[table][name] = value
    return parse_config(data)
