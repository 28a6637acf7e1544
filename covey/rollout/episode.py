"""Episodes: single-turn completions, and multi-turn conversations with an environment.

Rollouts contain exactly the tokens that the engine received and sampled; their text is never
tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from covey.engines.protocol import Completion, Engine, Limits, Request, Sampling
from covey.environments.calls import CallFormat, assistant_message
from covey.environments.host import Host, Reply
from covey.errors import ConfigError, DataError
from covey.models.chat import Context, Conversations
from covey.models.language_model import LanguageModel
from covey.rng import Address, world_seed
from covey.stopping import may_be_given_up
from covey.types import (
    Episode,
    EpisodeText,
    Finish,
    Group,
    Message,
    Prompt,
    Rollout,
    Segment,
    Turn,
    VersionSpan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt together with its tokens."""

    prompt: Prompt
    tokens: tuple[int, ...]
    step: int | None = None
    """The training step of the prompt; None if the caller gives one step for all prompts."""


def encode_prompts(
    model: LanguageModel, prompts: Iterable[Prompt], interaction: Interaction | None = None
) -> list[EncodedPrompt]:
    """Tokenize the messages of each prompt.

    With an environment, the tokens stay empty, because the episode tokenizes the messages.
    """
    if interaction is not None:
        return [EncodedPrompt(prompt=p, tokens=()) for p in prompts]
    return [EncodedPrompt(prompt=p, tokens=model.encode(p.messages)) for p in prompts]


def step_of(encoded: EncodedPrompt, usual: int) -> int:
    """Return the training step of a prompt, or `usual` if the prompt's step is None."""
    return usual if encoded.step is None else encoded.step


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
    kind: Callable[..., SingleTurnEpisodes | MultiTurnEpisodes] = SingleTurnEpisodes
    if interaction is not None:
        kind = partial(MultiTurnEpisodes, interaction=interaction)
    episodes = kind(prompts=prompts, model=model, sampling=sampling, step=step, finished=finished)
    engine.run(episodes)
    return episodes.groups()


@dataclass(slots=True, kw_only=True)
class Episodes:
    """Base class of the engine's request sources, which run a group of episodes per prompt."""

    prompts: Sequence[EncodedPrompt]
    model: LanguageModel
    sampling: Sampling
    step: int
    finished: Callable[[int, Rollout], None]
    """A function that is called when a rollout ends; its arguments are the prompt's index and the
    rollout.
    """
    rollouts: dict[tuple[int, int], Rollout] = field(default_factory=dict)
    """Finished rollouts; the key is (prompt index, sample index)."""

    def add(self, number: int, rollout: Rollout) -> None:
        """Add a finished rollout of the prompt with index `number`."""
        self.rollouts[number, rollout.sample] = rollout
        self.finished(number, rollout)

    def groups(self) -> list[Group]:
        """Return the group of each prompt; all episodes must have ended."""
        samples = range(self.sampling.group_size)
        return [
            Group(prompt=p.prompt, rollouts=tuple(self.rollouts[number, s] for s in samples))
            for number, p in enumerate(self.prompts)
        ]


@dataclass(slots=True, kw_only=True)
class SingleTurnEpisodes(Episodes):
    """A request source for the engine, with the requests of single-turn episodes."""

    ready: list[Request] = field(init=False)

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
        """Upper limits on the number and size of engine requests. Each single-turn episode makes
        one request."""
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
        texts = completion_texts(self.model, completions, self.model.opening)
        for completion, text in zip(completions, texts, strict=True):
            number = completion.request.prompt
            encoded = self.prompts[number]
            rollout = Rollout.single_turn(
                prompt_id=encoded.prompt.id,
                sample=completion.request.address.sample,
                prompt_tokens=encoded.tokens,
                tokens=completion.tokens,
                sampler_logp=completion.logp,
                versions=completion.versions,
                kept=(completion.kept,) if completion.kept else (),
                text=text,
                finish=completion.finish,
            )
            self.add(number, rollout)


# Multi-turn episodes: concurrent conversations between the policy and an environment.
#
#     start -> (turn of the policy -> step of the environment -> more tokens) -> end
#
# The engine generates the next turns of some episodes while tools run for others. A rollout that
# waits for a tool occupies no slot of the engine; its next turn is a new request whose prompt is
# the conversation so far. The random numbers of a turn depend on its index, so the order in which
# tool results arrive has no effect.


