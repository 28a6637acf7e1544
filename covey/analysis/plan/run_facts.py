"""Properties of a run that determine its memory: sizes, devices and CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from covey.accel.sizes import LONG
from covey.analysis.plan.activations import FLOAT
from covey.analysis.plan.forecast import Device
from covey.analysis.plan.model_shape import Shape
from covey.analysis.plan.task_facts import ASSUMED_PROMPT, TaskFacts, usable_prompt
from covey.config import Config
from covey.objective import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The properties of a run that determine its memory."""

    config: Config
    device: Device
    shape: Shape
    facts: TaskFacts
    objective: Objective
    ranks: int = 1

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded over the ranks."""
        return self.config.parallel.strategy == "fsdp"

    @property
    def shards(self) -> int:
        """The number of ranks over which one model is sharded."""
        return min(self.config.parallel.shard_ranks or self.ranks, self.ranks)

    def share(self, count: int) -> int:
        """Divide `count` prompts or completions by the number of ranks, rounding up."""
        return -(-count // self.ranks)

    @property
    def size(self) -> int:
        """Bytes per number in the model's computations (2 for bfloat16, 4 for float32)."""
        dtype = self.config.model.dtype
        bfloat16 = dtype == "bfloat16" or (dtype == "auto" and self.on_gpu)
        return 2 if bfloat16 else FLOAT

    @property
    def prompt(self) -> int:
        """The number of tokens of the longest prompt."""
        return usable_prompt(self.config, self.facts) or ASSUMED_PROMPT

    @property
    def completion(self) -> int:
        """The number of tokens of the longest completion."""
        return self.config.rollout.max_tokens

    @property
    def row_tokens(self) -> int:
        """The number of tokens of the longest prompt plus the longest completion."""
        return self.prompt + self.completion

    @property
    def rows(self) -> int:
        """The number of completions of one rank in a mini-batch."""
        rollout = self.config.rollout
        rows = rollout.prompts_per_step * rollout.group_size
        return self.share(-(-rows // self.config.train.mini_batches))

    @property
    def on_gpu(self) -> bool:
        """Whether the run trains on a GPU."""
        return self.device.kind == "cuda"

    @property
    def gradient_sinks(self) -> bool:
        """Whether the gradients of bfloat16 weights are accumulated in float32 buffers."""
        return self.on_gpu and self.size < FLOAT and not self.sharded

    @property
    def captured(self) -> bool:
        """Whether training passes run as CUDA graphs, which keep activations between steps."""
        # On current GPUs, long rows are faster without a graph.
        recorded = self.config.records_passes and self.row_tokens - 1 < LONG
        return self.gradient_sinks and self.shape.fuses and recorded

    @property
    def position(self) -> int:
        """Bytes per token of a KV cache in the model's dtype."""
        return 2 * self.shape.layers * self.shape.key * self.size

    @property
    def float8_cache(self) -> bool:
        """Whether the KV cache that CUDA graphs use stores float8 numbers."""
        return self.config.engine.kv_dtype == "float8"

    @property
    def stored(self) -> int:
        """Bytes per token of the KV cache that CUDA graphs use, which may be in float8."""
        return self.position // self.size if self.float8_cache else self.position
