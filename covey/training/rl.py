"""A step of reinforcement learning: collect groups, filter them, train on them, and log metrics.

rollout/source.py collects the groups, and training/step.py trains on them. The metrics include the
GPU utilization. If generation overlaps training, the metrics also include how long generation and
training waited for each other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from covey.config.schema import Config
from covey.engines.protocol import News
from covey.objective.masked import row_sum
from covey.rollout.metrics import overlap_metrics, rollout_metrics, selection_metrics
from covey.rollout.overlap import CopySource, RolloutQueue, read_in_flight, write_in_flight
from covey.rollout.prompts import PromptChoice
from covey.rollout.replay import ReplayBuffer
from covey.rollout.source import RolloutSource, StepRollouts, SynchronousSource
from covey.run.folder import RunFolder
from covey.run.metric_registry import meaning, with_open_instruct_names
from covey.run.resume import Start
from covey.run.samples import SamplePage, read_samples
from covey.run.trackers import Tracker
from covey.scoring.baselines import REMEDY
from covey.stopping import StopSignal
from covey.training.build import Parts
from covey.training.loop import Trainer, run_loop
from covey.training.preferences import PairSource
from covey.training.schedule import Budget
from covey.training.state import State
from covey.training.step import training_step
from covey.types import Batch, Group

EARLY = 3
"""Number of steps at the start of a run in which an empty replay buffer is normal."""


def train(
    parts: Parts,
    run: RunFolder,
    trackers: Sequence[Tracker],
    stop: StopSignal,
    start: Start | None = None,
) -> int:
    """Train with RL until the run ends or a signal arrives; return the last saved step."""
    config = parts.config
    trainer = Reinforcement(
        parts=parts,
        budget=Budget(settings=config.train),
        rollouts=config.rollout.prompts_per_step * config.rollout.group_size,
        evaluate_every=config.evaluate.every,
        fresh=State(beta=parts.learner.objective.beta),
    )
    return run_loop(trainer, run, trackers, stop, start)


@dataclass(slots=True, kw_only=True)
class Reinforcement(Trainer):
    """The trainer of RL runs, whose step the training loop calls."""

    parts: Parts
    queue: RolloutQueue = field(init=False)
    choice: PromptChoice = field(init=False)
    replay: ReplayBuffer = field(init=False)
    samples: SamplePage = field(init=False)
    seconds: float | None = None
    """Total duration of all steps so far, in seconds. A resumed run reads the durations of earlier
    steps from steps.jsonl. Checkpoints contain no times, so that two runs with the same settings
    have identical checkpoints."""
    preemptions: int = 0
    """Number of times that the engine had paused a completion by the end of the last step."""

    @property
    def updates(self) -> int:
        """The number of optimizer steps of the policy and of the critic."""
        critic = self.parts.learner.critic
        return self.parts.policy.version + (0 if critic is None else critic.updates)

    def apply_settings(self, state: State) -> None:
        """Use objective.beta if it changed."""
        self.parts.learner.apply_settings(state)

    def begin(self, checkpoint: Path | None, log: Tracker) -> None:
        """Prepare the first step, and read the files that `save` added to the checkpoint."""
        parts, prompts, config = self.parts, self.parts.train_prompts, self.parts.config
        count, held = config.rollout.prompts_per_step, list[StepRollouts]()
        self.choice = PromptChoice(settings=config.curriculum, prompts=prompts, seed=config.seed)
        self.replay = ReplayBuffer(settings=config.replay, seed=config.seed)
        self.samples = SamplePage(config.save.samples_shown)
        if checkpoint is not None:
            held = read_in_flight(checkpoint, prompts, seed=config.seed, count=count)
            self.choice.load(checkpoint)
            self.replay.load(checkpoint)
            self.samples = read_samples(checkpoint, config.save.samples_shown)
        source: RolloutSource
        if config.preferences.file:
            source = PairSource(parts)
        elif config.overlap.mode == "copy":
            source = CopySource(parts, log)
        else:
            source = SynchronousSource(parts, log)
        by_step = {one.ticket.step: one for one in held}
        self.queue = RolloutQueue(parts=parts, source=source, choice=self.choice, held=by_step)
        if checkpoint is None and parts.baselines is not None:
            for found in parts.baselines.flagged():
                log.note(f"task: {found}: {REMEDY}")
        if config.overlap.staleness:
            log.note(overlap_note(parts))

    def save(self, folder: Path, step: int) -> None:
        """Add pending rollouts, curriculum, replay buffer and samples to a checkpoint."""
        held = self.queue.in_flight(after=step)  # every rank may have to wait for these rollouts
        if self.parts.world.is_main:
            write_in_flight(folder, held)
            self.choice.save(folder)
            self.replay.save(folder)
            self.samples.save(folder)

    def close(self) -> None:
        """End background generation and the engine's processes."""
        if hasattr(self, "queue"):
            self.queue.source.close()
        self.parts.engine.close()

    def step(self, state: State, run: RunFolder, log: Tracker) -> None:
        """Collect and filter groups, train on them, and log metrics."""
        parts, started = self.parts, time.perf_counter()
        learner = parts.learner.at(state)
        share = self.budget.spent(replace(state, step=state.step - 1).used(parts.policy))
        rollouts = self.queue.take(state.step, share)
        waited, version = time.perf_counter() - started, parts.policy.version
        overlap = overlap_metrics(rollouts, parts.config.overlap, waited, version)
        paused = parts.engine.preemptions - self.preemptions
        self.preemptions += paused
        collected, (events, engine) = rollouts.collected, engine_events(parts, paused)
        for note in (*rollouts.notes, *(f"step {state.step}: {event}" for event in events)):
            log.note(note)
        replayed, data = self._replayed(state.step, rollouts, log)
        groups = (*rollouts.selected.groups, *replayed)
        state.episode += len(collected.rollouts)
        state.tokens += collected.tokens
        training = time.perf_counter()
        batch, learned, state.beta = training_step(learner, groups, state.step)
        ended = time.perf_counter()
        self.choice.add(collected.groups, rollouts.used_picks)
        self.replay.add(rollouts.selected.groups, parts.policy.version)
        metrics: dict[str, Any] = {
            **_progress(parts, state),
            **rollout_metrics(collected, parts.policy.model.stop_ids),
            **selection_metrics(rollouts),
            **learned,
            **overlap,
            **data,
            **engine,
            "time/rollout": collected.rollout_seconds,
            "time/score": collected.score_seconds,
            "time/update": ended - training,
            "time/total": ended - started,
            "time/from_scratch": self._so_far(run, ended - started),
            "time/tokens_per_second": collected.tokens / (ended - started),
            **usage_metrics(parts, groups, ended - training),
        }
        metrics |= reference_rewards(metrics)
        assert all(meaning(name) for name in metrics), "every metric has a meaning"
        if parts.config.save.rollouts:
            every = (*collected.groups, *replayed)
            means, used = _mean_advantages(every, groups, batch)
            log.table("rollouts", state.step, run.rollout_rows(every, means, len(replayed), used))
        self._write_samples(run, state.step, collected.groups)
        log.step(with_open_instruct_names(metrics))
        if state.step == 1 and parts.config.engine.rounds and parts.learner.settings.sampled:
            log.note(lost_note(parts.config, metrics))

    def _replayed(
        self, step: int, rollouts: StepRollouts, log: Tracker
    ) -> tuple[list[Group], dict[str, float]]:
        """Return the groups drawn from the replay buffer, and metrics of replay and curriculum."""
        ids = {group.prompt.id for group in rollouts.collected.groups}
        version = self.parts.policy.version
        drawn = self.replay.draw(step=step, version=version, without=ids)
        data = self.replay.metrics(drawn, version) | self.choice.metrics(rollouts.used_picks)
        for note in data_notes(self.parts.config, step, data):
            log.note(note)
        return drawn, data

    def _write_samples(self, run: RunFolder, step: int, groups: Sequence[Group]) -> None:
        """Add a step's completions to the sample page; write the page every few steps."""
        every = self.parts.config.save.samples_every
        if not self.parts.world.is_main or not every:
            return
        self.samples.add(step, groups)
        if step % every == 0:
            run.write_samples(step, self.samples.text(step))
            self.samples = SamplePage(self.samples.count)

    def _so_far(self, run: RunFolder, seconds: float) -> float:
        """Add the duration of a step to the run's total duration, and return the total."""
        if self.seconds is None:
            self.seconds = sum(row["time/total"] for row in run.steps())
        self.seconds += seconds
        return self.seconds


