"""A vLLM server in a separate process: its settings, start and end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.engines.vllm.client import Client, Unavailable
from covey.errors import EngineError
from covey.escape import printable_line
from covey.subprocesses import module_command

HOST = "127.0.0.1"
"""Servers listen only on this machine, because anybody who can connect can change the weights."""
POLL_SECONDS = 0.5
END_SECONDS = 5.0
LAST_LINES = 5
PREFIX = re.compile(r"^(\(\S+ pid=\d+\) )?((INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
"""What vLLM writes before a line of its log: the process, the level, the time and the place."""
ERROR = re.compile(r"[\w.]*(Error|Exception)\b(: |$)")
"""The last line of a Python traceback."""
POINTS_ELSEWHERE = re.compile(r"See (root cause|stack trace|the stack trace)|initialization failed")
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
    """Settings of a vLLM server, which cannot change after it has started."""

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

    def options(self, model: Path) -> dict[str, Any]:
        """Return the arguments of vLLM's engine, which are also options of the server command."""
        options: dict[str, Any] = {
            "model": str(model),
            "load_format": "dummy",  # the trainer sends the weights
            "dtype": self.dtype,
            "max_model_len": self.context,
            "max_num_seqs": self.max_concurrent,
            "logprobs_mode": "processed_logprobs",
            "tensor_parallel_size": self.tensor_parallel,
        }
        options |= {"gpu_memory_utilization": self.memory} if self.cuda else {"enforce_eager": True}
        if self.lora_rank:
            # The adapter's rank, rounded up to a rank for which vLLM has kernels.
            sizes = (8, 16, 32, 64, 128, 256, 320, 512)
            rank = next((size for size in sizes if size >= self.lora_rank), self.lora_rank)
            options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 2}
        return options

    def command(self, model: Path, port: int) -> list[str]:
        """Return the command-line arguments of a server."""
        options = self.options(model) | {
            "host": HOST,
            "port": port,
            "weight_transfer_config": json.dumps({"backend": self.backend}),
            "enable_scale_out": True,
            "disable_uvicorn_access_log": True,
        }
        words: list[str] = []
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return [*words, *self.arguments]

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
    """A vLLM server that Covey starts, and restarts if it dies."""

    settings: ServerSettings
    model: Path
    """A folder with the configuration and the tokenizer of the model."""
    log: Path
    gpus: str = ""
    """CUDA_VISIBLE_DEVICES of the server; if empty, Covey does not set the variable."""
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
        arguments = [str(os.getpid()), str(self.model)]
        arguments += self.settings.command(self.model, self.port)
        devices = {"CUDA_VISIBLE_DEVICES": self.gpus} if self.gpus else {}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                module_command("covey.engines.vllm.serve", *arguments),
                env={**self.settings.variables(), **os.environ, **devices},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the trainer, which ends the servers
            )

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
        return EngineError(f"engine: the vLLM server {failure}: {self.log_text()}")

    def log_text(self) -> str:
        """Return the cause of a failure in the log, the path of the log, and its last lines."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        lines = [PREFIX.sub("", line).strip() for line in text.splitlines()]
        lines = [line for line in lines if line] or ["no output"]
        # The last errors only say that there was an error before them.
        wrong = [line for line in lines if ERROR.match(line) and not POINTS_ELSEWHERE.search(line)]
        cause = f"{printable_line((wrong or lines)[-1], 500)}; "
        last = " | ".join(printable_line(line, 120) for line in lines[-LAST_LINES:])
        return f"{cause}its log {self.log} ends with: {last}"

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
