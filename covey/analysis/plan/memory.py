"""Forecasts a run's peak memory, part by part, without loading the model.

A training step has phases that do not overlap: generation, log-probs without gradient, forward and
backward passes, and the optimizer step. Each part of the memory is allocated in one or more phases.
The phase that needs the most memory determines the peak. The forecast assumes the worst case: all
completions have `rollout.max_tokens` tokens, and all prompts are as long as the longest prompt of a
sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.accel.sizes import CHUNK_STEP, LIVE_COPIES, chunk_rows, padded_tokens
from covey.analysis.plan.activations import FLOAT, Pass, passing_bytes, training_bytes
from covey.analysis.plan.engine_memory import engine_parts
from covey.analysis.plan.engine_sizes import largest_micro_batch
from covey.analysis.plan.forecast import (
    ALWAYS,
    FRAMEWORK,
    MICRO_BATCH_STEP,
    Device,
    Forecast,
    Part,
)
from covey.analysis.plan.model_shape import Shape, shape_of
from covey.analysis.plan.run_facts import RunFacts
from covey.analysis.plan.task_facts import TaskFacts, task_facts
from covey.config import Config
from covey.config.schema import Adapter
from covey.models.model_path import adapter_base
from covey.training.resolve import objective_of, resolve

MARGIN = 0.1
"""The fraction of a device's memory that suggested settings leave free."""
FRAGMENTATION = 0.1
"""On a CPU, freed tensors leave holes in memory that malloc cannot always reuse. FRAGMENTATION is
the assumed memory loss as a fraction of activation memory. Measured values of FRAGMENTATION range
from 0 to 0.7, because later allocations may fill the holes.
"""


def forecast(
    config: Config,
    device: Device | None = None,
    facts: TaskFacts | None = None,
    shape: Shape | None = None,
    ranks: int = 1,
) -> Forecast:
    """Forecast the peak memory of a run on `device`, by default the run's device on this machine.

    With several ranks, the forecast is for one rank on its own device. The function computes
    `facts` (about the task) and `shape` (of the model) if the caller does not pass them.
    """
    config = resolve(config)
    run = _Run(
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
        parts=run.parts(tokens),
        micro_batch_tokens=tokens,
        suggested_micro_batch_tokens=_suggest(run),
        notes=run.notes(),
    )


