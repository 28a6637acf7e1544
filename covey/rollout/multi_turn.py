"""Multi-turn episodes: many conversations between a policy and its environment, interleaved.

    start -> (turn of the policy -> step of the environment -> more tokens) -> end

The engine works on the turns that are ready, while tools work on the others. A rollout that waits
for a tool holds no slot: its next turn is a new request, whose prompt is all that stands. The
random numbers of a turn have their own address, so the order in which tools answer changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from covey.engines.protocol import Completion, Limits, Request, Sampling
from covey.environments.calls import CallFormat, assistant_message
from covey.environments.drive import Reply
from covey.environments.host import Host
from covey.episode import Episode, EpisodeText
from covey.errors import DataError
from covey.models.conversation import Context, Conversations
from covey.models.language_model import LanguageModel
from covey.rng import Address, world_seed
from covey.stopping import may_be_given_up
from covey.types import (
    Finish,
    Group,
    Message,
    Prompt,
    Rollout,
    Segment,
    Turn,
    VersionSpan,
)


@dataclass(slots=True, kw_only=True)
class Interaction:
    """How rollouts interact with an environment."""

    host: Host
    call_format: CallFormat
    stops: tuple[str, ...] = ()
    """Texts that end a turn, because a call ends there."""
    max_turns: int
    """Turns of the policy."""
    max_calls: int
    """Calls of tools in an episode."""
    max_tokens: int
    """Tokens that the engine reads and samples for a turn: the whole conversation."""
    noted: bool = False
    """Whether the run has logged that the chat template rewrites history."""

    def notes(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Return what a user should know about how these rollouts went, once in a run."""
        if self.noted or all(len(rollout.segments) == 1 for rollout in rollouts):
            return []
        self.noted = True
        return [
            "the chat template rewrites earlier turns: such rollouts are trained in several "
            "segments, each as it was sampled"
        ]


