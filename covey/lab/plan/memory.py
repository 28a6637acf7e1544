"""Forecasts a run's peak memory, part by part, without loading the model.

A training step has phases that do not overlap: generation, log-probs without gradient, forward and
backward passes, and the optimizer step. Each part of the memory is allocated in one or more phases.
The phase that needs the most memory determines the peak. The forecast assumes the worst case: all
completions have `rollout.max_tokens` tokens, and all prompts are as long as the longest prompt of a
sample.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from covey.accel.sizes import CHUNK_STEP, LIVE_COPIES, chunk_rows, padded_tokens
from covey.config import Config, parse_config, toml_value
from covey.config.resolve import objective_of, resolve
from covey.config.schema import Adapter
from covey.lab.plan.equivalence import Finding
from covey.lab.plan.forecast import (
    ALWAYS,
    FRAMEWORK,
    MICRO_BATCH_STEP,
    Device,
    Forecast,
    Part,
    RunFacts,
    engine_parts,
    size_text,
)
from covey.lab.plan.model_shape import FLOAT, Pass, Shape, passing_bytes, shape_of, training_bytes
from covey.lab.plan.task_facts import TaskFacts, task_facts
from covey.models.model_path import adapter_base

MARGIN = 0.1
"""The fraction of a device's memory that suggested settings leave free."""
FRAGMENTATION = 0.1
"""The assumed memory that fragmentation wastes on a CPU, as a fraction of activation memory.
Fragmentation occurs because malloc cannot always reuse the memory of freed tensors. In
measurements, fragmentation wasted 0 to 0.7 times the activation memory."""


def forecast(
    config: Config,
    device: Device | None = None,
    facts: TaskFacts | None = None,
    shape: Shape | None = None,
    ranks: int = 1,
) -> Forecast:
    """Forecast the peak memory of a run on a device.

    If `device` is None, the forecast is for the run's device on this machine. With several ranks,
    the forecast is for one rank on its own device. If `facts` or `shape` is None, compute it from
    `config`.
    """
    config = resolve(config)
    run = RunFacts(
        config=config,
        device=Device.here(config.model.device) if device is None else device,
        shape=shape_of(config) if shape is None else shape,
        facts=task_facts(config) if facts is None else facts,
        objective=objective_of(config),
        ranks=ranks,
    )
    tokens = config.train.micro_batch_tokens
    return Forecast(
        device=run.device,
        parts=_parts(run, tokens),
        micro_batch_tokens=tokens,
        suggested_micro_batch_tokens=_suggest(run),
        notes=_notes(run),
    )


