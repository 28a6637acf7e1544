"""vLLM without a server: this process drives vLLM's engine on the trainer's own GPU.

`LocalClient` has the same interface as `Client`, so callers need no special case. The scheduler and
the workers of vLLM run in separate processes. Between rollouts, vLLM sleeps: its weights move to
CPU memory, and its KV cache is freed for the trainer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import uuid
from collections.abc import Coroutine, Mapping
from concurrent.futures import TimeoutError as WaitTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.engines.vllm.client import Client, Unavailable
from covey.engines.vllm.server import ServerSettings
from covey.errors import EngineError
from covey.escape import printable_line

CLOSE_SECONDS = 10.0
"""Seconds that `close` waits for the event loop's thread to end."""


def start_local(settings: ServerSettings, model: Path, timeout: float) -> LocalClient:
    """Start vLLM's engine; raise a one-line error if it does not start."""
    for name, value in settings.variables().items():
        os.environ.setdefault(name, value)
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        weight_transfer_config=WeightTransferConfig(backend=settings.backend),
        disable_log_stats=False,
        enable_sleep_mode=settings.cuda,
        **settings.options(model),
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="vllm", daemon=True)
    thread.start()

    async def make() -> Any:
        return AsyncLLM.from_engine_args(arguments)

    try:
        # No variable holds the engine: vLLM's imports keep this frame, with its variables.
        return LocalClient(
            "in this process",
            timeout,
            llm=asyncio.run_coroutine_threadsafe(make(), loop).result(),
            loop=loop,
            thread=thread,
        )
    except Exception as error:
        line = printable_line(str(error), 300)
        raise EngineError(f"engine: vLLM failed to start in this process: {line}") from None


@dataclass(slots=True, kw_only=True)
class LocalClient(Client):
    """Runs vLLM's engine in this process, with the same methods as a server's client."""

    llm: Any
    """vLLM's engine; None after `close`."""
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    """The thread that runs the event loop."""
    adapters: dict[str, Any] = field(default_factory=dict)

    def close(self) -> None:
        """Stop vLLM's processes, and delete its engine to avoid a traceback at exit."""
        if self.llm is None:
            return
        self.llm.shutdown()
        self.llm = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(CLOSE_SECONDS)
        gc.collect()  # tasks of the loop and the engine refer to each other

    def healthy(self) -> bool:
        """Return whether vLLM's processes are alive."""
        return self.llm is not None and not self.llm.errored

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Handle a request as a vLLM server does, and return the body of the reply."""
        work = self._work(path, dict(body or {}))
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return json.dumps(future.result(self.timeout)).encode()
        except (TimeoutError, WaitTimeout):
            future.cancel()
            raise Unavailable(f"did not reply to {path} within {self.timeout:g} s", self) from None
        except (Unavailable, EngineError):
            raise
        except Exception as error:
            line = printable_line(str(error), 300)
            raise Unavailable(f"failed at {path}: {type(error).__name__} {line}", self) from None

    def _work(self, path: str, body: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        """Return a coroutine that handles a request to an endpoint as a vLLM server does."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self.llm
        if path == "/inference/v1/generate":
            return self._generate(body)
        if path == "/update_weights":
            update = WeightTransferUpdateRequest(update_info=body["update_info"])
            return self._told(llm.update_weights(update))
        if path == "/reset_prefix_cache":
            return self._told(llm.reset_prefix_cache(), "success")
        if path == "/v1/load_lora_adapter":
            return self._load(body["lora_name"], body["lora_path"])
        if path == "/v1/unload_lora_adapter":
            return self._told(llm.remove_lora(self.adapters.pop(body["lora_name"]).lora_int_id))
        plain = {
            "/start_weight_update": llm.start_weight_update,
            "/finish_weight_update": llm.finish_weight_update,
            "/update_weight_version": llm.update_weight_version,
            "/sleep": llm.sleep,
            "/wake_up": llm.wake_up,
        }
        return self._told(plain[path](**body))

    async def _told(self, work: Coroutine[Any, Any, Any], name: str = "done") -> dict[str, Any]:
        found = await work
        return {name: found if isinstance(found, bool) else True}

    def preemptions(self) -> int:
        """Return the number of times that a full KV cache made vLLM pause a completion."""
        from vllm.v1.metrics.reader import get_metrics_snapshot

        found = get_metrics_snapshot()
        return sum(metric.value for metric in found if metric.name == "vllm:num_preemptions")

    async def _load(self, name: str, path: str) -> dict[str, Any]:
        from vllm.lora.request import LoRARequest

        number = 1 + int(name.rpartition("-")[2])
        self.adapters[name] = LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)
        await self.llm.add_lora(self.adapters[name])
        return {}

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**body["sampling_params"], output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = {"prompt_token_ids": body["token_ids"]}
        adapter = self.adapters.get(body.get("model", ""))
        answers = self.llm.generate(prompt, params, uuid.uuid4().hex, lora_request=adapter)
        *_, last = [answer async for answer in answers]
        (output,) = last.outputs
        tokens = list(output.token_ids)
        logp = [float(at[token].logprob) for token, at in zip(tokens, output.logprobs, strict=True)]
        spans = [
            {"start": span.start, "end": span.end, "version": span.version}
            for span in output.weight_versions or ()
        ]
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": value} for value in logp]},
            "finish_reason": output.finish_reason,
            "weight_versions": spans,
        }
        return {"choices": [choice]}
