"""The sections of several processes: [engine.vllm], [cluster] and [parallel]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from covey.config.section import Count, Positive, Section

Seconds = Annotated[float, Field(gt=0)]


class Vllm(Section):
    """[engine.vllm]. Only with engine.kind = "vllm"."""

    servers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Servers to start on this machine."""
    urls: list[Annotated[str, Field(min_length=1)]] = []
    """Servers that run already, such as http://127.0.0.1:8000; then none is started."""
    colocated: bool = False
    """Generate in this process instead, on the trainer's GPU; vLLM sleeps while it trains."""
    memory: Annotated[float, Field(gt=0)] = 0.5
    """Share of a GPU's memory for a server; on a CPU, gibibytes of its KV cache."""
    tensor_parallel: Positive = 1
    """GPUs of a server."""
    first_gpu: Count = 1
    """The first server's first GPU; the others follow. The trainer has those before."""
    transfer: Literal["file", "nccl"] = "file"
    """How weights are sent: file (in shared memory, or engine.vllm.folder) or nccl (from GPU to
    GPU)."""
    folder: str = ""
    """file: a folder that trainer and servers share; empty: shared memory."""
    host: str = "127.0.0.1"
    """nccl: this machine's address as servers see it."""
    timeout: Seconds = 600.0
    """Seconds of a request without an answer, after which the server counts as dead."""
    patience: Seconds = 600.0
    """Seconds to wait for a server to start or come back."""
    restarts: Count = 3
    """How often a dead server is started again, or waited for, before the run ends."""
    arguments: list[str] = []
    """More arguments of vLLM's own command."""


class Cluster(Section):
    """[cluster]. Actors of Ray, on this machine or others."""

    address: str = ""
    """Ray's address; 'local' starts it on this machine, 'auto' finds it. Empty: no Ray."""
    trainers: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Trainer ranks that Ray starts; 0: the process that you start, or torchrun's ranks."""
    trainer_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs of a trainer rank that Ray starts."""
    engines: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Engine actors of each trainer rank, each with a copy of the model; 0: the ranks generate."""
    max_engines: Count = 0
    """Engines to grow to while the cluster has room; 0: cluster.engines."""
    engine_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs of an engine."""
    engine_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of an engine."""
    trainer_gpus: Count = 0
    """GPUs on the trainer's machine that no actor gets; with cluster.trainers, GPUs of a rank."""
    scoring_actors: Count = 0
    """Scoring actors, each with scoring.workers processes; 0: scoring stays with the trainer."""
    reference_actor: bool = False
    """Whether a frozen reference gets an actor of its own, with as much as an engine."""
    restarts: Count = 3
    """Actors that may die before the run ends."""
    patience: Seconds = 300.0
    """Seconds to wait for a place for an actor."""

    @property
    def engine_actors(self) -> int:
        """Engine actors of a trainer rank: none without Ray."""
        return self.engines if self.address else 0

    @property
    def any_actors(self) -> bool:
        """Whether a trainer rank has any actor."""
        return bool(self.address and (self.engines or self.scoring_actors or self.reference_actor))

    @model_validator(mode="after")
    def _one_gpu_per_rank(self) -> Cluster:
        if self.trainers and self.trainer_gpus > 1:
            raise ValueError(
                f"cluster.trainer_gpus = {self.trainer_gpus} with cluster.trainers = "
                f"{self.trainers}: a rank trains on one GPU; set it to 1, and cluster.trainers to "
                "the number of GPUs that train"
            )
        return self


class Parallel(Section):
    """[parallel]: several ranks, as torchrun starts them."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp: every rank has the whole model; fsdp: parameters, gradients and optimizer state are
    divided among ranks (FSDP2)."""
    shard_ranks: Count = 0
    """fsdp: ranks that divide one model among them, such as those of a machine; each such set has
    the whole model. 0: all ranks."""
    timeout: Annotated[float, Field(gt=0, le=10**6)] = 600.0
    """Seconds that a rank waits for the others: at the start, and in a step."""
