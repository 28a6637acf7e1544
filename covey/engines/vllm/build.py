"""Build a vLLM engine from the [engine.vllm] section of the configuration."""

from __future__ import annotations

import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from covey.engines.vllm.check import (
    NCCL_WITHOUT_GPU,
    WHOLE_LAYERS,
    check_dtype,
    check_installed,
    check_served,
    served_version,
)
from covey.engines.vllm.client import Client
from covey.engines.vllm.engine import Replica, VllmEngine
from covey.engines.vllm.in_process import start_local
from covey.engines.vllm.plugin import BACKEND
from covey.engines.vllm.server import ServerProcess, ServerSettings
from covey.engines.vllm.sync import (
    AdapterSync,
    FileSync,
    NcclSync,
    Sync,
    has_only_lora,
    write_model,
)
from covey.errors import ConfigError
from covey.models.language_model import LanguageModel

if TYPE_CHECKING:
    from covey.config import Config
    from covey.config.schema import Vllm

SHARED_MEMORY = Path("/dev/shm")


def vllm_engine(
    config: Config, model: LanguageModel, *, cuda: bool, first_gpu: int | None = None
) -> VllmEngine:
    """Start the servers, or connect to running servers, and return the engine.

    If `cuda` is true, servers use consecutive GPUs, beginning with the GPU of index `first_gpu`. If
    `first_gpu` is None, the setting `engine.vllm.first_gpu` applies.
    """
    section = config.engine.vllm
    _check_adapter(model)
    installed = "" if section.urls else check_installed()
    parent = Path(section.folder) if section.folder else SHARED_MEMORY
    folder = Path(tempfile.mkdtemp(prefix="covey-", dir=parent if parent.is_dir() else None))
    with ExitStack() as failed:
        failed.callback(shutil.rmtree, folder, ignore_errors=True)
        write_model(model, folder)
        settings = _settings(config, model, cuda=cuda)
        if section.urls:
            replicas = _running(section, model, settings.backend)
        elif section.colocated:
            replicas = [Replica(start_local(settings, folder, section.timeout))]
        else:
            first = section.first_gpu if first_gpu is None else first_gpu
            replicas = _started(section, settings, folder, first)
        for replica in replicas:
            failed.callback(replica.close)
        if not section.urls and not section.colocated:
            _wait(replicas, section.patience)
        sync: Sync = FileSync(model, folder)
        if section.transfer == "nccl":
            sync = NcclSync(model, [replica.client for replica in replicas], section.host)
        engine = VllmEngine(
            model=model,
            replicas=replicas,
            sync=sync if model.adapter is None else AdapterSync(model, folder, sync),
            release=lambda: shutil.rmtree(folder, ignore_errors=True),
            vllm_version=installed if section.colocated else served_version(replicas[0].client),
            restarts=section.restarts,
            patience=section.patience,
            sleeps=section.colocated and cuda,
        )
        failed.pop_all()
    return engine


def _check_adapter(model: LanguageModel) -> None:
    if model.adapter is not None and not has_only_lora(model):
        raise ConfigError(WHOLE_LAYERS)


def _settings(config: Config, model: LanguageModel, *, cuda: bool) -> ServerSettings:
    section = config.engine.vllm
    if section.transfer == "nccl" and model.device.type != "cuda":
        raise ConfigError(NCCL_WITHOUT_GPU)
    return ServerSettings(
        dtype=str(model.head.linear.weight.dtype).removeprefix("torch."),
        cuda=cuda,
        context=model.context if model.context < 2**31 else 32_768,
        max_concurrent=-(-config.engine.max_concurrent // section.servers),
        lora_rank=0 if model.adapter is None else model.adapter.r,
        tensor_parallel=section.tensor_parallel,
        memory=section.memory,
        backend=BACKEND if section.transfer == "file" else "nccl",
        arguments=tuple(section.arguments),
    )


def _running(section: Vllm, model: LanguageModel, backend: str) -> list[Replica]:
    """Connect to servers that are already running."""
    replicas = []
    for url in section.urls:
        client = Client.at(url, section.timeout)
        check_dtype(client, check_served(client, backend), model)
        replicas.append(Replica(client))
    return replicas


def _started(
    section: Vllm, settings: ServerSettings, folder: Path, first_gpu: int
) -> list[Replica]:
    """Start servers on the CPU, or on consecutive GPUs, beginning with GPU `first_gpu`."""
    logs = Path(tempfile.mkdtemp(prefix="covey-vllm-"))
    replicas = []
    for number in range(section.servers):
        process = ServerProcess(settings=settings, model=folder, log=logs / f"server-{number}.log")
        if settings.cuda:
            process.gpus = _gpus(first_gpu + number * section.tensor_parallel, section)
        process.start()
        replicas.append(Replica(Client(process.url, section.timeout), process))
    return replicas


def _gpus(first: int, section: Vllm) -> str:
    """Return the CUDA_VISIBLE_DEVICES of a server, chosen from the GPUs that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    own = names[first : first + section.tensor_parallel]
    if len(own) < section.tensor_parallel:
        last = first + section.tensor_parallel - 1
        raise ConfigError(
            f"config: engine.vllm needs the GPUs {first} to {last}, but this machine has only "
            f"{len(names)} GPUs; lower engine.vllm.servers or engine.vllm.first_gpu"
        )
    return ",".join(own)


def _wait(replicas: list[Replica], patience: float) -> None:
    def ready(replica: Replica) -> None:
        assert replica.process is not None
        replica.process.wait(replica.client, patience)

    with ThreadPoolExecutor(len(replicas)) as pool:
        list(pool.map(ready, replicas))
