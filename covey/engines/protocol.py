"""The engine protocol: an engine pulls requests from a source and pushes completions back.

The function `make_engine` in covey/engines/make.py builds the engine that the configuration
names. To add an engine, implement the protocol `Engine`, build the new engine in `make_engine`, and
add its name to `Engine.kind` in covey/config/schema.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from covey.engines.draw import Distribution
from covey.rng import Address
from covey.types import Finish, VersionSpan

if TYPE_CHECKING:
    import torch

POLL_SECONDS = 0.02
WeightSource = Callable[[], "Iterable[tuple[str, torch.Tensor]]"]
"""A function that returns the trained weights with their names in `model.named_parameters()`. If
the model has an adapter, the function returns only the adapter's weights. The weights do not change
while an engine reads them. An engine that shares the trainer's weights never calls this function.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Generation settings for all requests that an engine handles in one call of `run`."""

    group_size: int = 1
    """The number of completions of each prompt."""
    distribution: Distribution = field(default_factory=Distribution)
    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion.

    A stop string stays part of the completion, because rewards look for closing tags.
    """
    max_concurrent: int = 128
    """The maximum number of completions that are generated at once."""
    cache_gigabytes: float = 0.0
    """Size of the KV cache of completions, in GiB of GPU memory; 0 means enough for all completions
    at full length.
    """
    seed: int = 0
    mask_replay: bool = False
    """Whether training needs the tokens that top-k, top-p and min-p allowed at each position."""

    @property
    def returns_kept(self) -> bool:
        """Whether completions include the tokens that top-k, top-p and min-p allowed.

        `returns_kept` is false with greedy decoding.
        """
        return (
            self.mask_replay and self.distribution.truncates and self.distribution.temperature > 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one completion."""

    number: int
    """Index of the request within its request source."""
    prompt: int
    """Index of the prompt. An engine prefills a prompt only once for all requests with the same
    prompt index."""
    tokens: tuple[int, ...]
    address: Address
    """The values that seed the request's random numbers: seed, step, prompt, sample, turn."""


Row = tuple[int, tuple[int, ...], tuple[float, ...], Finish, tuple[VersionSpan, ...], str]
"""The fields of a completion to send between processes. The first field is the number of the
completion's request.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The completion that an engine generated for a request."""

    request: Request
    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    """Log-probability of each token under the distribution that it was drawn from."""
    finish: Finish
    versions: tuple[VersionSpan, ...]
    """The version of the weights that generated each span of tokens. The spans are in order and
    leave no gaps. There is only one span, unless weights were loaded during generation.
    """
    kept: str = ""
    """Tokens that top-k, top-p and min-p allowed at each position, encoded by kept_sets.py."""
    text: str | None = None
    """The decoded text of `tokens`; None if the engine has not decoded them."""

    @property
    def row(self) -> Row:
        """The completion's fields, to send to another process."""
        return (
            self.request.number, self.tokens, self.logp, self.finish, self.versions, self.kept,
        )  # fmt: skip

    @staticmethod
    def of(row: Row, request: Request) -> Completion:
        """Return the completion that another process generated for `request` and sent as `row`."""
        _, tokens, logp, finish, versions, kept = row
        return Completion(
            request=request, tokens=tokens, logp=logp, finish=finish, versions=versions, kept=kept
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper limits on the number and the size of the requests from a request source.

    At the start of `run`, an engine allocates enough memory for all requests within these limits.
    """

    sampling: Sampling
    requests: int
    """Maximum number of requests in flight at once."""
    prompts: int
    """Maximum number of different prompts among the requests in flight."""
    prompt_tokens: int
    """The number of tokens of the longest prompt."""
    steady: bool = False
    """Whether requests arrive at unpredictable times. An engine that supports `steady` computes
    each completion independently of the rest of the batch, so that arrival times do not change
    completions.
    """

    @property
    def poll_seconds(self) -> float | None:
        """Seconds that an engine may wait for completions before it polls for new requests.

        Without `steady`, `poll_seconds` is None, because new requests appear only after the request
        source has received completions.
        """
        return POLL_SECONDS if self.steady else None


class RequestSource(Protocol):
    """A source of requests, which also receives the completions."""

    @property
    def limits(self) -> Limits:
        """Upper limits on the number and the size of this source's requests."""

    def take(self) -> Sequence[Request]:
        """Return the requests that have become ready; requests of one prompt are returned together.

        An engine stops when no request is in flight and `take` returns no requests. If no request
        is in flight and the request source still expects new requests, `take` must wait for them.
        """

    def done(self, completions: Sequence[Completion]) -> None:
        """Receive completions, which the engine passes on as soon as they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Properties of an engine."""

    backend: str
    """A text that tells the user which backend the engine uses, and why it uses no faster
    backend."""
    exact_logp: bool
    """Whether the engine's log-probabilities may serve as `old_logp`, because they equal the
    trainer's log-probabilities up to float32 rounding. Log-probabilities of a truncated
    distribution may never serve as `old_logp`.
    """
    shares_weights: bool
    """Whether the engine generates with the trainer's own weight tensors."""
    loads_in_flight: bool = False
    """Whether weights may be loaded while completions are generated."""


class News(str):
    """A message about an engine event that is not a failure."""

    __slots__ = ()


class Engine(Protocol):
    """The interface of an engine, which generates completions."""

    @property
    def info(self) -> EngineInfo:
        """Properties of this engine, such as its backend and the exactness of log-probabilities."""

    @property
    def preemptions(self) -> int:
        """Number of times so far that a completion was paused because the KV cache was full."""

    def run(self, requests: RequestSource) -> None:
        """Generate completions until the request source has no more requests."""

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Use these weights from now on; `version` is the number of optimizer steps so far.

        When the method returns, the engine has the weights and the caller may change the tensors.
        If `info.loads_in_flight` is true, another thread may call this method during `run`. If the
        weights change during `run`, completions in progress continue with the new weights, and
        record which version generated which tokens.
        """

    def events(self) -> list[str]:
        """Return a log line for each engine event since the last call, such as a repaired failure.

        The training run writes each line to its log. A line of type `News` reports no failure.
        """

    def close(self) -> None:
        """Free the engine's resources."""