def _suggest(run: _Run) -> int | None:
    """Return the largest micro_batch_tokens with 10 % of memory free; None if none fits."""
    room = (1 - MARGIN) * run.device.memory

    def fits(steps: int) -> bool:
        parts = run.parts(steps * MICRO_BATCH_STEP)
        return max(sum(p.bytes for p in parts if phase in p.phases) for phase in ALWAYS) <= room

    all_at_once = -(-run.rows * run.row_tokens // MICRO_BATCH_STEP)
    # One pass may fit where two do not, because it accumulates no gradients in addition to the
    # activations.
    if fits(all_at_once):
        return max(all_at_once * MICRO_BATCH_STEP, run.config.train.micro_batch_tokens)
    low, high = 0, all_at_once - 1
    while low < high:  # fits(low) holds, or low is 0
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * MICRO_BATCH_STEP or None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run(RunFacts):
    """A run, with methods that compute the parts of its memory."""

    def micro_batch(self, micro_batch_tokens: int) -> Pass:
        """Return the size of the largest micro-batch if all sequences have full length."""
        completion, group_size = self.config.rollout.max_tokens, self.config.rollout.group_size
        if self.on_gpu:
            rows, prompts = largest_micro_batch(
                self.rows, group_size, self.prompt, completion, micro_batch_tokens
            )
        else:
            rows = min(self.rows, max(1, micro_batch_tokens // self.row_tokens))
            # Packed rows share a group's prompt, and the model does not read the last tokens.
            prompts = min(rows, -(-rows // group_size))
        packed = self.shape.fused_attention
        tokens = rows * self.row_tokens
        if packed:
            tokens = prompts * self.prompt + rows * (completion - 1)
        chosen = rows * completion
        return Pass(
            rows=rows,
            columns=self.row_tokens - (1 if packed else 0),
            tokens=padded_tokens(tokens) if self.captured else tokens,
            chosen=padded_tokens(chosen) if self.captured else chosen,
            packed=packed,
        )

    def parts(self, micro_batch_tokens: int) -> tuple[Part, ...]:
        """Return all parts of the run's memory."""
        batch = self.micro_batch(micro_batch_tokens)
        framework, why = FRAMEWORK[self.device.kind]
        elsewhere = self.config.engine.kind == "vllm" or self.config.cluster.engine_actors
        return (
            Part("framework", framework, ALWAYS, why),
            *self._model_parts(),
            *(() if elsewhere else engine_parts(self)),
            *self._pass_parts(batch),
            *([] if self.sharded else self._gradient_parts(batch)),
        )

    def _model_parts(self) -> list[Part]:
        """Return the memory of weights, optimizer state and (only with FSDP) gradients."""
        shape, size = self.shape, self.size
        weights = shape.parameters + shape.added
        state = self.config.optimizer.state
        master, moments = STATE_BYTES[state]
        others = [reference_part(self, weights), *teacher_parts(self)]
        if "values" in self.objective.needs:
            others += critic_parts(self.config, shape, size, (master, moments))
        if self.sharded:
            stays = self.shards == 1 and self.on_gpu and shape.fuses
            own = sharded_parts(shape, size, self.shards, moments, stays_gathered=stays)
            return [*own, *others]
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
            *self._engine_copies(weights),
        ]

    def _engine_copies(self, weights: int) -> list[Part]:
        """Return the memory of the engine's own weight copies on the training device."""
        overlap, engine = self.config.overlap, self.config.engine
        if engine.kind == "native" or engine.device not in ("auto", self.config.model.device):
            return []
        waiting = overlap.staleness + 1 if overlap.mode == "copy" and not overlap.in_flight else 0
        held = weights + self.shape.trained * (1 + waiting)
        why = f"a copy, 1 to hand over, {waiting} waiting"
        return [Part("weights of the engine", held * self.size, ALWAYS, why)]

    def _by_reference(self) -> bool:
        """Return whether a reference or a teacher runs on this device."""
        needs, config = self.objective.needs, self.config
        reference = "reference" in needs and config.reference.kind != "server"
        teacher = config.teacher.path or config.teacher.policy
        return reference or ("teacher" in needs and bool(teacher))

    def _pass_parts(self, batch: Pass) -> list[Part]:
        """Return the memory of forward passes with and without gradients."""
        shape, size, config, device = self.shape, self.size, self.config, self.device.kind
        checkpointing = config.model.gradient_checkpointing
        layout = "packed" if batch.packed else "padded"
        layout += ", recomputed" if checkpointing else ""
        offload = checkpointing and config.model.offload_activations
        layout += ", layer inputs in main memory" if offload else ""
        by_reference = self._by_reference()
        old_policy = self.objective.needs & {"old_logp", "old_entropy"}
        by_policy = config.train.updates > 1 or bool(old_policy) or config.stale
        # A CUDA graph of the policy computes log-probs in the memory of its activations.
        no_grad = by_reference or (by_policy and not self.captured)
        graph = " in a CUDA graph, which keeps its memory" if self.captured else ""
        chunk = self._logits(batch)
        head = chunk + self._head_gradient()
        kept = training_bytes(
            shape, size, batch, device=device, checkpointing=checkpointing, head=head,
            offload=offload,
        )  # fmt: skip
        passing = passing_bytes(shape, size, batch, device)
        return [
            Part(
                "activations",
                kept,
                ALWAYS if self.captured else ("update",),
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
                # In measurements, a pass that is not fused took twice the counted bytes.
                (1 if self.on_gpu and shape.fuses else 2) * passing if no_grad else 0,
                ("prepare",),
                "the same tokens without gradient, for the reference or old_logp",
            ),
            Part(
                "logits",
                chunk,
                ALWAYS if self.captured else ("prepare", "update"),
                f"chunk by chunk, within {config.train.logits_megabytes:g} MiB",
            ),
        ]

    def _gradient_parts(self, batch: Pass) -> list[Part]:
        """Return the memory of the gradients of an optimizer step."""
        shape = self.shape
        several = batch.rows < self.rows
        head = shape.head * self.size if shape.head_trained else 0
        embedding = head + (shape.head * FLOAT if head and self.size < FLOAT else 0)
        how = ", accumulated over micro-batches" if several else ""
        # With one micro-batch, gradients reuse the memory of the activations.
        phases = ALWAYS[2:] if several else ALWAYS[3:]
        if self.gradient_sinks or (self.size < FLOAT and self.config.optimizer.state == "compact"):
            phases, how = ALWAYS, ", kept until the next optimizer step"
            embedding = 0 if self.gradient_sinks and shape.fuses else head
        return [
            Part("gradients", shape.trained * FLOAT, phases, f"float32{how}"),
            Part(
                "head gradient",
                self._head_gradient(),
                ("update", "step"),
                "of the output layer, before it is added",
            ),
            Part("embedding grad", embedding, ("step",), "of the embedding, before it is added"),
        ]

    def _head_gradient(self) -> int:
        """Return the bytes of a separate output-layer gradient; 0 if there is none."""
        if self.gradient_sinks or self.sharded:
            return 0
        return self.shape.head * self.size * self.shape.head_trained

    def _logits(self, batch: Pass) -> int:
        vocabulary, megabytes = self.shape.vocabulary, self.config.train.logits_megabytes
        if self.on_gpu:  # logits, and their gradient if it is a rounded copy
            token = vocabulary * (FLOAT + self.size if self.size < FLOAT else FLOAT)
            rows = max(1, int(megabytes * 2**20 / token))
            rows -= rows % CHUNK_STEP if rows > CHUNK_STEP else 0
            return min(rows, batch.chosen) * token
        rows = min(chunk_rows(vocabulary, megabytes), batch.chosen)
        # float32 needs no rounded copy.
        copies = LIVE_COPIES if self.size < FLOAT else LIVE_COPIES - 1
        return rows * vocabulary * FLOAT * copies

    def notes(self) -> tuple[str, ...]:
        """Return the assumptions of the forecast."""
        prompts = f"prompts of {self.prompt} tokens"
        if self.facts.longest_prompt is None:
            prompts += f", which could not be measured ({self.facts.problem})"
        else:
            prompts += f", the longest of {self.facts.measured}"
        longest = self.config.rollout.max_tokens
        assumed = f"assumed: {prompts}; all completions of {longest} tokens"
        if self.ranks == 1:
            return (assumed,)
        how = f"{self.shards} of them share one model" if self.sharded else "each has the model"
        return (f"for each of {self.ranks} ranks ({self.config.parallel.strategy}: {how})", assumed)


# Memory of the models besides the policy: the reference, a teacher and a critic.

STATE_BYTES = {"float32": (FLOAT, 2 * FLOAT), "compact": (FLOAT // 2, FLOAT)}
"""For each value of optimizer.state, two sizes in bytes per trained parameter. The first size is
for the master weight, in addition to the bfloat16 weight; the second size is for AdamW's two
moments.
"""


def teacher_parts(run: RunFacts) -> list[Part]:
    """Return the memory of a teacher's weights on this device."""
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
    held, phases = weights * run.size, ALWAYS
    if teacher.policy == "moving" and run.size < FLOAT:
        held, why = held + weights * FLOAT, f"{why}, also in float32"
    if run.sharded:
        held, why = -(-held // run.shards), f"{why}, 1 of {run.shards} parts"
    if teacher.offload and run.on_gpu:
        phases, why = ("prepare",), f"{why}, on the device only while it is used"
    return [Part("teacher", held, phases, why)]


def reference_part(run: RunFacts, weights: int) -> Part:
    """Return the memory of the reference policy's weights on this device."""
    kind, phases, held = run.config.reference.kind, ALWAYS, weights * run.size
    why = f"{kind}: a second copy of the weights"
    under = run.shape.rank and kind == "frozen" and not adapter_base(run.config.model.path)
    if kind in ("moving", "renewed") and run.size < FLOAT:
        held, why = held + weights * FLOAT, f"{why}, also in float32"
    if run.sharded:
        held, why = -(-held // run.shards), f"{why}, 1 of {run.shards} parts"
    if "reference" not in run.objective.needs:
        held, why = 0, "none: the objective has no penalty"
    elif kind == "server" or kind == "adapter_off" or under:
        held, why = 0, f"{kind}: no copy on this device"
    elif kind == "offloaded" and run.on_gpu and run.sharded:
        held, why = 0, "offloaded: in main memory, gathered block by block"
    elif kind == "offloaded" and run.on_gpu:
        phases, why = ("prepare",), "offloaded: a copy, on the device only while it is used"
    return Part("reference", held, phases, why)


def critic_parts(config: Config, policy: Shape, size: int, state: tuple[int, int]) -> list[Part]:
    """Return the memory of a critic's weights, optimizer state and gradients.

    The result omits the critic's activations, because critic and policy never run passes at the
    same time. `size` is the number of bytes per number in the critic's computations (2 for
    bfloat16). `state` is a pair from `STATE_BYTES` with the bytes of master weights and moments.
    """
    path, (master, moments) = config.critic.path, state
    model = config.model.model_copy(update={"path": path})
    shape = shape_of(config.model_copy(update={"model": model})) if path else policy
    kept = (shape.parameters + shape.added) * size
    kept += shape.trained * (moments + (master if size < FLOAT else 0))
    return [
        Part("critic", kept, ALWAYS, "a second model with master weights and moments"),
        Part("critic gradients", shape.trained * FLOAT, ("update", "step"), "float32"),
    ]


# Memory of a rank whose parameters are sharded (parallel.strategy = "fsdp").
#
# A rank stores its shard of the float32 weights, moments and gradients. Every rank also stores
# the engine's full copy of the weights. During a forward or backward pass, every rank has the
# complete weights of the current and the next block, the embedding, the head and the last norm.
# With only one rank, fused passes use weights that are gathered once per optimizer step.

BLOCKS = 2
"""How many transformer blocks FSDP gathers at once: the current block, plus either the next block
or the gradients of the previous block.
"""


def sharded_parts(
    shape: Shape, size: int, shards: int, moments: int, *, stays_gathered: bool = False
) -> list[Part]:
    """Return the memory of weights, gradients and optimizer state on one FSDP rank.

    `size` is the number of bytes of a weight in computations, and `moments` is the number of bytes
    of a trained parameter's AdamW moments. With `stays_gathered`, all weights are gathered once per
    optimizer step, instead of block by block.
    """
    weights = shape.parameters + shape.added
    own = shape.trained * FLOAT + (weights - shape.trained) * size
    what = f"1 of {shards} parts"
    parts = [
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
    ]
    if stays_gathered:
        joined = 0 if shape.rank else shape.layers * shape.hidden * (
            shape.query + 2 * shape.key + 2 * shape.inner
        )  # fmt: skip
        return [
            *parts,
            Part("gathered", weights * size, ("prepare", "update"), "whole weights"),
            Part("fused weights", joined * size, ALWAYS, "gathered projections, concatenated"),
        ]
    gathered = BLOCKS * block_parameters(shape) + end_parameters(shape)
    return [
        *parts,
        Part(
            "gathered",
            gathered * size,
            ("prepare", "update"),
            f"whole weights of {BLOCKS} blocks, embedding and head",
        ),
        Part("gathered grad", _gradients(shape, size), ("update",), "of one block, whole"),
    ]


def block_parameters(shape: Shape) -> int:
    """Return the number of parameters of one block, including its adapter."""
    if not shape.fuses:
        return (shape.parameters + shape.added - shape.head) // shape.layers
    attention = 2 * shape.hidden * (shape.query + shape.key)
    return attention + shape.hidden * (3 * shape.inner + 2) + shape.added // shape.layers


def end_parameters(shape: Shape) -> int:
    """Return the number of parameters outside the transformer blocks."""
    whole = shape.parameters + shape.added
    return max(shape.head, whole - shape.layers * block_parameters(shape))


def _gradients(shape: Shape, size: int) -> int:
    """Return the bytes of unsharded gradients for one block and a trained output layer.

    With bfloat16 weights, the reduce-scatter also needs a float32 copy of the block's gradients.
    """
    per_block = shape.trained // shape.layers if shape.rank else block_parameters(shape)
    sent = FLOAT if size < FLOAT else 0
    return per_block * (size + sent) + shape.head * size * shape.head_trained
