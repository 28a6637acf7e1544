"""A step of reinforcement learning: collect and filter groups, train on them, log.

Collecting is in rollout/source.py, training on the groups in training/step.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from covey.config.schema import Save
from covey.rollout.in_flight import read_in_flight, write_in_flight
from covey.rollout.metrics import rollout_metrics, selection_metrics
from covey.rollout.overlap import RolloutQueue, rollout_queue
from covey.run.folder import RunFolder
from covey.run.metric_names import with_open_instruct_names
from covey.run.metrics import meaning
from covey.run.samples import samples_page
from covey.run.trackers import Tracker
from covey.training.budget import Budget
from covey.training.build import Parts
from covey.training.checkpoint import State
from covey.training.overlap_report import overlap_metrics, overlap_note, restarts
from covey.training.preferences import PairSource
from covey.training.report import mean_advantages
from covey.training.step import training_step
from covey.training.usage import reference_rewards, usage_metrics
from covey.types import Group


@dataclass(slots=True)
class Reinforcement:
    """Reinforcement learning: groups are collected, filtered and trained on."""

    parts: Parts
    queue: RolloutQueue = field(init=False)
    seconds: float | None = None
    """Time of all steps so far. It comes from the records of the run: a checkpoint holds no times,
    so that equal runs have equal checkpoints."""

    @property
    def budget(self) -> Budget:
        """What the configuration allows."""
        return Budget(settings=self.parts.config.train)

    @property
    def rollouts(self) -> int:
        """Of a step without refills."""
        return self.parts.config.rollout.prompts_per_step * self.parts.config.rollout.group_size

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations."""
        return self.parts.config.evaluate.every

    def fresh(self) -> State:
        """Begin with the objective's own beta."""
        return State(beta=self.parts.objective.beta)

    def begin(self, checkpoint: Path | None, log: Tracker) -> None:
        """Continue with what the checkpoint holds, and say what corrects for age."""
        if checkpoint is not None and self.parts.critic is not None:
            self.parts.critic.load(checkpoint)
        prompts, config = self.parts.train_prompts, self.parts.config
        count = config.rollout.prompts_per_step
        held = (
            []
            if checkpoint is None
            else read_in_flight(checkpoint, prompts, seed=config.seed, count=count)
        )
        self.queue = rollout_queue(self.parts, log, held)
        if config.preferences.file:
            self.queue = RolloutQueue(parts=self.parts, source=PairSource(self.parts))
        if self.parts.config.overlap.staleness:
            log.note(overlap_note(self.parts))

    def save(self, folder: Path, step: int) -> None:
        """Save the critic, and the rollouts that were generated ahead."""
        if self.parts.critic is not None:
            self.parts.critic.save(folder)
        held = self.queue.in_flight(after=step)  # which every rank may have to wait for
        if self.parts.world.is_main:
            write_in_flight(folder, held)

    def close(self) -> None:
        """End the generation that works beside the loop, and the processes of the engine."""
        if hasattr(self, "queue"):
            self.queue.source.close()
        self.parts.engine.close()

    def step(self, state: State, run: RunFolder, log: Tracker) -> None:
        """Collect and filter groups, train on them, and log."""
        parts, started = self.parts, time.perf_counter()
        learner = parts.learner_at(state)
        share = self.budget.spent(replace(state, step=state.step - 1).used(parts.policy))
        rollouts = self.queue.take(state.step, share)
        overlap = overlap_metrics(
            parts, rollouts, time.perf_counter() - started, parts.policy.version
        )
        collected = rollouts.collected
        events, deaths = restarts(parts)
        for note in (*rollouts.notes, *(f"step {state.step}: {event}" for event in events)):
            log.note(note)
        groups = rollouts.selected.groups
        state.episode += len(collected.rollouts)
        state.tokens += collected.tokens
        training = time.perf_counter()
        batch, learned, state.beta = training_step(learner, groups, state.step)
        ended = time.perf_counter()

        metrics: dict[str, Any] = {
            "step": state.step,
            "episode": state.episode,
            "tokens": state.tokens,
            "updates": parts.policy.version,
            "epoch": state.episode / parts.config.rollout.group_size / len(parts.train_prompts),
            "reward_id": parts.scorer.identity,
            **rollout_metrics(collected, parts.policy.model.stop_ids),
            **selection_metrics(rollouts),
            **learned,
            **overlap,
            **deaths,
            "time/rollout": collected.rollout_seconds,
            "time/score": collected.score_seconds,
            "time/update": ended - training,
            "time/total": ended - started,
            "time/from_scratch": self._so_far(run, ended - started),
            "time/tokens_per_second": collected.tokens / (ended - started),
            **usage_metrics(parts.policy, groups, parts.config.train.epochs, ended - training),
        }
        metrics |= reference_rewards(metrics)
        assert all(meaning(name) for name in metrics), "every metric has a meaning"
        if parts.config.save.rollouts:
            advantages = mean_advantages(collected.groups, groups, batch)
            log.table("rollouts", state.step, run.rollout_rows(collected.groups, advantages))
        if parts.world.is_main:
            _write_samples(run, parts.config.save, state.step, collected.groups)
        log.step(with_open_instruct_names(metrics))

    def _so_far(self, run: RunFolder, seconds: float) -> float:
        """Add the time of a step to that of the steps before it."""
        if self.seconds is None:
            self.seconds = sum(row["time/total"] for row in run.steps())
        self.seconds += seconds
        return self.seconds


def _write_samples(run: RunFolder, save: Save, step: int, groups: Sequence[Group]) -> None:
    """Write the page of the highest and lowest rewards, every few steps."""
    if save.samples_every and step % save.samples_every == 0:
        run.write_samples(step, samples_page(step, groups, save.samples_shown))
