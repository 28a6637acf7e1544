"""The vLLM engine: completions from one or more vLLM servers, which have a copy of the weights.

Requests and completions consist of token ids, not text. All requests of a prompt go to the same
server, which prefills the prompt once. If a server dies, the engine restarts it, sends it the
current weights, and checks its log-probs on a test prompt. After the restart, the engine sends the
lost requests again with the same seeds.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from covey.engines.native.scheduler import check_length, special_tokens
from covey.engines.protocol import (
    Completion,
    EngineInfo,
    Request,
    RequestSource,
    Sampling,
    WeightSource,
)
from covey.engines.vllm.client import Client, Reply, Unavailable
from covey.engines.vllm.server import ServerProcess
from covey.engines.vllm.sync import Sync
from covey.errors import ConfigError, EngineError
from covey.models.language_model import LanguageModel

ATTEMPTS = 3
"""Maximum number of attempts to send a request; after that, the run fails."""


@dataclass(slots=True)
class Replica:
    """One server, with its client and the state of its repairs."""

    client: Client
    process: ServerProcess | None = None
    """The server's process; None if the user, not Covey, starts and restarts the server."""
    started: int = 0
    """The number of times that the server was restarted, by Covey or by the user."""
    failures: int = 0
    """The number of restarts since the server's last completion."""
    alive: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)
    """A thread holds this lock while it repairs the server."""

    def error(self, problem: str) -> EngineError:
        """Return an error that names the server, the problem, and the log of an own server."""
        if self.process is None:
            return self.client.error(problem)
        return self.client.error(f"{problem}; {self.process.log_text()}")

    def close(self) -> None:
        """Close the connections, and end the server if Covey started it."""
        self.client.close()
        if self.process is not None:
            self.process.stop()


