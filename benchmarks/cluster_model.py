"""Estimates the time of generation, update and weight sync on GPUs (see docs/scale.md).

The constants for generation and update are fitted to measurements on one H200. A test compares the
cost model with every measurement. The constants for communication between GPUs are not measured,
but come from data sheets or are assumed (see the docstring of each constant).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a language model that determine how long generation and training take."""

    parameters: float
    layers: int
    hidden: int
    key_numbers: int
    """The number of KV-cache elements for one token, over all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Speed and memory of one GPU in bfloat16.

    The default values describe an H200.
    """

    memory: float = 139 * 2**30
    bandwidth: float = 4.3e12
    """Bytes per second when reading weights, measured with a memory copy."""
    key_bandwidth: float = 4.53e12
    """Bytes per second when reading the KV cache."""
    decode_flops: float = 779e12
    train_flops: float = 548e12
    attention_flops: float = 500e12
    """FLOP per second of attention in training, over forward and backward passes."""
    layer_seconds: float = 27.1e-6
    """The shortest time, in seconds, that one layer takes in a decode step."""
    row_seconds: float = 14.3e-12
    """Additional seconds of a decode step per completion, layer and hidden-state element."""
    token_seconds: float = 85.7e-12
    """Additional seconds of an update per token, layer and hidden-state element."""
    recompute: float = 1.34
    """The factor by which gradient checkpointing increases the time of an update."""
    call_seconds: float = 37.5e-3
    """The fixed overhead of an engine call, in seconds."""
    prefill_flops: float = 122e12
    node_link: float = 300e9
    """Bytes per second between GPUs of a node in each direction: 2/3 of the data sheet's value."""
    far_link: float = 40e9
    """Bytes per second from each GPU to other nodes: 4/5 of the data sheet's 400 Gbit/s."""
    reduce_seconds: float = 20e-6
    """The assumed latency, in seconds, of an all-reduce between the GPUs of one engine. Each layer
    needs two all-reduces."""
    node: int = 8


H200 = Gpu()
BYTES = 2
"""The number of bytes of a weight in bfloat16."""
STATE_BYTES = 16
"""The bytes of each trained parameter: weight, gradient, master weight and two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The workload of one training step: its completions, tokens and passes."""

    rows: int
    """The number of completions."""
    group: int
    prompt: int
    completion: int
    """The number of tokens of each completion, assumed to be the maximum length."""
    updates: int = 1
    """The number of training passes over the completions."""
    forwards: int = 0
    """The number of forward passes without gradient, for example for reference log-probs."""
    micro_batch: int = 16_384
    checkpointing: bool = True

    @property
    def tokens(self) -> int:
        """The number of tokens in an update, with each prompt counted once per group."""
        return self.rows * self.completion + self.rows // self.group * self.prompt

    @property
    def context(self) -> int:
        """The number of tokens of a prompt and one completion."""
        return self.prompt + self.completion


def decode_seconds(
    model: ModelSize, rows: float, context: float, gpu: Gpu = H200, split: int = 1
) -> float:
    """Return the seconds to generate one token for each of `rows` completions on `split` GPUs."""
    weights = BYTES * model.parameters / split / gpu.bandwidth
    flops = 2 * model.parameters * rows / split / gpu.decode_flops
    keys = rows * context * model.key_numbers * BYTES / split / gpu.key_bandwidth
    other = rows * model.layers * model.hidden * gpu.row_seconds / split
    sums = 2 * model.layers * gpu.reduce_seconds if split > 1 else 0.0
    return model.layers * gpu.layer_seconds + max(weights, flops) + keys + other + sums


def rollout_seconds(
    model: ModelSize, work: Workload, gpu: Gpu = H200, *, engines: int = 1, split: int = 1
) -> float:
    """Return the seconds to generate a step's completions, if each engine has `split` GPUs."""
    rows = work.rows / engines
    waves = max(1, math.ceil(rows / engine_rows(model, work, gpu, split)))
    prompts = rows / work.group * work.prompt
    prefill = 2 * model.parameters * prompts / split / gpu.prefill_flops
    mean = work.prompt + work.completion / 2
    step = decode_seconds(model, rows / waves, mean, gpu, split)
    return gpu.call_seconds + prefill + waves * work.completion * step


def engine_rows(model: ModelSize, work: Workload, gpu: Gpu, split: int) -> int:
    """Return how many completions fit into an engine's memory at the same time."""
    free = 0.9 * gpu.memory * split - BYTES * model.parameters
    return max(1, int(free / (work.context * model.key_numbers * BYTES)))


def engine_split(model: ModelSize, gpu: Gpu = H200) -> int:
    """Return the smallest number of GPUs per engine that leaves 40 % of memory for the KV cache."""
    need = BYTES * model.parameters / (0.6 * gpu.memory)
    return int(2 ** math.ceil(math.log2(need))) if need > 1 else 1


