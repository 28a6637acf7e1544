"""Evaluates the model that a configuration names; `Run.evaluate` evaluates a run's policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from covey.baselines import baselines_of
from covey.config import Config
from covey.config.resolve import evaluation_config, held_out_of, sampling_of, task_of
from covey.engines.native.engine import NativeEngine
from covey.environments import Factory
from covey.evaluation.evaluate import Evaluation, evaluate
from covey.notices import notice
from covey.policy.policy import load_model
from covey.rollout.collect import Collector
from covey.rollout.prompt_limit import fitting_prompts
from covey.run import interaction_of, with_stops
from covey.scoring import scorer_of

if TYPE_CHECKING:
    from covey.baselines import Baselines
    from covey.rewards import Reward
    from covey.scoring import Scorer
    from covey.tasks.task import Task
    from covey.types import Prompt


def evaluate_model(
    config: Config,
    task: Task | None = None,
    reward: Reward | None = None,
    environment: Factory | None = None,
) -> Evaluation:
    """Evaluate a model on held-out prompts; the other arguments override the configuration."""
    prompts = held_out_of(config, task or task_of(config))
    model = load_model(config)
    prompts, notes = fitting_prompts(config, model, prompts, "held-out")
    for note in notes:
        notice(note)
    scored_by = config if reward else evaluation_config(config)
    with closing(scorer_of(scored_by, reward)) as scorer:
        baselines = baselines_of(scored_by, scorer, prompts, reward)
        engine = NativeEngine(model)
        return evaluate_engine(config, engine, prompts, scorer, baselines, environment=environment)


def evaluate_engine(
    config: Config,
    engine: NativeEngine,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    baselines: Baselines,
    progress: Callable[[int], None] = lambda count: None,
    environment: Factory | None = None,
) -> Evaluation:
    """Evaluate the engine's model on `prompts`; `environment` overrides the configuration."""
    interaction = interaction_of(config, engine.model, environment)
    collector = Collector(
        engine=engine,
        model=engine.model,
        scorer=scorer,
        progress=progress,
        interaction=interaction,
    )
    with closing(interaction.host) if interaction else nullcontext():
        return evaluate(
            prompts,
            collector,
            sampling=with_stops(sampling_of(config), interaction),
            samples=config.evaluate.samples,
            temperature=config.evaluate.temperature,
            baselines=baselines,
        )