@dataclass(slots=True, kw_only=True)
class VllmEngine:
    """The vLLM engine, which generates with one or more vLLM servers."""

    model: LanguageModel
    """The trainer's model, for the tokenizer and for checks of the servers' log-probs."""
    replicas: Sequence[Replica]
    sync: Sync
    release: Callable[[], None]
    """A function that deletes the model and weight files that Covey wrote for the servers."""
    vllm_version: str
    restarts: int
    """Maximum number of restarts of a server without a completion in between."""
    patience: float
    """Maximum seconds to wait for a server that starts or restarts."""
    sleeps: bool = False
    """Whether the engine frees its memory for the trainer between rollouts."""
    asleep: bool = field(default=False, init=False)
    skeleton: nn.Module = field(init=False)
    version: int = field(default=-1, init=False)
    closed: bool = field(default=False, init=False)
    probe: Reply | None = field(default=None, init=False)
    gap: float = field(default=0.0, init=False)
    """The largest difference between the log-probs of servers and trainer in the last check."""
    repaired: list[str] = field(default_factory=list, init=False)
    preemptions: int = field(default=0, init=False)
    """Number of times so far that a completion was paused because the KV cache was full."""

    def __post_init__(self) -> None:
        self.skeleton = skeleton_of(self.model.model)

    @property
    def info(self) -> EngineInfo:
        """Properties of this engine, such as its backend and the exactness of log-probabilities."""
        count = len(self.replicas)
        return EngineInfo(
            backend=f"vLLM {self.vllm_version}, {count} server{'s' if count > 1 else ''}",
            exact_logp=False,  # equal to the trainer's to about 1e-5: kernels differ
            shares_weights=False,
        )

    def events(self) -> list[str]:
        """Return descriptions of the server failures that Covey repaired since the last call."""
        events, self.repaired = self.repaired, []
        return events

    def close(self) -> None:
        """End the servers that Covey started."""
        self.closed = True
        for replica in self.replicas:
            replica.close()
        self.release()

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Send weights to all servers, clear prefix caches, and check servers' log-probs."""
        if version == self.version:
            return
        self._wake()
        first = self.version < 0
        self.sync.prepare(weights(), version)
        self.version, self.probe = version, None
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            replies = list(pool.map(lambda one: self._load(one, fresh=first), self.replicas))
        everything = {**dict(self.model.model.named_parameters()), **dict(weights())}
        self.gap = max(
            self._gap(replica.client, reply, everything)
            for replica, reply in zip(self.replicas, replies, strict=True)
        )
        self.probe = replies[0]

    def _gap(self, client: Client, reply: Reply, weights: Mapping[str, torch.Tensor]) -> float:
        """Return how much server and trainer log-probs of a test completion differ."""
        prompt = probe_prompt(self.model)
        wanted = trainer_logp(self.skeleton, weights, prompt, reply.tokens)
        return check_probe(client, reply, wanted, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the trainer computes."""
        dtype: torch.dtype = self.model.head.linear.weight.dtype
        return dtype

    def _load(self, replica: Replica, *, fresh: bool) -> Reply:
        """Let a server load the current weights; return its completion of a test prompt."""
        try:
            return self._load_once(replica, fresh=fresh)
        except Unavailable as problem:  # with NCCL, perhaps the failure of another server
            failed = next(one for one in self.replicas if one.client is problem.client)
            self._repair(failed, failed.started, str(problem))
        try:
            return self._load_once(replica, fresh=False)
        except Unavailable as problem:
            raise problem.client.error(f"{problem}; does it serve this model?") from None

    def _load_once(self, replica: Replica, *, fresh: bool) -> Reply:
        client, version = replica.client, self.version
        self.sync.load(client, version, fresh=fresh)
        if client.post("/reset_prefix_cache").get("success") is not True:
            raise client.error("did not clear its prefix cache: requests are still running")
        return self._generate(client, probe_prompt(self.model), PARAMS)

    def _generate(
        self, client: Client, tokens: tuple[int, ...], params: Mapping[str, Any]
    ) -> Reply:
        reply = client.generate(tokens, params, self.sync.served(self.version))
        if any(span.version != self.version for span in reply.versions):
            found = sorted({span.version for span in reply.versions})
            raise client.error(
                f"generated with weights of version {found[0]}, not {self.version}: does another "
                "run use this server?"
            )
        if max(reply.tokens) >= len(self.model.head.linear.weight):
            raise client.error("generated a token that the model does not have")
        return reply

    def run(self, requests: RequestSource) -> None:
        """Generate completions until the request source has no more requests."""
        limits = requests.limits
        if not limits.requests:
            return
        self._wake()
        paused_before = self._paused()
        sampling = limits.sampling
        params = sampling_params(self.model, sampling)
        pool = ThreadPoolExecutor(min(sampling.max_concurrent, limits.requests))
        pending: set[Future[Completion]] = set()
        try:
            while True:
                ready = requests.take()
                for request in ready:
                    check_length(request, self.model, sampling.max_tokens)
                pending |= {pool.submit(self._complete, one, params) for one in ready}
                if not pending:
                    break
                # If a tool replies first, the next turn of its episode must not wait for these
                # completions.
                ended, pending = wait(pending, limits.poll_seconds, return_when=FIRST_COMPLETED)
                if ended:
                    requests.done([future.result() for future in ended])
        finally:
            pool.shutdown(wait=not pending, cancel_futures=True)
        paused = self._paused()
        # The count of a server that was restarted in between begins at 0 again.
        self.preemptions += sum(max(0, paused[n] - paused_before.get(n, paused[n])) for n in paused)
        if self.sleeps:
            self._all("/sleep", {"level": 1})
            self.asleep = True

    def _paused(self) -> dict[int, int]:
        """Return the number of preemptions of each server that replies."""
        found = {}
        for number, replica in enumerate(self.replicas):
            # A missing count must not end the run, and generation repairs a dead server.
            with contextlib.suppress(Unavailable, EngineError):
                found[number] = replica.client.preemptions()
        return found

    def _wake(self) -> None:
        if self.asleep:
            self._all("/wake_up", {})
            self.asleep = False

    def _all(self, path: str, body: Mapping[str, Any]) -> None:
        for replica in self.replicas:
            replica.client.post(path, body)

    def _complete(self, request: Request, params: Mapping[str, Any]) -> Completion:
        own = {**params, "seed": request_seed(request)}
        reply = self._answer(request, own)
        greedy = own["temperature"] == 0.0
        return Completion(
            request=request,
            tokens=reply.tokens,
            logp=(0.0,) * len(reply.tokens) if greedy else reply.logp,
            finish=reply.finish,
            versions=reply.versions,
        )

    def _answer(self, request: Request, params: Mapping[str, Any]) -> Reply:
        """Send a request to a server; after a failure, repair the server and retry."""
        problems: list[str] = []
        while True:
            # The server for a prompt changes only while a server is down.
            alive = [replica for replica in self.replicas if replica.alive] or self.replicas
            replica = alive[request.prompt % len(alive)]
            started = replica.started
            try:
                reply = self._generate(replica.client, request.tokens, params)
            except Unavailable as problem:
                problems.append(str(problem))
                if len(problems) == ATTEMPTS:
                    raise replica.error(f"{problem}, {ATTEMPTS} times") from None
                self._repair(replica, started, str(problem))
            else:
                if replica.started == started:  # it was not restarted in the meantime
                    replica.failures = 0
                return reply

    def _repair(self, replica: Replica, started: int, problem: str) -> None:
        """Restart a server, or wait until the user restarts it, and send it the current weights."""
        with replica.lock:
            if replica.started != started and replica.alive:  # another thread has repaired it
                return
            client = replica.client
            if self.closed or not replica.alive:
                raise replica.error(problem)
            dead = replica.process is not None and replica.process.ended
            if not dead and client.healthy():  # the request is sent again
                return
            replica.alive = False
            if replica.failures >= self.restarts:
                raise replica.error(
                    f"{problem}; it was already restarted {replica.failures} times in a row"
                )
            replica.failures += 1
            if replica.process is not None:
                replica.process.stop()
                replica.process.start()
                replica.process.wait(client, self.patience)
            else:
                wait_for(client, problem, self.patience)
            try:
                reply = self._load_once(replica, fresh=True)
            except Unavailable as again:
                if again.client is not client:
                    raise again.client.error(str(again)) from None
                raise replica.error(f"{problem}; after a restart it {again}") from None
            if self.probe is not None:
                same_probe(client, reply, self.probe, self.dtype)
            replica.started, replica.alive = started + 1, True
            what = "was restarted" if replica.process is not None else "is back"
            self.repaired.append(f"the vLLM server {client.url} {problem}; it {what}")


def wait_for(client: Client, problem: str, patience: float) -> None:
    """Wait until the user has restarted a server and the server replies."""
    deadline = time.monotonic() + patience
    while True:
        try:
            client.models()
            return
        except Unavailable:
            if time.monotonic() > deadline:
                raise client.error(f"{problem}; gave up after {patience:g} s") from None
            time.sleep(1.0)


def request_seed(request: Request) -> int:
    """Return the seed of a request: 63 bits of a hash of `request.address`."""
    text = "\0".join(str(part) for part in request.address)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def sampling_params(model: LanguageModel, sampling: Sampling) -> dict[str, Any]:
    """Return the vLLM sampling settings that are equivalent to the native engine's settings."""
    distribution = sampling.distribution
    if distribution.min_p > 0.0 and distribution.top_p < 1.0:
        raise ConfigError(
            "config: with vLLM, set either rollout.min_p or rollout.top_p, but not both, because "
            "vLLM applies them in another order than the native engine"
        )
    special = special_tokens(model, sampling.stop_strings)
    texts = [text for text in sampling.stop_strings if not special_tokens(model, (text,))]
    return {
        "temperature": distribution.temperature,
        "top_k": distribution.top_k,
        "top_p": distribution.top_p,
        "min_p": distribution.min_p,
        "max_tokens": sampling.max_tokens,
        "logprobs": 0,  # log-probability of the drawn token only
        "stop": texts,
        "include_stop_str_in_output": True,
        "stop_token_ids": sorted({*model.stop_ids, *special}),
        "ignore_eos": True,  # only these ids end a completion
        "detokenize": bool(texts),
    }


# The probe: compares the log-probs of server and trainer for one prompt after each sync.
#
# vLLM may keep old weights without a warning, for example in a packed head, a cached prefix, or an
# adapter of the same name. All its log-probs would then be slightly wrong, so a difference between
# server and trainer ends the run.

PROMPT_TOKENS = 160
"""Tokens in the test prompt: more than one prefix-cache block, to detect stale blocks."""
NEW_TOKENS = 8
PARAMS: dict[str, Any] = {
    "temperature": 1.0,
    "max_tokens": NEW_TOKENS,
    "seed": 0,
    "logprobs": 0,
    "ignore_eos": True,
    "detokenize": False,
}
EXACT, ROUNDED = 1e-4, 0.1
"""Limits on log-prob differences: EXACT limits the largest difference in float32, and ROUNDED
limits the mean difference in 16-bit dtypes.
"""


def probe_prompt(model: LanguageModel) -> tuple[int, ...]:
    """Return a fixed test prompt with tokens spread over the whole vocabulary."""
    size = len(model.head.linear.weight)
    count = min(PROMPT_TOKENS, max(1, model.context // 2))
    return tuple((7919 * (place + 1)) % size for place in range(count))


def skeleton_of(module: nn.Module) -> nn.Module:
    """Return a copy of a model with empty parameters; each forward call receives the weights."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        for p in module.parameters()
    }
    return copy.deepcopy(module, memo | {id(buffer): buffer for buffer in module.buffers()}).eval()


@torch.no_grad()
def trainer_logp(
    skeleton: nn.Module,
    weights: Mapping[str, torch.Tensor],
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
) -> torch.Tensor:
    """Return the trainer's log-probabilities of the tokens that follow a prompt."""
    device = next(iter(weights.values())).device
    ids = torch.tensor([prompt + tokens], device=device)
    output = functional_call(skeleton, dict(weights), kwargs={"input_ids": ids, "use_cache": False})
    logp = torch.log_softmax(output.logits[0, len(prompt) - 1 : -1].float(), dim=-1)
    return logp.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()


def check_probe(client: Client, reply: Reply, wanted: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the gap between a server's log-probs and `wanted`; reject a gap that is too large."""
    gaps = (torch.tensor(reply.logp[: len(wanted)]) - wanted).abs()
    exact = dtype == torch.float32
    gap, most = float(gaps.max() if exact else gaps.mean()), EXACT if exact else ROUNDED
    if not gap <= most:
        raise client.error(
            f"does not have the trainer's weights: the log-probs of a probe differ by {gap:.1g}, "
            f"more than {most:g}; check that it serves this model in this dtype"
        )
    return gap


def same_probe(client: Client, reply: Reply, before: Reply, dtype: torch.dtype) -> None:
    """Raise an error if a restarted server's log-probs differ from an earlier reply's log-probs."""
    pairs = zip(reply.tokens, before.tokens, strict=True)
    same = next((place for place, (a, b) in enumerate(pairs) if a != b), len(before.tokens))
    # Rounding can change a sampled token, and the tokens after it cannot be compared.
    check_probe(client, reply, torch.tensor(before.logp[: max(1, same)]), dtype)