def _suggest(run: RunFacts) -> int | None:
    """Return the largest `train.micro_batch_tokens` that leaves 10 % of memory free, or None."""
    room = (1 - MARGIN) * run.device.memory

    def fits(steps: int) -> bool:
        parts = _parts(run, steps * MICRO_BATCH_STEP)
        return max(sum(p.bytes for p in parts if phase in p.phases) for phase in ALWAYS) <= room

    all_at_once = -(-run.rows * run.row_tokens // MICRO_BATCH_STEP)
    # One micro-batch may fit even if two smaller micro-batches do not fit, because a single
    # micro-batch needs no accumulated gradients besides its activations.
    if fits(all_at_once):
        return max(all_at_once * MICRO_BATCH_STEP, run.config.train.micro_batch_tokens)
    low, high = 0, all_at_once - 1
    while low < high:  # fits(low) holds, or low is 0
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * MICRO_BATCH_STEP or None


def _micro_batch(run: RunFacts, micro_batch_tokens: int) -> Pass:
    completion, group_size = run.completion, run.config.rollout.group_size
    if run.on_gpu:
        rows, prompts = largest_micro_batch(
            run.rows, group_size, run.prompt, completion, micro_batch_tokens
        )
    else:
        rows = min(run.rows, max(1, micro_batch_tokens // run.row_tokens))
        # Packed rows share a group's prompt, and the model does not read the last tokens.
        prompts = min(rows, -(-rows // group_size))
    packed = run.shape.fused_attention
    tokens = rows * run.row_tokens
    if packed:
        tokens = prompts * run.prompt + rows * (completion - 1)
    chosen = rows * completion
    return Pass(
        rows=rows,
        columns=run.row_tokens - (1 if packed else 0),
        tokens=padded_tokens(tokens) if run.captured else tokens,
        chosen=padded_tokens(chosen) if run.captured else chosen,
        packed=packed,
    )


def _parts(run: RunFacts, micro_batch_tokens: int) -> tuple[Part, ...]:
    batch = _micro_batch(run, micro_batch_tokens)
    framework, why = FRAMEWORK[run.device.kind]
    elsewhere = run.config.engine.kind == "vllm" or run.config.cluster.engine_actors
    return (
        Part("framework", framework, ALWAYS, why),
        *_model_parts(run),
        *([] if elsewhere else engine_parts(run)),
        *_pass_parts(run, batch),
        *([] if run.sharded else _gradient_parts(run, batch)),
    )


def _model_parts(run: RunFacts) -> list[Part]:
    shape, size = run.shape, run.size
    weights = shape.parameters + shape.added
    state = run.config.optimizer.state
    master, moments = STATE_BYTES[state]
    others = [_reference_part(run, weights), *_teacher_parts(run)]
    if "values" in run.objective.needs:
        others += _critic_parts(run, master, moments)
    if run.sharded:
        return [*_sharded_parts(run, moments), *others]
    overlap, engine, copies = run.config.overlap, run.config.engine, list[Part]()
    if engine.kind != "native" and engine.device in ("auto", run.config.model.device):
        waiting = overlap.staleness + 1 if overlap.mode == "copy" and not overlap.in_flight else 0
        held = weights + shape.trained * (1 + waiting)
        why = f"a copy, 1 to hand over, {waiting} waiting"
        copies.append(Part("weights of the engine", held * size, ALWAYS, why))
    return [
        Part("weights", weights * size, ALWAYS, f"{weights:,} parameters of {size} bytes"),
        Part(
            "master weights",
            shape.trained * master if size < FLOAT else 0,
            ALWAYS,
            "trained parameters in float32" + ", lower half" * (state == "compact"),
        ),
        Part(
            "moments",
            shape.trained * moments,
            ALWAYS,
            f"AdamW's two moments of {shape.trained:,} trained parameters",
        ),
        *others,
        *copies,
    ]


def _pass_parts(run: RunFacts, batch: Pass) -> list[Part]:
    shape, size, config, device = run.shape, run.size, run.config, run.device.kind
    checkpointing = config.model.gradient_checkpointing
    layout = "packed" if batch.packed else "padded"
    layout += ", recomputed" if checkpointing else ""
    offload = checkpointing and config.model.offload_activations
    layout += ", layer inputs in main memory" if offload else ""
    graph = " in a CUDA graph, which keeps its memory" if run.captured else ""
    logits = _logits(run, batch)
    kept = training_bytes(
        shape, size, batch, device=device, checkpointing=checkpointing,
        head=logits + _head_gradient(run), offload=offload,
    )  # fmt: skip
    # Log-probs outside of the training pass; a CUDA graph of the policy computes them in the memory
    # of its own activations.
    needs = run.objective.needs
    by_reference = "reference" in needs and config.reference.kind != "server"
    by_teacher = "teacher" in needs and (config.teacher.path or config.teacher.policy)
    old_policy = (
        needs & {"old_logp", "old_entropy"} or config.train.optimizer_steps > 1 or config.stale
    )
    # A pass that is not fused took twice the counted bytes in measurements.
    passing = (1 if run.on_gpu and shape.fuses else 2) * passing_bytes(shape, size, batch, device)
    return [
        Part(
            "activations",
            kept,
            ALWAYS if run.captured else ("update",),
            f"{batch.tokens:,} tokens {layout}, in {batch.rows} rows{graph}",
        ),
        Part(
            "fragmentation",
            int(FRAGMENTATION * kept) if device == "cpu" else 0,
            ("update",),
            "holes that malloc leaves between activations",
        ),
        Part(
            "no-grad pass",
            passing if by_reference or by_teacher or (old_policy and not run.captured) else 0,
            ("prepare",),
            "the same tokens without gradient, for the reference or old_logp",
        ),
        Part(
            "logits",
            logits,
            ALWAYS if run.captured else ("prepare", "update"),
            f"chunk by chunk, within {config.train.logits_megabytes:g} MiB",
        ),
    ]


def _gradient_parts(run: RunFacts, batch: Pass) -> list[Part]:
    shape = run.shape
    several = batch.rows < run.rows
    head = shape.head * run.size if shape.head_trained else 0
    embedding = head + (shape.head * FLOAT if head and run.size < FLOAT else 0)
    how = ", accumulated over micro-batches" if several else ""
    # With one micro-batch, gradients reuse the memory of the activations.
    phases = ALWAYS[2:] if several else ALWAYS[3:]
    if run.gradient_sinks or (run.size < FLOAT and run.config.optimizer.state == "compact"):
        phases, how = ALWAYS, ", kept until the next optimizer step"
        embedding = 0 if run.gradient_sinks and shape.fuses else head
    return [
        Part("gradients", shape.trained * FLOAT, phases, f"float32{how}"),
        Part(
            "head gradient",
            _head_gradient(run),
            ("update", "step"),
            "of the output layer, before it is added",
        ),
        Part("embedding grad", embedding, ("step",), "of the embedding, before it is added"),
    ]


def _head_gradient(run: RunFacts) -> int:
    """Return the bytes of a separate gradient of the output layer, or 0 if there is none."""
    if run.gradient_sinks or run.sharded:
        return 0
    return run.shape.head * run.size * run.shape.head_trained


def _logits(run: RunFacts, batch: Pass) -> int:
    vocabulary, megabytes = run.shape.vocabulary, run.config.train.logits_megabytes
    if run.on_gpu:  # the logits, and a rounded copy as their gradient in 16-bit precision
        token = vocabulary * (FLOAT + run.size if run.size < FLOAT else FLOAT)
        rows = max(1, int(megabytes * 2**20 / token))
        rows -= rows % CHUNK_STEP if rows > CHUNK_STEP else 0
        return min(rows, batch.chosen) * token
    rows = min(chunk_rows(vocabulary, megabytes), batch.chosen)
    # In float32, the logits need no rounded copy.
    copies = LIVE_COPIES if run.size < FLOAT else LIVE_COPIES - 1
    return rows * vocabulary * FLOAT * copies


def _notes(run: RunFacts) -> tuple[str, ...]:
    prompts = f"prompts of {run.prompt} tokens"
    if run.facts.longest_prompt is None:
        prompts += f", which could not be measured ({run.facts.problem})"
    else:
        prompts += f", the longest of {run.facts.measured}"
    assumed = f"assumed: {prompts}; all completions of {run.completion} tokens"
    if run.ranks == 1:
        return (assumed,)
    how = f"{run.shards} of them share one model" if run.sharded else "each has the model"
    return (f"for each of {run.ranks} ranks ({run.config.parallel.strategy}: {how})", assumed)


# Memory of the models besides the policy: the reference, a teacher and a critic.

STATE_BYTES = {"float32": (FLOAT, 2 * FLOAT), "compact": (FLOAT // 2, FLOAT)}
"""Maps each value of `optimizer.state` to two numbers of bytes per trained parameter: one for the
master weight of a bfloat16 weight, and one for AdamW's two moments."""
ONLY_WHILE_USED = "on the device only while it is used"


def _teacher_parts(run: RunFacts) -> list[Part]:
    teacher = run.config.teacher
    if "teacher" not in run.objective.needs or not (teacher.policy or teacher.path):
        return []
    under = run.shape.rank and not adapter_base(run.config.model.path)
    if teacher.policy == "current" or (teacher.policy and under):
        return [Part("teacher", 0, ALWAYS, f"{teacher.policy}: the policy's own weights")]
    if teacher.policy:  # computed like a reference of the same kind
        shape, why = run.shape, f"{teacher.policy}: a second copy of the weights"
    else:
        model = run.config.model.model_copy(update={"path": teacher.path})
        alone = run.config.model_copy(update={"model": model, "adapter": Adapter()})
        shape, why = shape_of(alone), f"{teacher.path}: its weights"
    weights = shape.parameters + shape.added
    held, why = _held(run, weights, why, averaged=teacher.policy == "moving")
    if teacher.offload and run.on_gpu:
        return [Part("teacher", held, ("prepare",), f"{why}, {ONLY_WHILE_USED}")]
    return [Part("teacher", held, ALWAYS, why)]


def _reference_part(run: RunFacts, weights: int) -> Part:
    kind = run.config.reference.kind
    under = run.shape.rank and kind == "frozen" and not adapter_base(run.config.model.path)
    if "reference" not in run.objective.needs:
        return Part("reference", 0, ALWAYS, "none: the objective has no penalty")
    if kind in ("server", "adapter_off") or under:
        return Part("reference", 0, ALWAYS, f"{kind}: no copy on this device")
    if kind == "offloaded" and run.on_gpu:
        if run.sharded:
            what = "offloaded: in main memory, gathered block by block"
            return Part("reference", 0, ALWAYS, what)
        what = f"offloaded: a copy, {ONLY_WHILE_USED}"
        return Part("reference", weights * run.size, ("prepare",), what)
    averaged = kind in ("moving", "renewed")
    held, why = _held(run, weights, f"{kind}: a second copy of the weights", averaged=averaged)
    return Part("reference", held, ALWAYS, why)


def _held(run: RunFacts, weights: int, why: str, *, averaged: bool) -> tuple[int, str]:
    """Return the bytes of a second model on this rank, and the text `why` with details appended."""
    held = weights * run.size
    if averaged and run.size < FLOAT:
        held, why = held + weights * FLOAT, f"{why}, also in float32"
    if run.sharded:
        held, why = -(-held // run.shards), f"{why}, 1 of {run.shards} parts"
    return held, why


def _critic_parts(run: RunFacts, master: int, moments: int) -> list[Part]:
    """Return the memory of a critic's weights, optimizer state and gradients.

    The critic's activations do not count, because critic and policy are never active at the same
    time. `master` and `moments` are the bytes of a parameter's master weight and of its moments.
    """
    config, path = run.config, run.config.critic.path
    model = config.model.model_copy(update={"path": path})
    shape = shape_of(config.model_copy(update={"model": model})) if path else run.shape
    kept = (shape.parameters + shape.added) * run.size
    kept += shape.trained * (moments + (master if run.size < FLOAT else 0))
    return [
        Part("critic", kept, ALWAYS, "a second model with master weights and moments"),
        Part("critic gradients", shape.trained * FLOAT, ("update", "step"), "float32"),
    ]


# Memory of a rank whose parameters are sharded (parallel.strategy = "fsdp").
#
# A rank stores its shard of the float32 weights, moments and gradients, and the engine's full copy
# of the weights. During a forward or backward pass it also has the complete weights of the current
# and the next block, the embedding, the head and the last norm. With only one rank, fused passes
# use weights that are gathered once per optimizer step.

BLOCKS = 2
"""The number of transformer blocks that FSDP gathers at once: the current block, and either the
next block or the gradients of the previous block."""


def _sharded_parts(run: RunFacts, moments: int) -> list[Part]:
    """Return the memory of weights, gradients and optimizer state on one FSDP rank.

    `moments` is the number of bytes per trained parameter for AdamW's two moments.
    """
    shape, size, shards = run.shape, run.size, run.shards
    # With one rank, all weights are gathered once per optimizer step, instead of block by block.
    stays_gathered = shards == 1 and run.on_gpu and shape.fuses
    weights = shape.parameters + shape.added
    if stays_gathered:
        joined = 0 if shape.rank else shape.layers * shape.hidden * (
            shape.query + 2 * shape.key + 2 * shape.inner
        )  # fmt: skip
        gathered = [
            Part("gathered", weights * size, ("prepare", "update"), "whole weights"),
            Part("fused weights", joined * size, ALWAYS, "gathered projections, concatenated"),
        ]
    else:
        gathered = _gathered_by_block(shape, size)
    own = shape.trained * FLOAT + (weights - shape.trained) * size
    what = f"1 of {shards} parts"
    return [
        Part("weights", weights * size, ALWAYS, "the engine's whole copy"),
        Part("sharded weights", -(-own // shards), ALWAYS, f"{what}, trained ones in float32"),
        Part(
            "moments",
            -(-shape.trained * moments // shards),
            ALWAYS,
            f"{what} of AdamW's two moments of {shape.trained:,} trained parameters",
        ),
        Part(
            "gradients",
            -(-shape.trained * FLOAT // shards),
            ALWAYS if stays_gathered else ("update", "step"),
            f"{what}, float32" + ", kept until the next optimizer step" * stays_gathered,
        ),
        *gathered,
    ]


def _gathered_by_block(shape: Shape, size: int) -> list[Part]:
    if shape.fuses:
        block = 2 * shape.hidden * (shape.query + shape.key) + shape.hidden * (3 * shape.inner + 2)
        block += shape.added // shape.layers
    else:
        block = (shape.parameters + shape.added - shape.head) // shape.layers
    ends = max(shape.head, shape.parameters + shape.added - shape.layers * block)
    trained = shape.trained // shape.layers if shape.rank else block
    # With bfloat16 weights, the reduce-scatter also needs a float32 copy of a block's gradients.
    gradients = trained * (size + (FLOAT if size < FLOAT else 0))
    gradients += shape.head * size * shape.head_trained
    return [
        Part(
            "gathered",
            (BLOCKS * block + ends) * size,
            ("prepare", "update"),
            f"whole weights of {BLOCKS} blocks, embedding and head",
        ),
        Part("gathered grad", gradients, ("update",), "of one block, whole"),
    ]


# Computes the largest micro-batch of a training step without generating rollouts.


@lru_cache(maxsize=256)
def largest_micro_batch(
    rows: int, group_size: int, prompt: int, completion: int, micro_batch_tokens: int
) -> tuple[int, int]:
    """Return the numbers of completions and of prompts in the largest micro-batch on a GPU.

    The trainer divides `rows` completions, in groups of `group_size`, into micro-batches with
    `balanced_parts` (models/micro_batches.py). `balanced_parts` splits groups of more than
    `micro_batch_tokens` tokens, and packs the parts into as few micro-batches as possible. Each
    prompt has `prompt` tokens, and each completion has `completion` tokens.
    """
    groups = -(-rows // group_size)
    if groups * prompt + rows * (completion - 1) <= micro_batch_tokens:
        return rows, groups
    room = micro_batch_tokens - prompt
    most = max(1, room // (completion - 1)) if completion > 1 else (group_size if room >= 0 else 1)
    pieces = [
        (min(most, size - start), group)
        for group in range(groups)
        for size in [min(group_size, rows - group * group_size)]
        for start in range(0, size, most)
    ]
    pieces.sort(key=lambda piece: -piece[0])
    count = max(1, -(-(len(pieces) * prompt + rows * (completion - 1)) // micro_batch_tokens))
    while True:
        parts: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        heap = [(0, part) for part in range(count)]
        for piece in pieces:  # the largest piece first, into the micro-batch with the fewest tokens
            tokens, part = heap[0]
            parts[part].append(piece)
            heapq.heapreplace(heap, (tokens + prompt + piece[0] * (completion - 1), part))
        if count >= len(pieces) or max(heap)[0] <= micro_batch_tokens:
            sizes = [(sum(n for n, _ in part), len({g for _, g in part})) for part in parts]
            return max(sizes, key=lambda size: size[0] * (completion - 1) + size[1] * prompt)
        count += 1


# Suggests changes of settings that make a run fit into device memory, cheapest first.


LEAST_CONCURRENT = 64
"""The smallest value of `engine.max_concurrent` that Covey suggests, because lower values slow
generation and save little memory."""
RANK = 16

RANKS = (2, 4, 8, 16, 32, 64)
"""The numbers of ranks that `ranks_that_fit` tries."""

Settings = Mapping[str, Any]


def memory_findings(
    config: Config, found: Forecast, facts: TaskFacts, shape: Shape, ranks: int = 1
) -> Iterator[Finding]:
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
    data = config.model_dump()
    for key, value in changes.items():
        table, _, name = key.partition(".")
        data[table][name] = value
    return parse_config(data)
