"""The engine protocol: an engine pulls requests from a source and pushes completions back."""

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
"""Callable that returns the trained weights under the names of `model.named_parameters()`: all
weights, or only the adapter's. They do not change while an engine reads them. An engine that
shares the trainer's weights never calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of generation. All requests of one run of an engine share them."""

    group_size: int = 1
    """The number of completions of each prompt."""
    distribution: Distribution = field(default_factory=Distribution)
    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion.

    The text stays part of the completion, because rewards look for closing tags.
    """
    max_concurrent: int = 128
    """How many completions are generated at once."""
    seed: int = 0
    mask_replay: bool = False
    """Whether training needs the kept set of every token, if the distribution is truncated."""

    @property
    def returns_kept(self) -> bool:
        """Whether completions come with kept sets. Greedy completions never have them."""
        return (
            self.mask_replay and self.distribution.truncates and self.distribution.temperature > 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one completion."""

    number: int
    """Index of the request in its source."""
    prompt: int
    """Index of the prompt. An engine prefills requests with the same prompt index only once."""
    tokens: tuple[int, ...]
    address: Address
    """Address of the random numbers. It determines the completion, with tokens and settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The completion that an engine generated for a request."""

    request: Request
    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    """Log-probability of each token under the distribution it was drawn from."""
    finish: Finish
    versions: tuple[VersionSpan, ...]
    """The version of the weights for each span of tokens, in order and without gaps. There is one
    span, unless weights were loaded during generation."""
    kept: str = ""
    """The kept set of each token (kept_sets.py), if `Sampling.returns_kept`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest sizes that a source asks for.

    An engine allocates memory for them at the start.
    """

    sampling: Sampling
    requests: int
    """The number of requests in flight at once."""
    prompts: int
    """The number of different prompts among the requests in flight."""
    prompt_tokens: int
    """The number of tokens of the longest prompt."""
    steady: bool = False
    """Whether requests arrive while others run, at times that must not change the result. If so, an
    engine that supports it makes each completion independent of the others in the batch."""

    @property
    def poll_seconds(self) -> float | None:
        """Seconds that an engine may wait for a completion before it asks for new requests.

        None means that there is no limit, because new requests only follow completions.
        """
        return POLL_SECONDS if self.steady else None


class RequestSource(Protocol):
    """Hands out requests and takes completions."""

    @property
    def limits(self) -> Limits:
        """The largest sizes that this source asks for."""

    def take(self) -> Sequence[Request]:
        """Return the requests that have become ready; requests with the same prompt come together.

        An engine stops when it has no request left and this method returns none. So if no request
        is in flight and the source still expects new ones, the source waits in this method.
        """

    def done(self, completions: Sequence[Completion]) -> None:
        """Accept completions as soon as they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Properties of an engine."""

    backend: str
    """A line for the user: how the engine generates, and why not faster."""
    exact_logp: bool
    """Whether its log-probabilities may serve as `old_logp`, because they equal the trainer's up to
    float32 rounding. Log-probabilities of a truncated distribution never qualify."""
    shares_weights: bool
    """Whether the engine generates with the trainer's own weight tensors."""
    loads_in_flight: bool = False
    """Whether weights may be loaded while completions are generated."""


class Engine(Protocol):
    """Generates completions. An engine does not depend on rewards or training."""

    @property
    def info(self) -> EngineInfo:
        """Backend, exactness of log-probabilities, and handling of weights."""

    def run(self, requests: RequestSource) -> None:
        """Generate until the source has no more requests."""

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Generate with these weights from now on; `version` counts their optimizer steps.

        Returns once the engine has the weights; then the caller may change the tensors. If
        `info.loads_in_flight`, another thread may call this during `run`. Completions in progress
        then continue with the new weights and have a version span for each version.
        """

    def events(self) -> list[str]:
        """Return a line for each failure that was repaired since the last call, such as a restart.

        The run logs and counts them.
        """

    def close(self) -> None:
        """Free the engine's resources."""
