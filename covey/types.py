"""The data types of a run, from `Prompt` and `Rollout` to `Batch` and `Totals`.

    Prompt -> Rollout -> Group -> Batch

In tensor shapes, B is the number of rows in the batch. T and P are the padded numbers of completion
tokens and prompt tokens.

This module imports torch only for type checking, so that tasks and rewards can import the types
without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch

    from covey.kept_sets import KeptSets


_T = TypeVar("_T")

ON_CPU = ("host", "kept", "teacher_prompts")
"""Names of the batch fields that stay on the CPU."""
EQUAL_REWARDS = 1e-8
"""Tolerance for comparing rewards. The rewards of a group count as equal if they differ by at most
`EQUAL_REWARDS * max(1, r)`, where `r` is the largest absolute reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt and its target (reference answer), created by a task.

    Example:
        Prompt(id="arithmetic/train/7", task="arithmetic", target="49",
               messages=({"role": "user", "content": "47+8-6?"},), info={"operations": 2})
    """

    id: str
    task: str
    messages: tuple[Message, ...]
    target: str
    info: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The original dataset columns from which the task made `messages` and `target`."""

    @property
    def text(self) -> str:
        """The content of the prompt's last message."""
        return str(self.messages[-1]["content"])


class VersionSpan(NamedTuple):
    """Consecutive sampled tokens, and the version of the policy that sampled them."""

    start: int
    stop: int
    version: int
    """The policy version: the number of optimizer steps taken before these tokens were sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A prompt and the tokens after it, exactly as the engine read and sampled them.

    The modules in `covey/rollout` create segments.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    """The tokens after the prompt, including a final end-of-sequence token if it was sampled."""
    trained: tuple[bool, ...]
    """Mask of the tokens in `tokens` that the policy sampled; False for tool output and for
    messages that the policy did not write."""
    sampler_logp: tuple[float, ...]
    """Log-probability of each token under the sampling distribution; 0 for tokens that the policy
    did not sample."""
    versions: tuple[VersionSpan, ...]
    """The policy version that sampled each span of tokens; weights may change during a rollout."""
    kept: tuple[str, ...] = ()
    """The set of tokens that top-k, top-p and min-p allowed at each sampled position, encoded as in
    kept_sets.py; empty if the engine did not record the sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of an episode: the tokens from `start` to `stop - 1` in the segment with index
    `segment`."""

    role: str
    segment: int = 0
    start: int
    stop: int
    text: str = ""
    """The text of the turn without special tokens; empty in single-turn rollouts, whose text is in
    `Rollout.text`."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    reward: float | None = None
    """The environment's reward for this turn alone; None if the environment gives no turn rewards.
    """
    state: str = ""
    """Digest of the environment's state before this turn; turns with equal digests started from the
    same state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A single completion or a multi-turn episode; the scorer fills in its reward and feedback."""

    prompt_id: str
    sample: int
    """Index of the rollout in its group, from 0. The index also determines the random numbers with
    which the rollout is sampled."""
    segments: tuple[Segment, ...]
    """The token sequences of the rollout; more than one if the chat template rewrote earlier
    messages."""
    turns: tuple[Turn, ...]
    text: str
    finish: Finish
    reward: float | None = None
    """The reward; None before scoring, and None (not 0.0) if scoring failed."""
    success: bool | None = None
    """Whether the completion is correct, regardless of the reward's value; None if not scored."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The components of the reward by name, such as accuracy and format, before weighting."""
    feedback: str = ""
    """Text feedback of the reward function on the completion; empty if there is no feedback."""
    teacher_prompt: tuple[int, ...] = ()
    """Tokens of the teacher's prompt in self-distillation, which contains privileged text; empty if
    the rollout has no teacher prompt."""
    reward_id: str = ""
    """Name, version and source hash of the reward function."""
    episode: Episode | None = None
    """The conversation with the environment; None for a rollout without an environment."""

    @staticmethod
    def single_turn(
        *,
        prompt_tokens: tuple[int, ...],
        tokens: tuple[int, ...],
        sampler_logp: tuple[float, ...],
        policy_version: int = 0,
        versions: tuple[VersionSpan, ...] | None = None,
        trained: tuple[bool, ...] | None = None,
        kept: tuple[str, ...] = (),
        **fields: Any,
    ) -> Rollout:
        """Return a single-turn rollout, sampled by `policy_version` unless `versions` is given."""
        size = len(tokens)
        segment = Segment(
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            trained=(True,) * size if trained is None else trained,
            sampler_logp=sampler_logp,
            versions=(VersionSpan(0, size, policy_version),) if versions is None else versions,
            kept=kept,
        )
        turn = Turn(role="assistant", start=0, stop=size)
        return Rollout(segments=(segment,), turns=(turn,), **fields)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The prompt tokens of the first segment."""
        return self.segments[0].prompt_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of all segments, without the prompt tokens."""
        return _joined([segment.tokens for segment in self.segments])

    @property
    def trained(self) -> tuple[bool, ...]:
        """Mask of the tokens in `tokens` that the policy sampled."""
        return _joined([segment.trained for segment in self.segments])

    @property
    def sampler_logp(self) -> tuple[float, ...]:
        """The log-probability of each token in `tokens`, under the sampling distribution."""
        return _joined([segment.sampler_logp for segment in self.segments])

    @property
    def sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(segment.trained.count(True) for segment in self.segments)

    @property
    def policy_version(self) -> int:
        """The oldest policy version that sampled tokens of this rollout."""
        return min(span.version for segment in self.segments for span in segment.versions)


