"""Single-turn episodes, and the choice between single-turn and multi-turn episodes.

Rollouts contain exactly the tokens that the engine received and sampled. The text of a rollout is
never tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from covey.engines.protocol import Completion, Engine, Limits, Request, Sampling
from covey.models.language_model import LanguageModel
from covey.rng import Address
from covey.rollout.multi_turn import Interaction, MultiTurnEpisodes, completion_texts
from covey.types import Group, Prompt, Rollout, Segment, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt together with its tokens."""

    prompt: Prompt
    tokens: tuple[int, ...]
    prefill: str = ""
    """The prefill: the end of the prompt, which is prepended to every completion's text."""
    step: int | None = None
    """The training step of the prompt. None means the training step that is passed with the
    prompts."""


def encode_prompts(
    model: LanguageModel, prompts: Iterable[Prompt], interaction: Interaction | None = None
) -> list[EncodedPrompt]:
    """Tokenize each prompt's messages.

    Messages from an environment are tokenized later, during the episode.
    """
    prefill = model.opening
    if interaction is not None:
        return [EncodedPrompt(prompt=p, tokens=(), prefill=prefill) for p in prompts]
    return [
        EncodedPrompt(prompt=p, tokens=model.encode(p.messages), prefill=prefill) for p in prompts
    ]


@dataclass(slots=True, kw_only=True)
class Episodes:
    """Single-turn episodes, which send their requests to an engine."""

    prompts: Sequence[EncodedPrompt]
    model: LanguageModel
    sampling: Sampling
    step: int
    finished: Callable[[int, Rollout], None]
    """Called with the prompt's index and the rollout as soon as the rollout ends."""
    ready: list[Request] = field(init=False)
    rollouts: dict[tuple[int, int], Rollout] = field(default_factory=dict)
    """Finished rollouts, by the indices of prompt and sample."""

    def __post_init__(self) -> None:
        size, seed = self.sampling.group_size, self.sampling.seed
        self.ready = [
            Request(
                number=number * size + sample,
                prompt=number,
                tokens=encoded.tokens,
                address=Address(seed, step_of(encoded, self.step), encoded.prompt.id, sample),
            )
            for number, encoded in enumerate(self.prompts)
            for sample in range(size)
        ]

    @property
    def limits(self) -> Limits:
        """Limits of the requests. Each single-turn episode makes one request."""
        return Limits(
            sampling=self.sampling,
            requests=len(self.prompts) * self.sampling.group_size,
            prompts=len(self.prompts),
            prompt_tokens=max((len(p.tokens) for p in self.prompts), default=0),
        )

    def take(self) -> Sequence[Request]:
        """Return the requests that the engine can start now."""
        ready, self.ready = self.ready, []
        return ready

    def done(self, completions: Sequence[Completion]) -> None:
        """Turn finished completions into rollouts."""
        texts = completion_texts(self.model, completions)
        for completion, text in zip(completions, texts, strict=True):
            number = completion.request.prompt
            rollout = _rollout(self.prompts[number], completion, text)
            self.rollouts[number, rollout.sample] = rollout
            self.finished(number, rollout)

    def groups(self) -> list[Group]:
        """Return the group of each prompt. All episodes must have ended."""
        samples = range(self.sampling.group_size)
        return [
            Group(prompt=p.prompt, rollouts=tuple(self.rollouts[number, s] for s in samples))
            for number, p in enumerate(self.prompts)
        ]


def step_of(encoded: EncodedPrompt, usual: int) -> int:
    """Return the training step of a prompt, or `usual` if the prompt has no step of its own."""
    return usual if encoded.step is None else encoded.step


def _rollout(encoded: EncodedPrompt, completion: Completion, text: str) -> Rollout:
    size = len(completion.tokens)
    segment = Segment(
        prompt_tokens=encoded.tokens,
        tokens=completion.tokens,
        trained=(True,) * size,
        sampler_logp=completion.logp,
        versions=completion.versions,
        kept=(completion.kept,) if completion.kept else (),
    )
    return Rollout(
        prompt_id=encoded.prompt.id,
        sample=completion.request.address.sample,
        segments=(segment,),
        turns=(Turn(role="assistant", start=0, stop=size),),
        text=encoded.prefill + text,
        finish=completion.finish,
    )


def generate(
    prompts: Sequence[EncodedPrompt],
    *,
    engine: Engine,
    model: LanguageModel,
    sampling: Sampling,
    step: int,
    finished: Callable[[int, Rollout], None] = lambda number, rollout: None,
    interaction: Interaction | None = None,
) -> list[Group]:
    """Return a group of `sampling.group_size` unscored rollouts for each prompt, in order."""
    episodes: Episodes | MultiTurnEpisodes
    if interaction is None:
        episodes = Episodes(
            prompts=prompts, model=model, sampling=sampling, step=step, finished=finished
        )
    else:
        episodes = MultiTurnEpisodes(
            prompts=[p.prompt for p in prompts],
            steps=[step_of(p, step) for p in prompts],
            model=model, sampling=sampling, finished=finished, interaction=interaction,
        )  # fmt: skip
    engine.run(episodes)
    return episodes.groups()
