"""How much memory a run will take at its peak, part by part, before anything is loaded.

A run goes through phases that do not overlap: it samples, asks the reference, goes forward and
backward, and takes an optimizer step. Each part of the memory is there in some of them, and the
peak is that of the fullest phase. Everything is counted at its worst: all answers as long as
`rollout.max_tokens`, all prompts as long as the longest of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from covey.accel.attention import SHORT
from covey.accel.head import LIVE_COPIES, chunk_rows
from covey.accel.static_buffers import bucket
from covey.analysis.plan.activations import FLOAT, Pass, passing_bytes, training_bytes
from covey.analysis.plan.batches import largest_part
from covey.analysis.plan.device import Device
from covey.analysis.plan.forecast import ALWAYS, BUDGET_STEP, Forecast, Part
from covey.analysis.plan.pooled import Call, pooled_parts
from covey.analysis.plan.prompts import Lengths, prompt_lengths
from covey.analysis.plan.shapes import Shape, shape_of
from covey.config import Config
from covey.engines.native.backend import CAPACITY_STEP, SPARE_BYTES
from covey.engines.native.llama_decoder import FUSED_COPY_BYTES
from covey.engines.native.prefill import PREFILL_TOKENS
from covey.models.adapter import adapter_base
from covey.objective import Objective
from covey.training.build import objective_of, resolve, sampling_of

MARGIN = 0.1
"""Share of a device's memory that a suggested budget leaves free."""
PICK_COPIES, TRUNCATED_COPIES, GREEDY_COPIES = 4, 9, 2
"""Tensors of the size of the sampler's logits while a token is drawn: from all tokens, from those
that a truncation leaves, which sorts them, and greedily."""