def _joined(rows: list[tuple[_T, ...]]) -> tuple[_T, ...]:
    return rows[0] if len(rows) == 1 else tuple(chain.from_iterable(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt and its rollouts, whose rewards are compared with each other to get advantages."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rollouts of a training step as tensors; row i of each field belongs to segment i.

    A rollout takes one row, or several rows if the chat template rewrote earlier messages. Means
    and other statistics count each rollout once.

    `collate` fills the fields from `prompt_tokens` to `state`. Forward passes fill the fields from
    `old_logp` to `entropy`, except fields that the objective does not need. The objective then
    computes `token_penalty`, `advantage`, `selected` and `targets` over the whole batch, because
    these fields may depend on all rollouts. The objective computes `weight`, `correction` and
    `marked` for each mini-batch, because each mini-batch has its own loss and optimizer step. A
    micro-batch contains some rows of the batch, with unchanged values.
    """

    prompt_tokens: torch.Tensor
    """[B, P] int64: prompt token ids, left-aligned."""
    prompt_lengths: torch.Tensor
    """[B] int64."""
    tokens: torch.Tensor
    """[B, T] int64: completion token ids, left-aligned."""
    lengths: torch.Tensor
    """[B] int64: number of completion tokens in each row, including untrained tokens."""
    mask: torch.Tensor
    """[B, T] bool: whether the token is trained."""
    sampler_logp: torch.Tensor
    """[B, T] float32."""
    rewards: torch.Tensor
    """[B] float64: the reward of the row's rollout; NaN if scoring failed. Statistics leave out
    rollouts whose reward is NaN."""
    success: torch.Tensor
    """[B] bool."""
    group: torch.Tensor
    """[B] int64: index of the row's group.

    Groups may have any size, and the rows of a group may be in any order.
    """
    truncated: torch.Tensor
    """[B] bool: whether the rollout was cut off at a token limit."""
    parts: torch.Tensor | None = None
    """[B, K] float64: the K components of each row's reward, before weighting; NaN if scoring
    failed. None if the objective does not read reward components."""
    rollout: torch.Tensor | None = None
    """[B] int64: index of the rollout that the row belongs to, counted over the batch; None if
    every row is a separate rollout."""
    turn: torch.Tensor | None = None
    """[B, T] int64: the policy turn that contains the token, counted from 0; None if no rollout
    used an environment."""
    turn_reward: torch.Tensor | None = None
    """[B, T] float64: the environment's reward for the token's turn; 0 without a turn reward."""
    state: torch.Tensor | None = None
    """[B, T] int64: a number for the environment's state before the token's turn; equal states have
    equal numbers."""

    old_logp: torch.Tensor | None = None
    """[B, T] log-probability before the first optimizer step of the training step; if None, the
    loss uses the current log-probability instead."""
    ref_logp: torch.Tensor | None = None
    """[B, T] log-probability under the reference policy; None without a reference policy."""
    teacher_logp: torch.Tensor | None = None
    """[B, T] log-probability under the teacher model, for distillation; None without a teacher."""
    values: torch.Tensor | None = None
    """[B, T] the critic's value estimate before each token; None without a critic."""
    entropy: torch.Tensor | None = None
    """[B, T] entropy of the policy at each token before the training step, in nats; None if not
    computed."""

    token_penalty: torch.Tensor | None = None
    """[B, T]: the KL penalty that is subtracted from the reward; None if the KL penalty is part of
    the loss."""
    advantage: torch.Tensor | None = None
    """[B, T]."""
    selected: torch.Tensor | None = None
    """[B, T] bool: whether the token gets a policy gradient, if `top_entropy` selects tokens; None
    if every trained token does."""
    targets: torch.Tensor | None = None
    """[B, T]: the critic's target values (returns); None without a critic."""
    weight: torch.Tensor | None = None
    """[B, T]: the weight of each token in the loss. The loss is minus the weighted sum of the
    per-token gains (objective/loss.py)."""
    correction: torch.Tensor | None = None
    """[B, T]: detached importance weight of each token, which corrects for differences between
    engine and policy; None if all weights are 1."""
    marked: torch.Tensor | None = None
    """[B, T]: the token mask, ratio bounds or pair margins that the objective's function `marks`
    returns for a mini-batch; None if the objective has no `marks`."""

    host: HostRows | None = None
    """A CPU copy of the batch's tokens, lengths, mask and rollout indices, if the batch is on a
    GPU; may be None."""
    kept: KeptSets | None = None
    """The tokens that top-k, top-p and min-p allowed at each position, on the CPU; None if the
    rollouts do not record these tokens."""
    teacher_prompts: TeacherPrompts | None = None
    """The prompts that a self-teacher reads, on the CPU; None if no row has a teacher prompt."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def widths(self) -> tuple[int, int]:
        """P and T."""
        return self.prompt_tokens.shape[1], self.tokens.shape[1]

    @property
    def layout(self) -> Batch | HostRows:
        """The CPU copy `host` if there is one, otherwise the batch itself."""
        return self if self.host is None else self.host

    @property
    def one_row_each(self) -> bool:
        """Whether every rollout is a single row of the batch."""
        rollout = self.layout.rollout
        return rollout is None or len(rollout.unique()) == len(rollout)

    def rows(self, index: torch.Tensor) -> Batch:
        """Return the given rows, without columns that are padding in all these rows."""
        here = index if self.host is None else index.cpu()
        width = max(1, int(self.layout.lengths[here].max()))
        prompt_width = int(self.layout.prompt_lengths[here].max())
        if self._is_all(here) and (prompt_width, width) == self.widths:
            return self
        changes: dict[str, Any] = {}
        if self.host is not None:
            changes["host"] = self.host.rows(here, width, prompt_width)
            if not index.is_cuda:
                index = index.pin_memory().to(self.tokens.device, non_blocking=True)
        if self.kept is not None:
            changes["kept"] = self.kept.rows(here, width)
        if self.teacher_prompts is not None:
            changes["teacher_prompts"] = self.teacher_prompts.rows(here)
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None or name in ON_CPU:
                continue
            picked = value[index]
            if name == "prompt_tokens":
                picked = picked[:, :prompt_width]
            elif picked.ndim == 2 and name != "parts":
                picked = picked[:, :width]
            changes[name] = picked
        return replace(self, **changes)

    def _is_all(self, index: torch.Tensor) -> bool:
        """Return whether `index` is on the CPU and selects all rows in order."""
        return index.device.type == "cpu" and index.tolist() == [*range(len(self))]

    def as_teacher_reads(self) -> Batch:
        """Return the batch with the teacher's prompts in place of the rollouts' prompts."""
        given = self.teacher_prompts
        assert given is not None, "the rows have teacher prompts"
        changes: dict[str, Any] = {"prompt_tokens": given.tokens, "prompt_lengths": given.lengths}
        host = None if self.host is None else replace(self.host, **changes)
        changes = {name: value.to(self.tokens.device) for name, value in changes.items()}
        return replace(self, **changes, host=host, teacher_prompts=None)

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to a device; if the device is a GPU, also set the CPU copy `host`."""
        moved: dict[str, Any] = {
            name: _moved(getattr(self, name), device)
            for name in self.__slots__
            if name not in ON_CPU and getattr(self, name) is not None
        }
        host = None if moved["tokens"].device.type == "cpu" else HostRows.of(self)
        return replace(self, **moved, host=host)


def _moved(values: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor to a device; a copy to a GPU uses pinned memory and does not block."""
    if values.device.type == "cpu" and str(device).startswith("cuda"):
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


# Totals: the denominators of an optimizer step.


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The denominators of the loss: numbers of rollouts, groups and tokens in an optimizer step.

    Rollouts without a reward are left out, if the objective learns from rewards.
    """

    sequences: int
    """Number of rollouts."""
    tokens: int
    groups: int
    group_tokens: Mapping[int, int]
    """Number of trained tokens of each group, by group id; the rows of a group may be in several
    micro-batches and on several ranks."""
    rollout_tokens: Mapping[int, int] | None = None
    """Number of trained tokens of each rollout, by rollout id; None if every rollout is one row."""

    @staticmethod
    def of(batch: Batch, counted: torch.Tensor | None = None) -> Totals:
        """Count the rollouts, groups and trained tokens of a batch, or of its rows in `counted`."""
        rollout = None if batch.one_row_each else batch.rollout
        group, tokens = batch.group, batch.mask.sum(dim=1)
        if counted is None:
            return Totals.counted(group, tokens, rollout)
        some = None if rollout is None else rollout[counted]
        return Totals.counted(group[counted], tokens[counted], some)

    @staticmethod
    def counted(
        group: torch.Tensor, tokens: torch.Tensor, rollout: torch.Tensor | None = None
    ) -> Totals:
        """Count the rollouts, trained tokens and groups of the given rows.

        If `rollout` is None, each row counts as one rollout.
        """
        groups = _sums(group, tokens)
        rollouts = None if rollout is None else _sums(rollout, tokens)
        return Totals(
            sequences=len(group) if rollouts is None else len(rollouts),
            tokens=int(tokens.sum()),
            groups=len(groups),
            group_tokens=groups,
            rollout_tokens=rollouts,
        )


def _sums(ids: torch.Tensor, values: torch.Tensor) -> dict[int, int]:
    """Return the sum of `values` [B] for each id in `ids` [B]."""
    found, place = ids.unique(return_inverse=True)
    sums = values.new_zeros(len(found)).index_add(0, place, values)
    return dict(zip(found.tolist(), sums.tolist(), strict=True))


# CPU copies of the batch fields that determine the layout of a batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """A CPU copy of a batch's tokens, lengths, mask and rollout indices.

    Code that only needs the layout of a batch reads this copy, because reading lengths from the GPU
    would wait for all queued GPU work.
    """

    prompt_tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor
    rollout: torch.Tensor | None = None

    @staticmethod
    def of(batch: Batch) -> HostRows:
        """Copy a batch's tokens, lengths, mask and rollout indices to the CPU."""
        fields = ((name, getattr(batch, name)) for name in HostRows.__slots__)
        return HostRows(**{name: value.cpu() for name, value in fields if value is not None})

    def rows(self, index: torch.Tensor, width: int, prompt_width: int) -> HostRows:
        """Return the given rows, cut to `width` completion tokens and `prompt_width` prompt
        tokens."""
        return HostRows(
            prompt_tokens=self.prompt_tokens[index, :prompt_width],
            prompt_lengths=self.prompt_lengths[index],
            tokens=self.tokens[index, :width],
            lengths=self.lengths[index],
            mask=self.mask[index, :width],
            rollout=None if self.rollout is None else self.rollout[index],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherPrompts:
    """Prompts that only a self-teacher sees, one for each row of the batch, on the CPU."""

    tokens: torch.Tensor
    """[B, Q] int64: the tokens of the teacher's prompts, left-aligned."""
    lengths: torch.Tensor
    """[B] int64: the lengths of the teacher's prompts; 0 for rows without a teacher prompt, which
    the teacher skips."""

    def rows(self, index: torch.Tensor) -> TeacherPrompts:
        """Return the prompts of the given rows, padded only to the longest of these prompts."""
        lengths = self.lengths[index]
        return TeacherPrompts(tokens=self.tokens[index, : int(lengths.max())], lengths=lengths)


# The episode of a multi-turn rollout, which rewards may read in addition to its text.

Finish = Literal["stop", "length", "turn_limit", "tool_limit", "token_limit", "error"]
"""Why a rollout ended. "stop" means that the policy ended its completion. "length" means that a
completion reached its token limit. "turn_limit", "tool_limit" and "token_limit" mean that the whole
episode reached a limit. "error" means that the environment failed."""
TRUNCATED: frozenset[Finish] = frozenset({"length", "token_limit"})
"""Values of `Finish` for rollouts that were truncated at a token limit."""
Message = Mapping[str, Any]
"""A chat message with `role` and `content`; an assistant message may have `tool_calls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A conversation between the policy and an environment.

    The package `covey.rollout` creates episodes.
    """

    messages: tuple[Message, ...]
    """All messages of the conversation, starting with the prompt."""
    turn_rewards: tuple[float | None, ...]
    """The environment's reward for each policy turn; None for a turn without a reward."""
    outcome: Mapping[str, float] | None
    """The reward components, by name, that the environment's `reward` method returned; None if the
    environment has no `reward` method."""
    finish: Finish
    error: str = ""
    """The error message of the environment; empty if there was no error."""

    @property
    def tool_calls(self) -> list[Mapping[str, object]]:
        """All tool calls of the policy, in order."""
        return [call for message in self.reply for call in message.get("tool_calls", ())]

    @property
    def reply(self) -> tuple[Message, ...]:
        """All messages from the first turn of the policy to the end."""
        turns = [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]
        own = turns[len(turns) - len(self.turn_rewards) :]  # a prompt may contain examples of turns
        return self.messages[own[0] :] if own else ()


class EpisodeText(str):
    """The text of the policy's last turn, a `str` with the whole episode as an attribute.

    A reward function can use the text like any string, or call `episode_of(text)` to get the whole
    episode.
    """

    episode: Episode

    @staticmethod
    def of(text: str, episode: Episode) -> EpisodeText:
        """Return a text with the given episode in its attribute `episode`."""
        whole = EpisodeText(text)
        whole.episode = episode
        return whole


def episode_of(text: str) -> Episode | None:
    """Return the episode that a rollout's text belongs to; None if there was no environment."""
    return getattr(text, "episode", None)
