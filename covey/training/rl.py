"""A step of reinforcement learning: collect and filter groups, train on them, log.

Collecting is in rollout/source.py, training on the groups in training/step.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from covey.rollout.metrics import rollout_metrics, selection_metrics
from covey.rollout.source import SynchronousSource
from covey.run.folder import RunFolder
from covey.run.metric_names import with_open_instruct_names
from covey.run.metrics import meaning
from covey.run.samples import samples_page
from covey.run.trackers import Tracker
from covey.training.budget import Budget
from covey.training.build import Parts
from covey.training.checkpoint import State
from covey.training.report import mean_advantages
from covey.training.step import training_step
from covey.training.usage import reference_rewards, usage_metrics


@dataclass(frozen=True, slots=True)
class Reinforcement:
    """Reinforcement learning: groups are collected, filtered and trained on."""

    parts: Parts

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

    def step(self, state: State, run: RunFolder, log: Tracker) -> None:
        """Collect and filter groups, train on them, and log."""
        parts, started = self.parts, time.perf_counter()
        learner = parts.learner_at(state)
        share = self.budget.spent(replace(state, step=state.step - 1).used(parts.policy))
        rollouts = SynchronousSource(parts, log).groups(state.step, share=share)
        collected = rollouts.collected
        groups = parts.world.gather(rollouts.selected.groups)
        state.episode += len(collected.rollouts)
        state.tokens += collected.tokens
        training = time.perf_counter()
        batch, learned, state.beta = training_step(learner, groups, state.step)
        ended = time.perf_counter()
        state.seconds += ended - started

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
            "time/rollout": collected.rollout_seconds,
            "time/score": collected.score_seconds,
            "time/update": ended - training,
            "time/total": ended - started,
            "time/from_scratch": state.seconds,
            "time/tokens_per_second": collected.tokens / (ended - started),
            **usage_metrics(parts.policy, groups, parts.config.train.epochs, ended - training),
        }
        metrics |= reference_rewards(metrics)
        assert all(meaning(name) for name in metrics), "every metric has a meaning"
        if parts.config.save.rollouts:
            advantages = mean_advantages(collected.groups, groups, batch)
            log.table("rollouts", state.step, run.rollout_rows(collected.groups, advantages))
        samples_every = parts.config.save.samples_every
        if samples_every and state.step % samples_every == 0 and parts.world.is_main:
            page = samples_page(state.step, collected.groups, parts.config.save.samples_shown)
            run.write_samples(state.step, page)
        log.step(with_open_instruct_names(metrics))