def _progress(parts: Parts, state: State) -> dict[str, Any]:
    """Return the metrics of a run's progress, such as step, tokens and epoch."""
    prompts = state.episode / parts.config.rollout.group_size
    return {
        "step": state.step,
        "episode": state.episode,
        "tokens": state.tokens,
        "updates": parts.policy.version,
        "epoch": prompts / len(parts.train_prompts),
        "reward_id": parts.scorer.identity,
    }


def _mean_advantages(
    collected: Sequence[Group], trained: Sequence[Group], batch: Batch | None
) -> tuple[list[list[float | None]], list[list[bool]]]:
    """Return the mean advantage of each rollout, and whether any token is trained, by group.

    The advantage is None if a filter dropped the group. `trained` are the groups from which the
    batch was collated. `batch.rollout` contains the index of each row's rollout, counted over all
    groups of `trained`.
    """
    found: dict[int, tuple[float, bool]] = {}
    if batch is not None:
        assert batch.advantage is not None
        assert batch.rollout is not None
        rollouts = [rollout for group in trained for rollout in group.rollouts]
        sums = row_sum(batch.advantage, batch.mask).squeeze(1)
        tokens = batch.mask.sum(dim=1)
        total = sums.new_zeros(len(rollouts)).index_add(0, batch.rollout, sums)
        count = tokens.new_zeros(len(rollouts)).index_add(0, batch.rollout, tokens)
        pairs = zip((total / count.clamp(min=1)).tolist(), (count > 0).tolist(), strict=True)
        found = {id(rollout): pair for rollout, pair in zip(rollouts, pairs, strict=True)}
    rows = [[found.get(id(r), (None, False)) for r in group.rollouts] for group in collected]
    return [[mean for mean, _ in row] for row in rows], [[used for _, used in row] for row in rows]