@dataclass(slots=True, kw_only=True)
class Interaction:
    """Settings and limits of episodes with an environment."""

    host: Host
    call_format: CallFormat
    stops: tuple[str, ...] = ()
    """Stop strings that end a turn of the policy, such as `</tool_call>`."""
    max_turns: int
    """Maximum number of the policy's turns in an episode."""
    max_calls: int
    """Maximum number of tool calls in an episode."""
    max_tokens: int
    """Maximum number of tokens of the whole conversation."""
    refusal: str = ""
    """Why this interaction cannot have tools; empty if it can."""
    said: set[str] = field(default_factory=set)
    """The notes that the user was already given."""

    def notes(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Return notes for the user about `rollouts`; each note is returned only once in a run."""
        notes = []
        if any(len(rollout.segments) > 1 for rollout in rollouts):
            notes.append(
                "the chat template rewrites earlier turns, so these rollouts are trained in "
                "several segments, each with the tokens that were sampled"
            )
        calls = [call for r in rollouts for turn in r.turns for call in turn.tool_calls]
        for name in sorted({call["format"] for call in calls if "format" in call}):
            notes.append(
                f"the policy writes tool calls in the format {name}, which this run does not read; "
                f"set environment.call_format = {name!r} to read them"
            )
        new = [note for note in notes if note not in self.said]
        self.said.update(new)
        return new


@dataclass(slots=True)
class _Growing:
    """A segment of an unfinished episode, to which new tokens are appended."""

    prompt_tokens: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def add(self, tokens: Sequence[int], logp: Sequence[float] | None) -> tuple[int, int]:
        """Append tokens, and return their start and stop index.

        `logp` is None if the policy did not sample the tokens.
        """
        start = len(self.tokens)
        self.tokens += tokens
        self.trained += [logp is not None] * len(tokens)
        self.logp += [0.0] * len(tokens) if logp is None else logp
        return start, len(self.tokens)

    def segment(self, version: int) -> Segment:
        return Segment(
            prompt_tokens=self.prompt_tokens,
            tokens=tuple(self.tokens),
            trained=tuple(self.trained),
            sampler_logp=tuple(self.logp),
            versions=tuple(self.versions) or (VersionSpan(0, 0, version),),
            kept=tuple(self.kept),
        )


@dataclass(slots=True)
class _Conversation:
    """One episode in progress."""

    key: int
    """The number of the episode in the environment host."""
    number: int
    """Index of the prompt."""
    sample: int
    prompt: Prompt
    step: int
    messages: list[Message] = field(default_factory=list)
    tools: tuple[Mapping[str, Any], ...] = ()
    state: str = ""
    """Digest of the environment's state before the policy's next turn."""
    context: Context | None = None
    segments: list[_Growing] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    scored: dict[int, str] = field(default_factory=dict)
    """Maps the index of each policy message to the text that is scored and recorded."""
    calls: int = 0
    finish: Finish = "stop"
    """Why the episode ended; meaningless while the episode is in progress."""
    version: int = 0

    @property
    def schemas(self) -> dict[str, Any]:
        """Maps the name of each tool to the JSON schema of its arguments."""
        functions = [tool.get("function", tool) for tool in self.tools]
        return {str(each.get("name", "")): each.get("parameters") for each in functions}

    @property
    def taken(self) -> int:
        """Number of turns that the policy has taken."""
        return sum(turn.role == "assistant" for turn in self.turns)

    def add_turn(self, completion: Completion, message: Message, text: str) -> None:
        """Add a turn of the policy; `text` is the text of the turn that is scored and recorded."""
        segment = self.segments[-1]
        start, stop = segment.add(completion.tokens, completion.logp)
        segment.versions += [
            VersionSpan(start + a, start + b, version) for a, b, version in completion.versions
        ]
        segment.kept += [completion.kept] if completion.kept else []
        self.version = completion.versions[-1].version if completion.versions else self.version
        self.scored[len(self.messages)] = text
        self.messages.append(message)
        calls = tuple(message.get("tool_calls", ()))
        self.calls += len(calls)
        turn = Turn(
            role="assistant", segment=len(self.segments) - 1, start=start, stop=stop,
            text=text, tool_calls=calls, state=self.state,
        )  # fmt: skip
        self.turns.append(turn)

    def add_context(self, context: Context, messages: Sequence[Message]) -> None:
        """Append the next turn's prompt to the last segment, or begin a new segment with this
        prompt."""
        self.context = context
        first = not self.segments
        start = stop = 0
        if context.new_segment:
            self.segments.append(_Growing(context.tokens))
        else:
            cut = len(context.tokens) - context.added
            start, stop = self.segments[-1].add(context.tokens[cut:], None)
        if not first:
            text = "\n".join(message["content"] for message in messages)
            role = messages[0]["role"]
            where = len(self.segments) - 1
            self.turns.append(Turn(role=role, segment=where, start=start, stop=stop, text=text))

    def rollout(self, reply: Reply) -> Rollout:
        """Return the finished episode as an unscored rollout."""
        mine = [turn for turn in self.turns if turn.role == "assistant"]
        messages = (
            {**message, "content": self.scored.get(number, message["content"])}
            for number, message in enumerate(self.messages)
        )
        episode = Episode(
            messages=tuple(messages),
            turn_rewards=tuple(turn.reward for turn in mine),
            outcome=reply.outcome,
            finish=self.finish,
            error=reply.error,
        )
        return Rollout(
            prompt_id=self.prompt.id,
            sample=self.sample,
            segments=tuple(growing.segment(self.version) for growing in self.segments),
            turns=tuple(self.turns),
            text=EpisodeText.of(mine[-1].text if mine else "", episode),
            finish=self.finish,
            episode=episode,
        )


@dataclass(slots=True, kw_only=True)
class MultiTurnEpisodes(Episodes):
    """A request source for the engine, with the turns of episodes in an environment."""

    interaction: Interaction
    conversations: Conversations = field(init=False)
    waiting: dict[int, _Conversation] = field(default_factory=dict)
    """Episodes that wait for the environment, by their key."""
    running: dict[int, _Conversation] = field(default_factory=dict)
    """Episodes that wait for the engine, by the index of their request."""
    numbers: int = 0
    """Number of requests made so far."""

    def __post_init__(self) -> None:
        renderer, size = self.model.renderer, self.sampling.group_size
        assert renderer is not None
        self.conversations = Conversations(
            renderer=renderer,
            instruction=self.interaction.call_format.instruction,
            apart=self.interaction.call_format.apart,
            arguments_as_text=self.interaction.call_format.arguments_as_text,
        )
        self.interaction.host.clear()
        for number, encoded in enumerate(self.prompts):
            step, prompt = step_of(encoded, self.step), encoded.prompt
            seed = world_seed(seed=self.sampling.seed, step=step, prompt=prompt.id)
            for sample in range(size):
                key = number * size + sample
                self.waiting[key] = _Conversation(key, number, sample, prompt, step)
                self.interaction.host.start(key, prompt, seed)

    @property
    def limits(self) -> Limits:
        """Upper limits on the number and size of engine requests. Each episode has at most one
        request in flight."""
        episodes = len(self.prompts) * self.sampling.group_size
        return Limits(
            sampling=self.sampling,
            requests=episodes,
            prompts=episodes,
            prompt_tokens=self.longest,
            steady=True,
        )

    @property
    def longest(self) -> int:
        """Maximum number of prompt tokens that leaves enough space for another turn."""
        most = min(self.interaction.max_tokens, self.model.context)
        return max(1, most - self.sampling.max_tokens)

    def take(self) -> Sequence[Request]:
        """Return requests for the next turns. If the engine is idle, wait for a request."""
        ready: list[Request] = []
        while self.waiting and not ready:
            idle = not self.running
            with may_be_given_up():
                replies = self.interaction.host.replies(wait=idle)
            if not replies and not idle:
                break
            for key, reply in replies:
                request = self._continue(self.waiting.pop(key), reply)
                ready += [] if request is None else [request]
        # Requests with equal prompts, such as a group's first turns, share a prompt number.
        numbers: dict[tuple[int, ...], int] = {}
        shared = [replace(r, prompt=numbers.setdefault(r.tokens, r.number)) for r in ready]
        return sorted(shared, key=lambda request: request.prompt)

    def done(self, completions: Sequence[Completion]) -> None:
        """Pass the finished turns of the policy to the environment."""
        form, template = self.interaction.call_format, self.conversations.renderer.template
        texts = completion_texts(self.model, completions, "")
        for completion, text in zip(completions, texts, strict=True):
            episode = self.running.pop(completion.request.number)
            # The message contains the prefill, which may begin a tool call.
            raw = template.prefill + spoken_text(self.model, completion.tokens)
            message = assistant_message(template.prefill + text, form, episode.schemas, raw)
            episode.add_turn(completion, message, template.opening + text)
            if completion.finish != "stop":
                self._stop(episode, completion.finish)
            elif episode.calls > self.interaction.max_calls:
                self._stop(episode, "tool_limit")
            else:
                self.waiting[episode.key] = episode
                self.interaction.host.step(episode.key, message)

    def _stop(self, episode: _Conversation, finish: Finish) -> None:
        """End an episode that reached a limit; ask the environment for the final reward."""
        episode.finish = finish
        self.waiting[episode.key] = episode
        self.interaction.host.end(episode.key)

    def _continue(self, episode: _Conversation, reply: Reply) -> Request | None:
        """Process the environment's reply; return the next request, or None if the episode ends."""
        if reply.reward is not None:  # of the policy's last turn
            episode.turns[-1] = replace(episode.turns[-1], reward=reply.reward)
        episode.messages += reply.messages
        episode.tools = reply.tools or episode.tools
        if episode.tools and self.interaction.refusal:
            raise ConfigError(self.interaction.refusal)
        if reply.done:
            episode.finish = "error" if reply.error else episode.finish
            self._end(episode, reply)
            return None
        episode.state = reply.state
        if episode.taken >= self.interaction.max_turns:
            self._stop(episode, "turn_limit")
            return None
        try:
            context = self._fitting(episode)
        except DataError as error:
            if not episode.taken:  # the prompt itself is too long
                raise
            episode.finish = "error"
            self._end(episode, Reply(done=True, error=str(error)))
            return None
        if context is None:
            self._stop(episode, "token_limit")
            return None
        episode.add_context(context, reply.messages)
        number, self.numbers = self.numbers, self.numbers + 1
        self.running[number] = episode
        seed, prompt = self.sampling.seed, episode.prompt.id
        address = Address(seed, episode.step, prompt, episode.sample, episode.taken)
        return Request(number=number, prompt=number, tokens=context.tokens, address=address)

    def _fitting(self, episode: _Conversation) -> Context | None:
        """Return the next turn's prompt; None if another turn might exceed a token limit."""
        if episode.context is None:
            context = self.conversations.first(episode.messages, episode.tools)
        else:
            turn = next(turn for turn in reversed(episode.turns) if turn.role == "assistant")
            context = self.conversations.following(
                episode.context,
                episode.segments[turn.segment].tokens[turn.start : turn.stop],
                episode.messages,
                episode.tools,
            )
        size = len(context.tokens)
        if size <= self.longest:
            return context
        if episode.taken:
            return None
        raise DataError(
            f"prompt {episode.prompt.id} has {size} tokens, so a turn of "
            f"{self.sampling.max_tokens} tokens would exceed environment.max_tokens = "
            f"{self.interaction.max_tokens}; raise environment.max_tokens, but not above the "
            f"model's context of {self.model.context} tokens"
        )

    def _end(self, episode: _Conversation, reply: Reply) -> None:
        if not episode.segments:  # the episode ended before the policy had a turn
            episode.segments.append(_Growing(self.model.encode(episode.prompt.messages)))
        self.add(episode.number, episode.rollout(reply))


def spoken_text(model: LanguageModel, tokens: Sequence[int]) -> str:
    """Return the text of a turn with its special tokens, but without the token that ends it."""
    spoken = tokens[:-1] if tokens and tokens[-1] in model.stop_ids else tokens
    return str(
        model.tokenizer.decode(
            list(spoken), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def completion_texts(
    model: LanguageModel, completions: Sequence[Completion], prefill: str
) -> list[str]:
    """Return the prefill plus each completion's text; decode completions without a text."""
    rest = iter(model.decode_many([c.tokens for c in completions if c.text is None]))
    return [prefill + (next(rest) if c.text is None else c.text) for c in completions]
