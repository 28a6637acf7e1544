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
"""Gives the weights that training changes, by the names of `model.named_parameters()`: all of them,
or those of the adapter alone. They do not change while an engine reads them. An engine that shares
the trainer's weights never calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of generation. All requests of one run of an engine share them."""

    group_size: int = 1
    """Completions of each prompt."""
    distribution: Distribution = field(default_factory=Distribution)
    max_tokens: int
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion. They stay part of it, since rewards look for closing tags."""
    max_concurrent: int = 128
    """How many completions are generated at once."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one completion."""

    number: int
    """Number within the source."""
    prompt: int
    """Requests with the same number here have the same tokens, which an engine reads once."""
    tokens: tuple[int, ...]
    address: Address
    """Of the random numbers. The completion depends on this, the tokens and the settings alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine generated for a request."""

    request: Request
    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    """Log-probability of each token under the distribution it was drawn from."""
    finish: Finish
    versions: tuple[VersionSpan, ...]
    """The version of the weights for each span of tokens, in order and without gaps. One span,
    unless weights were loaded while it was generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a source asks of an engine. An engine allocates memory for it at the start."""

    sampling: Sampling
    requests: int
    """Requests in flight at once."""
    prompts: int
    """Different prompts among them."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    steady: bool = False
    """Whether requests arrive while others run, at times that must not show in the result. An
    engine that can then computes every completion as if it were alone."""

    @property
    def poll_seconds(self) -> float | None:
        """How long an engine may wait for a completion before it asks for new requests.

        None: without a limit, since new requests follow completions only.
        """
        return POLL_SECONDS if self.steady else None


class RequestSource(Protocol):
    """Hands out requests and takes completions."""

    @property
    def limits(self) -> Limits:
        """The most that this source asks."""

    def take(self) -> Sequence[Request]:
        """Return the requests that have become ready; requests that share a prompt together.

        An engine stops when it has no request left and this returns none. So a source that still
        waits for something else, and has no request in flight, waits here.
        """

    def done(self, completions: Sequence[Completion]) -> None:
        """Accept completions, as soon as they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says about itself."""

    backend: str
    """How it generates, and why not faster, in one line for the user."""
    exact_logp: bool
    """Whether its log-probabilities may serve as `old_logp`: they are the trainer's, up to
    rounding in float32. Those of a truncated distribution never are."""
    shares_weights: bool
    """Whether it generates with the trainer's own tensors."""
    loads_in_flight: bool = False
    """Whether weights may be loaded while completions are generated."""


class Engine(Protocol):
    """Generates completions. It knows nothing of rewards or training."""

    @property
    def info(self) -> EngineInfo:
        """Backend, exactness, weights."""

    def run(self, requests: RequestSource) -> None:
        """Generate until the source has no more requests."""

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Generate with these weights from now on; `version` counts their optimizer steps.

        Returns once the engine has them: the caller may then change the tensors. Another thread may
        call it during `run` if `info.loads_in_flight`; completions in progress then continue with
        the new weights, and have a version span for each.
        """

    def events(self) -> list[str]:
        """Return what failed and was repaired since the last call, such as restarts: a line each.

        The run logs and counts them.
        """

    def close(self) -> None:
        """Free what the engine holds."""