def data_notes(config: Config, step: int, data: Mapping[str, float]) -> list[str]:
    """Return notes if the curriculum has too few prompts, or if no group can be replayed."""
    notes = []
    if again := data.get("data/drawn_again"):
        notes.append(
            f"step {step}: {again:g} prompts above curriculum.drop_above = "
            f"{config.curriculum.drop_above:g} are drawn again, because too few others are left"
        )
    if step > EARLY and data.get("data/replayed_groups") == 0:
        notes.append(
            f"step {step}: nothing to replay; of the {data['data/replay_size']:g} mixed groups "
            f"that are kept, none is at most {config.replay.max_age} optimizer steps old and of "
            "another prompt than those of the step"
        )
    return notes


# Metrics of a step: reward minus the KL penalty, GPU memory and GPU utilisation.

PEAK_FLOPS: Mapping[str, float] = MappingProxyType(
    {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
)
"""Peak dense bfloat16 FLOP/s of GPUs, from data sheets. The keys of this dictionary are substrings
of GPU names.
"""


def reference_rewards(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the KL penalty in units of the reward, and the reward minus this penalty."""
    if "objective/kl" not in metrics:
        return {}
    cost = metrics["objective/beta"] * metrics["objective/kl"]
    return {
        "objective/non_score_reward": cost,
        "objective/rlhf_reward": metrics["objective/scores"] - cost,
    }


def usage_metrics(parts: Parts, groups: Sequence[Group], seconds: float) -> dict[str, float]:
    """Return the peak GPU memory and the FLOPs utilization of training; {} without a GPU."""
    model = parts.policy.model
    if model.device.type != "cuda":
        return {}
    metrics = {"memory/peak": torch.cuda.max_memory_allocated(model.device) / 2**30}
    device = torch.cuda.get_device_name(model.device)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    if peak is not None:
        weights = sum(p.numel() for p in model.model.parameters())
        rollouts = (rollout for group in groups for rollout in group.rollouts)
        tokens = sum(len(r.prompt_tokens) + len(r.tokens) for r in rollouts)
        flops = 6 * weights * tokens * parts.config.train.epochs
        metrics["time/mfu"] = flops / (seconds * peak * parts.world.size)  # a GPU for each rank
    return metrics


# Notes about overlapped generation, float8, preemptions and restarts of processes.

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_truncate": "truncated importance sampling, as in decoupled PPO",
        "token_mask": "masked importance sampling, as in IcePop",
    }
)
"""Common names of importance-weight corrections."""


def overlap_note(parts: Parts) -> str:
    """Return a note about the maximum staleness of rollouts, and the correction for staleness."""
    overlap, options = parts.config.overlap, parts.config.objective.options
    age = f"overlap: rollouts are up to {overlap.staleness} steps old (mode {overlap.mode!r})"
    if parts.learner.settings.old_logp_from_sampler:
        return f"{age}; the objective's ratio to the engine's log-probs corrects for their age"
    name, low, high = (options[f"correction{end}"] for end in ("", "_low", "_high"))
    known = f" ({NAMES[name]})" if name in NAMES else ""
    more = f" and objective.veto = {options['veto']:g}" if options["veto"] else ""
    return f"{age}; correction: objective.correction = {name!r}{known}, {low:g} to {high:g}{more}"


def engine_events(parts: Parts, paused: int) -> tuple[list[str], dict[str, float]]:
    """Return notes and metrics about restarts since the last call, and about paused completions."""
    engine, scoring = parts.engine.events(), parts.scorer.events()
    metrics: dict[str, float] = {}
    if engine or not parts.engine.info.shares_weights:
        metrics["engine/restarts"] = sum(not isinstance(event, News) for event in engine)
    if paused:
        metrics["engine/preemptions"] = paused
        engine = [*engine, f"engine: paused {paused} completions because the KV cache was full"]
    if scoring:
        metrics["scoring/restarts"] = len(scoring)
    return [*engine, *scoring], metrics


def lost_note(config: Config, metrics: Mapping[str, float]) -> str:
    """Return a note on how much the log-probs of a float8 engine and the trainer differ."""
    gap, chi2 = (metrics[f"debug/sampler_{name}"] for name in ("logp_diff_mean", "chi2"))
    by = f"objective.correction = {config.objective.options.get('correction')!r}"
    if config.train.old_logp == "sampler":
        by = "the ratio to the engine's log-probs"
    return (
        f"engine.{config.engine.rounds} = 'float8': mean |logp - sampler_logp| {gap:.2g}, "
        f"effective sample size {1 / (1 + chi2):.1%}; {by} corrects for this, and `covey numerics` "
        "shows the causes"
    )