STATE_BYTES = {"float32": (FLOAT, 2 * FLOAT), "compact": (FLOAT // 2, FLOAT)}
"""By optimizer.state: of what completes a bfloat16 weight to its master, and of two moments."""
CHUNK_STEP = 128
"""On a GPU a chunk of more tokens than these is a multiple of them."""
HOLES = 0.1
"""Share of the activations that malloc loses on a CPU between those that are freed and those that
are kept. It was measured between 0 and 0.7: what is freed next may fill the holes, or may not."""


def forecast(config: Config, device: Device | None = None) -> Forecast:
    """Foretell the peak memory of a run, on `device` or on what this machine would take."""
    config = resolve(config)
    device = Device.here(config.model.device) if device is None else device
    facts = _Facts(
        config=config,
        device=device,
        shape=shape_of(config),
        lengths=prompt_lengths(config),
        objective=objective_of(config),
    )
    return Forecast(
        device=device,
        parts=facts.parts(config.train.micro_batch_tokens),
        micro_batch_tokens=config.train.micro_batch_tokens,
        suggested_budget=_suggest(facts),
        notes=facts.notes(),
    )


def _suggest(facts: _Facts) -> int | None:
    """Return the largest budget that fits with a margin; beyond a step's tokens it is any."""
    most = facts.rows * facts.row_tokens
    room = (1 - MARGIN) * facts.device.memory

    def fits(steps: int) -> bool:
        parts = facts.parts(steps * BUDGET_STEP)
        return max(sum(p.bytes for p in parts if phase in p.phases) for phase in ALWAYS) <= room

    all_at_once = -(-most // BUDGET_STEP)
    # A single pass may fit where two do not: gradients of the first do not wait for the second.
    if fits(all_at_once):
        return max(all_at_once * BUDGET_STEP, facts.config.train.micro_batch_tokens)
    low, high = 0, all_at_once - 1
    while low < high:  # fits(low) holds, or low is 0
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * BUDGET_STEP or None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """All that decides."""

    config: Config
    device: Device
    shape: Shape
    lengths: Lengths
    objective: Objective

    @property
    def size(self) -> int:
        """Bytes of a number that the model computes with."""
        dtype = self.config.model.dtype
        bfloat16 = dtype == "bfloat16" or (dtype == "auto" and self.device.kind == "cuda")
        return 2 if bfloat16 else FLOAT

    @property
    def row_tokens(self) -> int:
        """A prompt and its answer."""
        return self.lengths.longest + self.config.rollout.max_tokens

    @property
    def rows(self) -> int:
        """Answers in an optimizer step."""
        rollout = self.config.rollout
        return -(-rollout.prompts_per_step * rollout.group_size // self.config.train.mini_batches)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is one."""
        return self.device.kind == "cuda"

    @property
    def sinks(self) -> bool:
        """Whether gradients are added up in float32 beside weights of bfloat16, on a GPU."""
        return self.on_gpu and self.size < FLOAT

    @property
    def recorded(self) -> bool:
        """Whether training passes are graphs, whose activations stay between steps."""
        flash = self.on_gpu and self.shape.fuses and self.size < FLOAT
        return flash and self.config.records_passes

    def micro_batch(self, micro_batch_tokens: int) -> Pass:
        """Return the largest forward pass that a token budget makes of the longest rows."""
        answers, prompt = self.config.rollout.max_tokens, self.lengths.longest
        samples = self.config.rollout.group_size
        if self.on_gpu:
            rows, prompts = largest_part(self.rows, samples, prompt, answers, micro_batch_tokens)
        else:
            rows = min(self.rows, max(1, micro_batch_tokens // self.row_tokens))
            # A group's prompt stands once among packed tokens, and last tokens are never read.
            prompts = min(rows, -(-rows // samples))
        packed = self.shape.fused_attention
        tokens = prompts * prompt + rows * (answers - 1) if packed else rows * self.row_tokens
        chosen = rows * answers
        return Pass(
            rows=rows,
            columns=self.row_tokens - (1 if packed else 0),
            tokens=bucket(tokens) if self.recorded else tokens,
            chosen=bucket(chosen) if self.recorded else chosen,
            packed=packed,
        )

    def parts(self, micro_batch_tokens: int) -> tuple[Part, ...]:
        """Return all parts of the memory."""
        batch = self.micro_batch(micro_batch_tokens)
        return (
            Part(
                name="framework",
                bytes=self.device.framework,
                phases=ALWAYS,
                why=self.device.framework_why,
            ),
            *self._kept(),
            *_sampler_parts(self),
            *self._passes(batch),
            *self._gradients(batch),
        )

    def _kept(self) -> list[Part]:
        """Return what is there from the beginning to the end."""
        shape, size = self.shape, self.size
        weights = shape.parameters + shape.added
        state = self.config.optimizer.state
        master, moments = STATE_BYTES[state]
        return [
            Part(
                name="weights",
                bytes=weights * size,
                phases=ALWAYS,
                why=f"{weights:,} parameters of {size} bytes",
            ),
            Part(
                name="masters",
                bytes=shape.trained * master if size < FLOAT else 0,
                phases=ALWAYS,
                why="trained parameters in float32" + ", lower half" * (state == "compact"),
            ),
            Part(
                name="moments",
                bytes=shape.trained * moments,
                phases=ALWAYS,
                why=f"AdamW's two, of {shape.trained:,} trained parameters",
            ),
            self._reference(weights),
        ]

    def _reference(self, weights: int) -> Part:
        kind, phases, held = self.config.reference.kind, ALWAYS, weights * self.size
        why = f"{kind}: a second copy of the weights"
        under = self.shape.rank and kind == "frozen" and not adapter_base(self.config.model.path)
        if "reference" not in self.objective.needs:
            held, why = 0, "none: the objective has no penalty"
        elif kind == "server" or kind == "adapter_off" or under:
            held, why = 0, f"{kind}: no copy here"
        elif kind == "offloaded" and self.device.kind == "cuda":
            phases, why = ("prepare",), "offloaded: a copy that visits the device"
        elif kind in ("moving", "renewed") and self.size < FLOAT:
            held, why = held + weights * FLOAT, f"{kind}: a copy of the weights, and float32"
        return Part(name="reference", bytes=held, phases=phases, why=why)

    def _passes(self, batch: Pass) -> list[Part]:
        """Return what reading tokens takes, with gradient and without."""
        shape, size, config, device = self.shape, self.size, self.config, self.device.kind
        checkpointing = config.model.gradient_checkpointing
        how = f"{'packed' if batch.packed else 'padded'}{', recomputed' if checkpointing else ''}"
        asked = "reference" in self.objective.needs and config.reference.kind != "server"
        old = self.objective.needs & {"old_logp", "old_entropy"}
        reads = config.train.updates > 1 or bool(old)
        # What the policy reads by a graph is read where the activations are.
        reads = asked or (reads and not self.recorded)
        stays = " in a recorded graph, which stays" if self.recorded else ""
        chunk = self._chunk(batch)
        kept = training_bytes(
            shape,
            size,
            batch,
            device=device,
            checkpointing=checkpointing,
            head=chunk + self._head_gradient(),
        )
        passing = passing_bytes(shape, size, batch, device)
        return [
            Part(
                name="activations",
                bytes=kept,
                phases=ALWAYS if self.recorded else ("update",),
                why=f"{batch.tokens:,} tokens {how}, in {batch.rows} rows{stays}",
            ),
            Part(
                name="holes",
                bytes=int(HOLES * kept) if device == "cpu" else 0,
                phases=("update",),
                why="what malloc loses between activations",
            ),
            Part(
                name="reading",
                # What is not fused was measured to take twice of what is counted.
                bytes=(1 if self.on_gpu and shape.fuses else 2) * passing if reads else 0,
                phases=("prepare",),
                why="the same tokens without gradient, for the reference or old_logp",
            ),
            Part(
                name="logits",
                bytes=chunk,
                phases=ALWAYS if self.recorded else ("prepare", "update"),
                why=f"a chunk at a time, within {config.train.logits_megabytes:g} MiB",
            ),
        ]

    def _gradients(self, batch: Pass) -> list[Part]:
        """Return what an optimizer step collects."""
        shape = self.shape
        several = batch.rows < self.rows
        head = shape.head * self.size if shape.head_trained else 0
        embedding = head + (shape.head * FLOAT if head and self.size < FLOAT else 0)
        how = ", added up over passes" if several else ""
        # With one pass a step, gradients take the place of the activations they came from.
        phases = ALWAYS[2:] if several else ALWAYS[3:]
        if self.sinks or (self.size < FLOAT and self.config.optimizer.state == "compact"):
            # Sinks hold the last sum until the next takes its place.
            phases, how = ALWAYS, ", kept until the next take their place"
            embedding = 0 if self.sinks and shape.fuses else head
        return [
            Part(
                name="gradients",
                bytes=shape.trained * FLOAT,
                phases=phases,
                why=f"float32{how}",
            ),
            Part(
                name="head",
                bytes=self._head_gradient(),
                phases=("update", "step"),
                why="gradient of the output layer before it is added",
            ),
            Part(
                name="embedding",
                bytes=embedding,
                phases=("step",),
                why="gradient of the embedding before it is added",
            ),
        ]

    def _head_gradient(self) -> int:
        """Return what the output layer's gradient takes that is not counted among all."""
        return 0 if self.sinks else self.shape.head * self.size * self.shape.head_trained

    def _chunk(self, batch: Pass) -> int:
        vocabulary, megabytes = self.shape.vocabulary, self.config.train.logits_megabytes
        if self.on_gpu:  # logits, and their gradient if it is rounded
            token = vocabulary * (FLOAT + self.size if self.size < FLOAT else FLOAT)
            rows = max(1, int(megabytes * 2**20 / token))
            rows -= rows % CHUNK_STEP if rows > CHUNK_STEP else 0
            return min(rows, batch.chosen) * token
        rows = min(chunk_rows(vocabulary, megabytes), batch.chosen)
        # In float32 there is no rounded copy.
        copies = LIVE_COPIES if self.size < FLOAT else LIVE_COPIES - 1
        return rows * vocabulary * FLOAT * copies

    def notes(self) -> tuple[str, ...]:
        """Return what was assumed."""
        answers = f"answers of {self.config.rollout.max_tokens} tokens"
        return (f"assumed: {self.lengths.why}, all {answers}",)


def _sampler_parts(facts: _Facts) -> list[Part]:
    """Return what sampling takes, in a step or in an evaluation, whichever is more."""
    config, held_out = facts.config, facts.lengths.held_out
    truncates = sampling_of(config).distribution.truncates
    copies = TRUNCATED_COPIES if truncates else PICK_COPIES
    rollout = config.rollout
    calls = [(rollout.prompts_per_step, rollout.group_size, copies)]
    if config.evaluate.every:
        calls.append((held_out, 1, GREEDY_COPIES))
        if config.evaluate.samples:
            calls.append((held_out, config.evaluate.samples, copies))
    if facts.on_gpu and (facts.shape.fuses or facts.shape.fused_attention):
        return _pooled(facts, calls)
    writings = [_writing(facts, *call) for call in calls]
    largest = max(writings, key=lambda parts: sum(part.bytes for part in parts))
    joined = facts.shape.joined * facts.size
    if joined and joined <= FUSED_COPY_BYTES and not facts.shape.rank:
        why = "a small model's weights, side by side"
        return [*largest, Part(name="decoder", bytes=joined, phases=ALWAYS, why=why)]
    return list(largest)


def _pooled(facts: _Facts, calls: Sequence[tuple[int, int, int]]) -> list[Part]:
    """Return what sampling takes where keys and values stay from call to call."""
    slots = facts.config.engine.max_concurrent
    return pooled_parts(
        facts.shape,
        facts.size,
        [
            Call(
                questions=questions,
                samples=samples,
                copies=copies,
                # Only a truncation is drawn from as on a CPU; all else by a kernel.
                recorded_copies=copies if copies == TRUNCATED_COPIES else 1,
                slots=slots,
            )
            for questions, samples, copies in calls
        ],
        longest=facts.lengths.longest,
        room=facts.config.rollout.max_tokens,
    )


def _writing(facts: _Facts, questions: int, samples: int, copies: int) -> Sequence[Part]:
    """Return what it takes to answer questions so many times each."""
    shape, size, room = facts.shape, facts.size, facts.config.rollout.max_tokens
    slots = min(facts.config.engine.max_concurrent, questions * samples)
    read = min(questions, -(-slots // samples))
    prompt = facts.lengths.longest
    capacity = -(-(prompt + room) // CAPACITY_STEP) * CAPACITY_STEP
    position = 2 * shape.layers * shape.key * size
    cache = slots * capacity * position + slots * room * (2 * FLOAT + 8)
    kept = facts.device.kind == "cpu" and cache <= SPARE_BYTES
    together = max(1, min(read, PREFILL_TOKENS // prompt))
    reading = Pass(
        rows=together,
        columns=prompt,
        tokens=together * prompt,
        chosen=together,
        packed=False,
    )
    expanded = facts.device.kind == "cuda" or capacity > SHORT
    one_layer = slots * capacity * 2 * shape.query * size if expanded else 0
    return (
        Part(
            name="slots",
            bytes=cache,
            phases=ALWAYS if kept else ("sample",),
            why=f"keys and values of {slots} answers, {capacity} positions each",
        ),
        Part(
            name="prompts",
            bytes=read * prompt * position
            + max(passing_bytes(shape, size, reading, facts.device.kind), one_layer),
            phases=("sample",),
            why=f"keys and values of {read} prompts, and reading {together} at a time",
        ),
        Part(
            name="drawing",
            bytes=(slots * copies + read) * shape.vocabulary * FLOAT,
            phases=("sample",),
            why=f"logits of {slots} answers over {shape.vocabulary:,} tokens, {copies} times",
        ),
    )
