"""Send weights to vLLM servers: through a file, by NCCL between GPUs, or as a LoRA adapter."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from covey.engines.vllm.client import Client, Unavailable
from covey.errors import EngineError, ModelError, reason
from covey.models.adapter import NAME, save_adapter
from covey.models.language_model import LanguageModel

Named = Iterable[tuple[str, torch.Tensor]]
FAILED_SECONDS = 5.0
"""Seconds to wait for the end of an NCCL broadcast in which a server has failed."""


class Sync(Protocol):
    """Sends new weights to servers: call `prepare` once, then `load` for each server."""

    def prepare(self, named: Named, version: int) -> None:
        """Make a new version of the weights ready to load; older versions may be deleted."""

    def load(self, client: Client, version: int, *, fresh: bool) -> None:
        """Let a server load the weights; a `fresh` server was just started and has no weights."""

    def served(self, version: int) -> str:
        """Return the model name in requests: the adapter's name, or "" without an adapter."""
        return ""


def write_model(model: LanguageModel, folder: Path) -> None:
    """Write the configuration and tokenizer, which a server needs besides the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(served_config(model.model.config), default=str)
    (folder / "config.json").write_text(text, encoding="utf-8")
    model.tokenizer.save_pretrained(folder)


@contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Raise EngineError if weights cannot be written, for example because the disk is full."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"engine: cannot write weights to {folder}: {reason(error)}; set "
            "engine.vllm.folder to a folder with more free space"
        ) from None


@dataclass(slots=True)
class FileSync(Sync):
    """Sends all weights through a file that trainer and servers can read."""

    model: LanguageModel
    folder: Path

    def prepare(self, named: Named, version: int) -> None:
        """Write the weights into a file, and delete the files of older versions."""
        # safetensors refuses tensors that share memory, as a tied head and the embedding do.
        weights = {
            name: weight.to("cpu", copy=True).contiguous()
            for name, weight in served_weights(named, self.model.model)
        }
        partial = self.folder / "partial"
        with _one_line_errors(self.folder):
            save_file(weights, partial, metadata={"format": "pt"})
            partial.rename(self._file(version))
        for old in self.folder.glob("weights-*"):
            if old != self._file(version):
                old.unlink(missing_ok=True)

    def _file(self, version: int) -> Path:
        return self.folder / f"weights-{version}"

    def load(self, client: Client, version: int, *, fresh: bool) -> None:
        """Let a server read the file with the weights."""
        client.post("/start_weight_update")
        client.post("/update_weights", {"update_info": {"path": str(self._file(version))}})
        client.post("/finish_weight_update", {"weight_version": str(version)})


@dataclass(slots=True)
class AdapterSync(Sync):
    """Sends only the weights of the LoRA adapter.

    Each version of the adapter has its own name, because vLLM caches adapters by name.
    """

    model: LanguageModel
    folder: Path
    base: Sync
    """Sends the frozen base weights once to each server."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Maps each server's address to the adapter version that it has loaded."""
    based: bool = False

    def prepare(self, named: Named, version: int) -> None:
        """Write the adapter in peft's format."""
        if not self.based:
            self.base.prepare(self.model.model.named_parameters(), 0)
            self.based = True
        padding = HeadPadding.of(self.model.model.config)
        weights = {
            name: weight if padding is None else padding.apply(name, weight)
            for name, weight in named
            if ".lora_" in name
        }
        path = self.folder / self.served(version)
        shutil.rmtree(path, ignore_errors=True)
        with _one_line_errors(self.folder):
            path.mkdir()
            save_adapter(self.model, weights, path)
        for old in self.folder.glob(self.served("*")):  # all servers have loaded these
            if old != path:
                shutil.rmtree(old)

    def load(self, client: Client, version: int, *, fresh: bool) -> None:
        """Load the adapter under its new name, and unload the previous adapter."""
        before = self.loaded.pop(client.url, None)
        if fresh:
            before = None
            self.base.load(client, 0, fresh=True)
        name = self.served(version)
        path = self.folder / name
        client.send("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        client.post("/update_weight_version", {"new_version": str(version)})
        if before is not None and before != version:
            client.send("POST", "/v1/unload_lora_adapter", {"lora_name": self.served(before)})
        self.loaded[client.url] = version

    def served(self, version: int | str) -> str:
        """Return the adapter's name."""
        return f"covey-{version}"


@dataclass(slots=True)
class NcclSync(Sync):
    """Sends all weights by vLLM's NCCL transfer, from the trainer's GPU to the servers' GPUs.

    One broadcast sends the weights to all servers. The first call of `load` starts the broadcast,
    and the calls of `load` for the other servers wait until the broadcast has ended.
    """

    model: LanguageModel
    clients: Sequence[Client]
    host: str
    """The address at which servers reach this machine."""
    engine: Any = None
    named: Callable[[], Iterator[tuple[str, torch.Tensor]]] = field(default=lambda: iter(()))
    pending: set[str] = field(default_factory=set)
    """Servers for which `load` has not been called since the last call of `prepare`."""
    sent: bool = False
    """Whether all servers have received the weights of the last call of `prepare`."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """A thread holds this lock during a broadcast."""
    outcomes: SimpleQueue[Exception | None] = field(default_factory=SimpleQueue)
    """Receives None when a broadcast succeeds, and each error during a broadcast."""
    stuck: EngineError | None = None
    """The error of a broadcast that never ends, after which NCCL cannot be used again."""

    def prepare(self, named: Named, version: int) -> None:
        """Store the weights for the broadcast."""
        weights = list(served_weights(named, self.model.model))
        self.named = lambda: iter(weights)
        self.pending, self.sent = {client.url for client in self.clients}, False

    def load(self, client: Client, version: int, *, fresh: bool) -> None:
        """Broadcast the weights to all servers, unless another call has done so."""
        with self.lock:
            if self.stuck is not None:
                raise self.stuck
            restarted = fresh and client.url not in self.pending
            self.pending.discard(client.url)
            if self.sent and not restarted:
                return
            self.sent = False
            for each in self.clients:
                if not each.healthy():  # the other servers would wait for it in the broadcast
                    raise Unavailable("does not reply to /health", each)
            if fresh and self.engine is not None:  # an NCCL group cannot take a new member
                for each in self.clients:
                    if each is not client:
                        each.post("/shutdown_weight_transfer_engine")
                self.engine = None
            self._broadcast()
            for each in self.clients:
                each.post("/update_weight_version", {"new_version": str(version)})
            self.sent = True

    def _broadcast(self) -> None:
        """Run the broadcast in a thread, because NCCL waits for a failed server forever."""
        self.outcomes = outcomes = SimpleQueue[Exception | None]()

        def send() -> None:
            device = self.model.device
            try:
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    if self.engine is None:
                        self.engine = nccl_engine(self.clients, self.host, self)
                    self.engine.send_weights()
            except Exception as error:
                outcomes.put(error)
            else:
                outcomes.put(None)

        thread = threading.Thread(target=send, name="broadcast", daemon=True)
        thread.start()
        error = outcomes.get()
        if error is None:
            return
        thread.join(FAILED_SECONDS)
        if isinstance(error, Unavailable) and thread.is_alive():
            self.stuck = error.client.error(f"{error}, while NCCL sent weights to all servers")
        raise self.stuck or error


class Fleet:
    """Forwards each call of vLLM's trainer-side transfer engine to all servers."""

    def __init__(self, clients: Sequence[Client], failed: Callable[[Exception], None]) -> None:
        self.clients, self.failed = clients, failed
        sizes = [int(client.get("/get_world_size")["world_size"]) for client in clients]
        self.offsets = [1 + sum(sizes[:place]) for place in range(len(sizes))]
        self.world_size = 1 + sum(sizes)

    def _all(self, path: str, bodies: Sequence[dict[str, Any]]) -> None:
        pool = ThreadPoolExecutor(len(self.clients))
        calls = [pool.submit(c.post, path, b) for c, b in zip(self.clients, bodies, strict=True)]
        pool.shutdown(wait=False)
        # If one server fails, the others may wait for it in NCCL until their requests time out.
        for call in wait(calls, return_when=FIRST_EXCEPTION).done:
            if isinstance(error := call.exception(), Exception):
                self.failed(error)
                raise error

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Tell each server which ranks it has in the NCCL group."""
        bodies = [{"init_info": {**init_info, "rank_offset": each}} for each in self.offsets]
        self._all("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        """Tell all servers that new weights will follow."""
        self._all("/start_weight_update", [{}] * len(self.clients))

    def update_weights(self, update_info: Any) -> None:
        """Tell all servers which weights to receive."""
        self._all("/update_weights", [{"update_info": update_info}] * len(self.clients))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Tell all servers that the new weights are complete."""
        self._all("/finish_weight_update", [{}] * len(self.clients))


def nccl_engine(clients: Sequence[Client], host: str, sync: NcclSync) -> Any:
    """Return vLLM's trainer-side engine for NCCL transfer, connected to all servers."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    class Source(WeightSource):  # type: ignore[misc]
        """The weights that the last call of `prepare` received."""

        def metadata(self) -> list[Any]:
            return [ParamMeta(n, w.dtype, tuple(w.shape)) for n, w in sync.named()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return sync.named()

    fleet = Fleet(clients, lambda error: sync.outcomes.put(error))
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    info = NCCLTrainerInitInfo(
        master_address=host, master_port=port, world_size=fleet.world_size, rank=0
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=fleet, source=Source())


def has_only_lora(model: LanguageModel) -> bool:
    """Return whether the adapter has only LoRA weights, the only kind that vLLM loads."""
    trained = [name for name, p in model.model.named_parameters() if p.requires_grad]
    return model.adapter is not None and all(f".{NAME}." in n and ".lora_" in n for n in trained)


# The policy's weights as a vLLM server loads them: output head untied, attention heads padded.
#
# An output head that shares its weight with the embedding is sent as a separate weight, because the
# CPU build of vLLM packs the head when it loads the model, and would otherwise keep the packed copy
# of old weights. Attention heads narrower than 32 dimensions, which vLLM rejects, are padded with
# zeros, which do not change the results of a head.

NARROWEST = 32
"""The smallest head size that vLLM supports."""
PADDABLE = ("llama", "mistral", "qwen2")
"""Model types whose attention heads can be padded, because these models have standard RoPE and no
per-head norm."""
PROJECTION = re.compile(r"\.self_attn\.([qkvo])_proj\.(?:base_layer\.)?(weight|bias|lora_[AB])")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPadding:
    """Pads attention heads with zeros from `width` to `padded` dimensions.

    RoPE rotates dimensions i and i + width / 2 with the frequency base^(-2 i / width). A padded
    head is wider by the factor `times`, so its dimension `times` * i has the frequency of dimension
    i of the original head. Attention divides its scores by the square root of the padded width; to
    compensate, `apply` multiplies the query weights by the square root of `times`.
    """

    heads: int
    key_heads: int
    width: int
    padded: int

    @staticmethod
    def of(config: Any) -> HeadPadding | None:
        """Return the head padding for a model, or None if vLLM supports its head size."""
        heads = int(config.num_attention_heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        if width >= NARROWEST:
            return None
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if config.model_type not in PADDABLE or rope != "default":
            raise ModelError(
                f"engine: vLLM needs attention heads of at least {NARROWEST} dimensions, but this "
                f"{config.model_type} model has heads of {width}; set engine.kind = 'native'"
            )
        return HeadPadding(
            heads=heads,
            key_heads=int(config.num_key_value_heads),
            width=width,
            padded=width * math.ceil(NARROWEST / width),
        )

    @property
    def times(self) -> int:
        """The ratio of the padded head size to the original head size."""
        return self.padded // self.width

    def apply(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return an attention weight with padded heads; return other weights unchanged."""
        match = PROJECTION.search(name)
        if match is None:
            return weight
        kind, part = match.groups()
        if kind == "o":  # this layer reads heads, so its columns are padded
            return self._spread(weight, 1, kind) if part in ("weight", "lora_A") else weight
        return weight if part == "lora_A" else self._spread(weight, 0, kind)

    def _spread(self, weight: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
        heads = self.key_heads if kind in "kv" else self.heads
        shaped = weight.detach().unflatten(dim, (heads, self.width))
        before, after = shaped.shape[: dim + 1], shaped.shape[dim + 2 :]
        wide = shaped.new_zeros(*before, self.padded, *after)
        wide.index_copy_(dim + 1, self._places(kind, weight.device), shaped)
        scale = math.sqrt(self.times) if kind == "q" else 1.0
        padded: torch.Tensor = wide.flatten(dim, dim + 1) * scale
        return padded

    def _places(self, kind: str, device: torch.device) -> torch.Tensor:
        """Return the index of each dimension of a head in the padded head."""
        if kind in "vo":
            return torch.arange(self.width, device=device)
        half = torch.arange(self.width // 2, device=device) * self.times
        return torch.cat([half, half + self.padded // 2])


def served_config(config: Any) -> dict[str, Any]:
    """Return the model's configuration in the form that a vLLM server loads."""
    data: dict[str, Any] = config.to_dict()
    padding = HeadPadding.of(config)
    if padding is not None:
        data["head_dim"] = padding.padded
    return {**data, "tie_word_embeddings": False}


def served_weights(named: Named, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's weights with the names and shapes that a vLLM server expects.

    `named` are the trainer's weights with their names. LoRA weights are skipped, because
    `AdapterSync` sends adapters separately.
    """
    padding, tied = HeadPadding.of(model.config), bool(model.config.tie_word_embeddings)
    embedding = model.get_input_embeddings().weight
    shared = next((name for name, w in model.named_parameters() if w is embedding), "")
    for name, weight in named:
        if ".lora_" in name:
            continue
        plain = weight.detach()
        yield (
            name.replace(".base_layer.", "."),
            plain if padding is None else padding.apply(name, plain),
        )
        if tied and name == shared:
            yield "lm_head.weight", plain