@dataclass(slots=True)
class _Growing:
    """A segment that grows."""

    prompt_tokens: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def add(self, tokens: Sequence[int], logp: Sequence[float] | None) -> tuple[int, int]:
        """Append tokens, sampled ones with their log-probabilities; return where they are."""
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

    number: int
    """Of the prompt."""
    sample: int
    prompt: Prompt
    messages: list[Message] = field(default_factory=list)
    tools: tuple[Mapping[str, Any], ...] = ()
    state: str = ""
    """That the next turn is taken in."""
    context: Context | None = None
    segments: list[_Growing] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    calls: int = 0
    finish: Finish = "stop"
    """Why it ends, once it does."""
    version: int = 0

    @property
    def tool_names(self) -> list[str]:
        return [str(tool.get("function", tool).get("name", "")) for tool in self.tools]

    @property
    def taken(self) -> int:
        """Turns that the policy has taken."""
        return sum(turn.role == "assistant" for turn in self.turns)

    def add_turn(self, completion: Completion, message: Message) -> None:
        """Add a turn of the policy."""
        segment = self.segments[-1]
        start, stop = segment.add(completion.tokens, completion.logp)
        segment.versions += [
            VersionSpan(start + a, start + b, version) for a, b, version in completion.versions
        ]
        segment.kept += [completion.kept] if completion.kept else []
        self.version = completion.versions[-1].version if completion.versions else self.version
        self.messages.append(message)
        calls = tuple(message.get("tool_calls", ()))
        self.calls += len(calls)
        turn = Turn(
            role="assistant", segment=len(self.segments) - 1, start=start, stop=stop,
            text=message["content"], tool_calls=calls, state=self.state,
        )  # fmt: skip
        self.turns.append(turn)

    def rewarded(self, reward: float) -> None:
        """Note the reward of the turn that the policy took last."""
        self.turns[-1] = replace(self.turns[-1], reward=reward)

    def add_context(self, context: Context, messages: Sequence[Message]) -> None:
        """Add what the policy sees next: to the segment that stands, or as a new one."""
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
        """Return the rollout, not scored."""
        mine = [turn for turn in self.turns if turn.role == "assistant"]
        episode = Episode(
            messages=tuple(self.messages),
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
class MultiTurnEpisodes:
    """The rollouts of some prompts with an environment, as a source of requests for an engine."""

    prompts: Sequence[Prompt]
    steps: Sequence[int]
    """The training step of each prompt."""
    interaction: Interaction
    model: LanguageModel
    sampling: Sampling
    finished: Callable[[int, Rollout], None]
    """Called with the number of the prompt and the rollout, as soon as it ends."""
    conversations: Conversations = field(init=False)
    waiting: dict[int, _Conversation] = field(default_factory=dict)
    """Episodes that the environment works on, by key."""
    running: dict[int, _Conversation] = field(default_factory=dict)
    """Episodes that the engine works on, by number of their request."""
    numbers: int = 0
    """Requests so far."""
    rollouts: dict[tuple[int, int], Rollout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        renderer = self.model.renderer
        assert renderer is not None
        self.conversations = Conversations(
            renderer=renderer, instruction=self.interaction.call_format.instruction
        )
        self.interaction.host.clear()
        for number, prompt in enumerate(self.prompts):
            seed = world_seed(seed=self.sampling.seed, step=self.steps[number], prompt=prompt.id)
            for sample in range(self.sampling.group_size):
                episode = _Conversation(number, sample, prompt)
                self.waiting[self._key(episode)] = episode
                self.interaction.host.start(self._key(episode), prompt, seed)

    def _key(self, episode: _Conversation) -> int:
        return episode.number * self.sampling.group_size + episode.sample

    @property
    def limits(self) -> Limits:
        """One request for each episode at a time, whose prompt is its conversation so far."""
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
        """Tokens of the longest conversation that still leaves room for a turn."""
        most = min(self.interaction.max_tokens, self.model.context)
        return max(1, most - self.sampling.max_tokens)

    def take(self) -> Sequence[Request]:
        """Return the turns that have become ready; wait if the engine has nothing to do."""
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
        return _sharing(ready)

    def done(self, completions: Sequence[Completion]) -> None:
        """Hand turns of the policy to the environment."""
        texts = self.model.decode_many([completion.tokens for completion in completions])
        form, prefill = self.interaction.call_format, self.conversations.renderer.template.prefill
        for completion, text in zip(completions, texts, strict=True):
            episode = self.running.pop(completion.request.number)
            message = assistant_message(prefill + text, form, episode.tool_names)
            episode.add_turn(completion, message)
            self._hand_over(episode, message, completion.finish)

    def _hand_over(self, episode: _Conversation, message: Message, finish: Finish) -> None:
        host, key = self.interaction.host, self._key(episode)
        self.waiting[key] = episode
        if finish != "stop":
            episode.finish = finish
        elif episode.calls > self.interaction.max_calls:
            episode.finish = "tool_limit"
        else:
            host.step(key, message)
            return
        host.end(key)

    def _continue(self, episode: _Conversation, reply: Reply) -> Request | None:
        """Take what an environment replied; return the next turn, or None if there is none yet."""
        if reply.reward is not None:
            episode.rewarded(reply.reward)
        episode.messages += reply.messages
        episode.tools = reply.tools or episode.tools
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
            if not episode.taken:  # the prompt itself cannot be used
                raise
            episode.finish = "error"
            self._end(episode, Reply(done=True, error=str(error)))
            return None
        if context is None:
            self._stop(episode, "token_limit")
            return None
        episode.add_context(context, reply.messages)
        return self._request(episode, context)

    def _fitting(self, episode: _Conversation) -> Context | None:
        """Return what the policy sees next. None: that leaves no room for a turn."""
        context = self._context(episode)
        size = len(context.tokens)
        if size <= self.longest:
            return context
        if episode.taken:
            return None
        raise DataError(
            f"prompt {episode.prompt.id} has {size} tokens, and a turn may take "
            f"{self.sampling.max_tokens}: raise environment.max_tokens, which is "
            f"{self.interaction.max_tokens}; the model's context is {self.model.context}"
        )

    def _context(self, episode: _Conversation) -> Context:
        """Return what the policy sees next."""
        before = episode.context
        if before is None:
            return self.conversations.first(episode.messages, episode.tools)
        turn = next(turn for turn in reversed(episode.turns) if turn.role == "assistant")
        sampled = episode.segments[turn.segment].tokens[turn.start : turn.stop]
        return self.conversations.following(before, sampled, episode.messages, episode.tools)

    def _stop(self, episode: _Conversation, finish: Finish) -> None:
        """End an episode at a limit; the environment is asked for its reward."""
        episode.finish = finish
        self.waiting[self._key(episode)] = episode
        self.interaction.host.end(self._key(episode))

    def _request(self, episode: _Conversation, context: Context) -> Request:
        number, self.numbers = self.numbers, self.numbers + 1
        self.running[number] = episode
        step = self.steps[episode.number]
        address = Address(
            self.sampling.seed, step, episode.prompt.id, episode.sample, episode.taken
        )
        return Request(number=number, prompt=number, tokens=context.tokens, address=address)

    def _end(self, episode: _Conversation, reply: Reply) -> None:
        if not episode.segments:  # it ended before the policy had a turn
            episode.segments.append(_Growing(self.model.encode(episode.prompt.messages)))
        rollout = episode.rollout(reply)
        self.rollouts[episode.number, episode.sample] = rollout
        self.finished(episode.number, rollout)

    def groups(self) -> list[Group]:
        """Return the group of each prompt, once all episodes have ended."""
        samples = range(self.sampling.group_size)
        return [
            Group(prompt=prompt, rollouts=tuple(self.rollouts[number, s] for s in samples))
            for number, prompt in enumerate(self.prompts)
        ]


def _sharing(requests: Sequence[Request]) -> list[Request]:
    """Return requests with one prompt number for equal tokens, such as a group's first turns."""
    numbers: dict[tuple[int, ...], int] = {}
    shared = [replace(r, prompt=numbers.setdefault(r.tokens, r.number)) for r in requests]
    return sorted(shared, key=lambda request: request.prompt)