def update_seconds(
    model: ModelSize, work: Workload, gpu: Gpu = H200, *, trainers: int = 1
) -> float:
    """Return the seconds of one training step's updates, with the model sharded by FSDP2."""
    dense = 6 * model.parameters / gpu.train_flops
    attention = 6 * model.layers * model.hidden * work.context / gpu.attention_flops
    factor = gpu.recompute if work.checkpointing else 1.0
    token = factor * (dense + attention) + model.layers * model.hidden * gpu.token_seconds
    share = work.tokens / trainers
    compute = share * token
    passes = max(1, math.ceil(share / work.micro_batch))
    link = gpu.node_link if trainers <= gpu.node else gpu.far_link
    moved = 3 * BYTES * model.parameters * (trainers - 1) / trainers
    moving = passes * moved / link
    whole = work.updates * max(compute, moving)
    return whole + work.forwards * max(compute / factor, moving) / 3


def fewest_trainers(model: ModelSize, gpu: Gpu = H200) -> int:
    """Return how many GPUs the training state needs if activations use 1/5 of the GPUs' memory."""
    return math.ceil(STATE_BYTES * model.parameters / (0.8 * gpu.memory))


def sync_seconds(model: ModelSize, gpu: Gpu = H200, *, gpus: int) -> float:
    """Return the seconds to send new weights to all engines in a pipelined broadcast."""
    return BYTES * model.parameters / (gpu.node_link if gpus <= gpu.node else gpu.far_link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A division of GPUs between trainers and engines, and the resulting seconds per step."""

    gpus: int
    trainers: int
    engines: int
    engine_gpus: int
    """The number of GPUs of each engine."""
    rollout: float
    update: float
    sync: float
    staleness: int

    @property
    def shared(self) -> bool:
        """Whether the same GPUs alternate between generation and training."""
        return self.trainers == self.gpus

    @property
    def seconds(self) -> float:
        """The seconds of a step; rollout and update overlap if staleness is allowed."""
        if self.shared or not self.staleness:
            return self.rollout + self.update + self.sync
        return max(self.rollout, self.update) + self.sync


def splits(
    model: ModelSize, work: Workload, gpus: int, gpu: Gpu = H200, *, staleness: int = 1
) -> list[Split]:
    """Return every division of the GPUs between trainers and engines, fastest first.

    The list is empty if the model does not fit into the memory of the GPUs.
    """
    least, smallest = fewest_trainers(model, gpu), engine_split(model, gpu)
    sizes = [size for size in (1, 2, 4, 8) if size >= smallest]
    found = []
    for trainers in range(least, gpus + 1):
        rest = gpus if trainers == gpus else gpus - trainers  # all GPUs train and generate, in turn
        update = update_seconds(model, work, gpu, trainers=trainers)
        for size in sizes:
            engines = min(rest // size, work.rows)
            if not engines:
                continue
            rollout = rollout_seconds(model, work, gpu, engines=engines, split=size)
            found.append(
                Split(
                    gpus=gpus,
                    trainers=trainers,
                    engines=engines,
                    engine_gpus=size,
                    rollout=rollout,
                    update=update,
                    sync=sync_seconds(model, gpu, gpus=gpus),
                    staleness=staleness,
                )
            )
    return sorted(found, key=lambda split: (split.seconds, split.trainers))


PUBLISHED = {
    "1.5B": ModelSize(parameters=1.544e9, layers=28, hidden=1536, key_numbers=14_336),
    "8B": ModelSize(parameters=8.03e9, layers=32, hidden=4096, key_numbers=65_536),
    "32B": ModelSize(parameters=32.8e9, layers=64, hidden=5120, key_numbers=131_072),
    "70B": ModelSize(parameters=70.6e9, layers=80, hidden=8192, key_numbers=163_840),
}
COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
"""The numbers of GPUs that the table lists."""


# The best split of a cluster's GPUs between trainers and engines, as a table.

STALENESS = 1
"""The assumed staleness if engines and trainers work at the same time."""


def table(work: Workload) -> list[dict[str, Any]]:
    """Return table rows with the fastest division of GPUs, for each model and number of GPUs.

    The table has no row for a model that does not fit into the GPUs' memory.
    """
    rows = []
    for name, model in PUBLISHED.items():
        for gpus in COUNTS:
            if not (found := splits(model, work, gpus, staleness=STALENESS)):
                continue
            best, in_turn = found[0], splits(model, work, gpus, staleness=0)[0]
            row = {**asdict(best), "shared": best.shared, "seconds": best.seconds}
            rows.append({"model": name, **row, "seconds_in_turn": in_turn.seconds})
    return rows
