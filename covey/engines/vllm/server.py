"""Starts and stops a vLLM server in a separate process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from covey.engines.vllm.client import Client, Unavailable
from covey.errors import EngineError
from covey.escape import printable

HOST = "127.0.0.1"
"""The server accepts only local clients, because vLLM's weight updates need no login."""
SERVE = str(Path(__file__).with_name("serve.py"))
POLL_SECONDS = 0.5
END_SECONDS = 5.0
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all servers would share the first cores
    "VLLM_CPU_CI_ENV": "1",  # no compilation at the start
    "OMP_WAIT_POLICY": "passive",  # waiting threads leave the cores to the trainer
}
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # enables the endpoints for weight updates and cache resets
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a vLLM server, which cannot change after the server has started."""

    dtype: str
    cuda: bool
    context: int
    max_concurrent: int
    lora_rank: int = 0
    """The rank of the trained adapter; 0 without an adapter."""
    tensor_parallel: int = 1
    memory: float = 0.5
    """The fraction of GPU memory to use; on a CPU, the size of the KV cache in GiB."""
    backend: str = "covey_file"
    """The name under which vLLM knows the weight transfer engine."""
    arguments: tuple[str, ...] = ()

    def command(self, model: Path, port: int) -> list[str]:
        """Return vLLM's arguments."""
        words: dict[str, Any] = {
            "model": model,
            "host": HOST,
            "port": port,
            "load-format": "dummy",  # the trainer sends the weights
            "dtype": self.dtype,
            "max-model-len": self.context,
            "max-num-seqs": self.max_concurrent,
            "logprobs-mode": "processed_logprobs",
            "weight-transfer-config": json.dumps({"backend": self.backend}),
            "tensor-parallel-size": self.tensor_parallel,
        }
        flags = ["--enable-scale-out", "--disable-uvicorn-access-log"]
        if self.cuda:
            words["gpu-memory-utilization"] = self.memory
        else:
            flags.append("--enforce-eager")
        if self.lora_rank:
            flags.append("--enable-lora")
            words |= {"max-lora-rank": self.served_rank, "max-loras": 2}
        pairs = [text for key, value in words.items() for text in (f"--{key}", str(value))]
        return [*pairs, *flags, *self.arguments]

    @property
    def served_rank(self) -> int:
        """The adapter's rank, rounded up to a rank for which vLLM has kernels."""
        sizes = (8, 16, 32, 64, 128, 256, 320, 512)
        return next((size for size in sizes if size >= self.lora_rank), self.lora_rank)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the server process."""
        return {**self.variables(), **os.environ}

    def variables(self) -> dict[str, str]:
        """Return the environment variables that Covey sets for vLLM."""
        if self.cuda:
            return ENVIRONMENT
        # vLLM takes whole gibibytes.
        return {
            **ENVIRONMENT,
            **CPU_ENVIRONMENT,
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(self.memory)),
        }


@dataclass(slots=True, kw_only=True)
class ServerProcess:
    """A vLLM server that Covey starts, and that Covey restarts if the server dies."""

    settings: ServerSettings
    model: Path
    """A folder with the configuration and the tokenizer of the model."""
    log: Path
    gpus: str = ""
    """CUDA_VISIBLE_DEVICES for the server; if empty, Covey does not set the variable."""
    port: int = field(init=False)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start the process, without waiting until the server is ready."""
        command = [sys.executable, "-P", SERVE, str(os.getpid()), str(self.model)]
        command += self.settings.command(self.model, self.port)
        devices = {"CUDA_VISIBLE_DEVICES": self.gpus} if self.gpus else {}
        with self.log.open("ab") as log:
            self.process = _open(command, {**self.settings.environment(), **devices}, log)

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process is None or self.process.poll() is not None

    def wait(self, client: Client, patience: float) -> None:
        """Wait until the server is ready."""
        deadline = time.monotonic() + patience
        while True:
            with contextlib.suppress(Unavailable):
                client.get("/v1/models")
                return
            assert self.process is not None
            if (code := self.process.poll()) is not None:
                raise self._failed(f"ended with code {code}")
            if time.monotonic() > deadline:
                raise self._failed(f"did not start within {patience:g} s")
            time.sleep(POLL_SECONDS)

    def _failed(self, failure: str) -> EngineError:
        return EngineError(
            f"engine: the vLLM server could not be started, because it {failure}: "
            f"{self.last_line()}; see {self.log}"
        )

    def last_line(self) -> str:
        """Return the last error line of the log, or the last line if there is no error line."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        wrong = [line for line in lines if "Error" in line and "Traceback" not in line]
        return printable((wrong or lines or ["no output"])[-1])[:300]

    def stop(self) -> None:
        """End the server and its child processes."""
        if self.process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
                if number == signal.SIGKILL:
                    break
        self.process = None


def _open(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Any:
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches only the trainer, which ends the servers
    )
