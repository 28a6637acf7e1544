"""Sections for runs with several processes: [engine.vllm], [cluster] and [parallel]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from covey.config.section import Count, Positive, Section

Seconds = Annotated[float, Field(gt=0)]


class Vllm(Section):
    """[engine.vllm]: settings of engine.kind = "vllm"."""

    servers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of servers to start on this machine."""
    urls: list[Annotated[str, Field(min_length=1)]] = []
    """Addresses of running vLLM servers, such as http://127.0.0.1:8000; if set, Covey starts no
    server."""
    colocated: bool = False
    """Run vLLM in this process, on the trainer's GPU, instead of a server. vLLM sleeps while the
    trainer trains."""
    memory: Annotated[float, Field(gt=0)] = 0.5
    """Fraction of a GPU's memory that a server uses; on a CPU, the size of a server's KV cache in
    GiB."""
    tensor_parallel: Positive = 1
    """Number of GPUs per server."""
    first_gpu: Count = 1
    """Index of the first GPU that servers use. The trainer uses the GPUs with smaller indices."""
    transfer: Literal["file", "nccl"] = "file"
    """How weights are sent to servers: file (in shared memory, or engine.vllm.folder) or nccl (from
    GPU to GPU)."""
    folder: str = ""
    """With transfer = "file", a folder that trainer and servers share; empty: shared memory."""
    host: str = "127.0.0.1"
    """With transfer = "nccl", the address at which servers reach this machine."""
    timeout: Seconds = 600.0
    """Seconds to wait for the reply to a request, after which the server counts as dead."""
    patience: Seconds = 600.0
    """Seconds to wait for a server to start or come back."""
    restarts: Count = 3
    """Number of times that a dead server is restarted, or waited for, before the run ends."""
    arguments: list[str] = []
    """Additional arguments for the command that starts vLLM."""


class Cluster(Section):
    """[cluster]. Settings of Ray actors on this machine or on others."""

    address: str = ""
    """Address of a Ray cluster; 'local' starts Ray on this machine, 'auto' finds a running cluster,
    and an empty address means no Ray."""
    trainers: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of trainer ranks that Ray starts; 0: train in this process or in torchrun's ranks."""
    trainer_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs per trainer rank that Ray starts."""
    engines: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Number of engine actors per trainer rank, each with a copy of the model; 0: the trainer
    ranks generate."""
    max_engines: Count = 0
    """Maximum number of engine actors. Actors beyond cluster.engines start when the cluster has
    free resources; 0: no such actors."""
    engine_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs per engine."""
    engine_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs per engine."""
    trainer_gpus: Count = 0
    """GPUs of this machine reserved for the trainer; with cluster.trainers, GPUs per rank."""
    scoring_actors: Count = 0
    """Number of scoring actors, each with scoring.workers processes; 0: scoring runs on the
    trainer's machine."""
    reference_actor: bool = False
    """Whether a frozen reference runs in its own actor, with the resources of an engine."""
    restarts: Count = 3
    """Maximum number of actor deaths in a run; one more death ends the run."""
    patience: Seconds = 300.0
    """Seconds to wait for the resources of an actor."""

    @property
    def engine_actors(self) -> int:
        """Number of engine actors per trainer rank; 0 without Ray."""
        return self.engines if self.address else 0

    @property
    def any_actors(self) -> bool:
        """Whether a trainer rank uses Ray actors."""
        return bool(self.address and (self.engines or self.scoring_actors or self.reference_actor))

    @model_validator(mode="after")
    def _one_gpu_per_rank(self) -> Cluster:
        if self.trainers and self.trainer_gpus > 1:
            raise ValueError(
                f"cluster.trainer_gpus = {self.trainer_gpus} with cluster.trainers = "
                f"{self.trainers}: a rank trains on one GPU; set cluster.trainer_gpus = 1, and "
                "cluster.trainers to the number of GPUs that train"
            )
        return self


class Parallel(Section):
    """[parallel]. Settings of runs with several ranks, which torchrun starts."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """How the model is distributed over the ranks. ddp: every rank has the whole model; fsdp:
    parameters, gradients and optimizer state are divided among ranks (FSDP2)."""
    shard_ranks: Count = 0
    """With strategy = "fsdp", the number of ranks that share one copy of the model, such as the
    ranks of one machine; 0: all ranks."""
    timeout: Annotated[float, Field(gt=0, le=10**6)] = 600.0
    """Seconds that a rank waits for other ranks, at the start and in a step."""
