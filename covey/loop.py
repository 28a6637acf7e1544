"""Training, from the first step to the last:

    resume -> evaluate -> (step -> record -> evaluate -> save)*, until the budget or a signal

A step of reinforcement learning collects groups and trains on them:

    take rollouts -> add replayed groups -> optimizer steps (step.py) -> metrics

A step of supervised training is in sft.py. Random numbers depend only on values such as the seed
and the step, so a checkpoint needs no generator state, and a resumed run gives the same results as
an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from covey.baselines import REMEDY
from covey.config.schema import Config
from covey.engines.protocol import News
from covey.errors import CoveyError, RunError
from covey.garbage import freeze_garbage_collector
from covey.objective import Objective
from covey.objective.masked import row_sum
from covey.records.folder import RunFolder
from covey.records.metric_registry import meaning
from covey.records.resume import Start, start_of
from covey.records.samples import SamplePage
from covey.records.trackers import JsonlTracker, Tracker, Trackers
from covey.records.trackers.registry import make_trackers
from covey.records.watch import Watch
from covey.rollout.metrics import overlap_metrics, rollout_metrics, selection_metrics
from covey.run import Made, Run
from covey.sft import sft_step
from covey.start import resume_hint
from covey.step import train_on
from covey.stopping import GivenUp, StopSignal, may_be_given_up
from covey.types import Batch, Group

EARLY = 3
"""Number of steps at the start of a run in which an empty replay buffer is normal."""


@freeze_garbage_collector()
def train(
    run: Run,
    folder: RunFolder,
    trackers: Sequence[Tracker],
    stop: StopSignal,
    start: Start | None = None,
) -> int:
    """Train from `start`, or from the newest checkpoint; return the last saved step.

    After an error, the last complete step is saved if the models have not moved on since.
    """
    run.folder, config, world, clock = folder, run.config, run.world, Clock()
    watch, sinks = Watch(config), list[Tracker]()
    if world.is_main:
        named = make_trackers(config.trackers, folder, config.model_dump())
        sinks = [JsonlTracker(folder), *trackers, *named]
    log = Trackers([*sinks, watch])
    try:
        start = start or start_of(folder, save_every=config.save.every)
        run.resume(start, log)
        watch.replay(folder, run.step)
        for note in start_notes(run, new=start.checkpoint is None):
            log.note(note)
        log.started(steps=run.budget.settings.steps, done=run.step, rollouts=run.rollouts_per_step)
        try:
            if run.evaluation_due or (run.step == 0 and run.evaluate_every):
                _evaluate(run, log)
            while not (run.budget.over(run.used) or world.agree(stop)):
                last = _step(run, log, clock)
                if run.evaluation_due:
                    _evaluate(run, log)
                every = config.save.every
                if last or watch.is_best or (every and run.step % every == 0):
                    run.save()
                watch.report(log, stop)
        except GivenUp:
            if world.size > 1:  # other ranks may be in the middle of a step: do not save
                raise RunError(
                    "a stop signal interrupted a step; resume from the last checkpoint"
                ) from None
            log.note(f"a stop signal interrupted the run after step {run.step}")
        except Exception:
            _keep_progress(run, log)
            raise
        if stop.received is not None and not stop.by_signal:
            log.note(f"stopped after step {run.step}: {stop.received}")
        run.save()
    except CoveyError as error:
        folder.write_failure(error.details)
        raise
    finally:
        if run.rollouts is not None:
            run.rollouts.close()
        run.engine.close()
        log.close()
    return run.saved


def _step(run: Run, log: Tracker, clock: Clock) -> bool:
    """Take and record the next step; return whether it is the last of the run."""
    step, updates, made = run.step + 1, run.updates, None
    try:
        made = rl_step(run, log, clock) if run.solutions is None else sft_step(run)
        record(made, run, log)
    except BaseException:
        if made is not None and run.folder.has_step(step):  # only a tracker failed
            run.finish_step(made)
        elif run.updates != updates:
            run.whole = False
        raise
    return run.finish_step(made)


def _keep_progress(run: Run, log: Tracker) -> None:
    """Save the last complete step after an error, and say how to resume."""
    try:
        if run.world.size == 1:  # other ranks may be in the middle of a step
            run.save()
    except Exception as error:
        log.note(f"the last complete step could not be saved: {error}")
    if run.saved:
        hint = resume_hint(run.folder, run.config)
        log.note(f"saved step {run.saved}; resume with: {hint}")


def _evaluate(run: Run, log: Tracker) -> None:
    # With one rank, a signal ends a long evaluation, which a resumed run repeats.
    with may_be_given_up() if run.world.size == 1 else nullcontext():
        run.evaluate(log)
    run.evaluation_due = False


def start_notes(run: Run, *, new: bool) -> list[str]:
    """Return notes about the reward's baselines and about overlap."""
    if run.solutions is not None:
        return []
    flagged = run.baselines.flagged() if new and run.baselines is not None else ()
    notes = [f"task: {found}: {REMEDY}" for found in flagged]
    return [*notes, overlap_note(run)] if run.config.overlap.staleness else notes


@dataclass(slots=True)
class Clock:
    """What a step's metrics need to know of earlier steps, and no checkpoint holds.

    Checkpoints contain no times, so that two runs with the same settings have identical ones.
    """

    seconds: float | None = None
    """Duration of all steps so far; a resumed run reads it from steps.jsonl."""
    preemptions: int = 0
    """How often the engine had paused a completion by the end of the last step."""

    def so_far(self, run: RunFolder, seconds: float) -> float:
        """Add the duration of a step, and return the run's total."""
        if self.seconds is None:
            self.seconds = sum(row["time/total"] for row in run.steps())
        self.seconds += seconds
        return self.seconds


def rl_step(run: Run, log: Tracker, clock: Clock) -> Made:
    """Collect the groups of the next step, and train on them."""
    config, policy, step = run.config, run.policy, run.step + 1
    started, before = time.perf_counter(), run.used
    rollouts = run.rollouts.take(step, run.budget.spent(before))
    overlap = overlap_metrics(
        rollouts, config.overlap, time.perf_counter() - started, policy.version
    )
    paused = run.engine.preemptions - clock.preemptions
    clock.preemptions += paused
    collected, (events, engine) = rollouts.collected, engine_events(run, paused)
    for note in (*rollouts.notes, *(f"step {step}: {event}" for event in events)):
        log.note(note)

    ids = {group.prompt.id for group in collected.groups}
    replayed = run.replay.draw(step=step, version=policy.version, without=ids)
    data = run.replay.metrics(replayed, policy.version) | run.choice.metrics(rollouts.used_picks)
    for note in data_notes(config, step, data):
        log.note(note)

    groups = (*rollouts.selected.groups, *replayed)
    training = time.perf_counter()
    batch, learned, beta = train_on(groups, run, step)
    ended = time.perf_counter()
    episode = run.episode + len(collected.rollouts)
    metrics: dict[str, Any] = {
        "step": step,
        "episode": episode,
        "tokens": run.tokens + collected.tokens,
        "updates": policy.version,
        "epoch": episode / config.rollout.group_size / len(run.prompts),
        "reward_id": run.scorer.identity,
        **rollout_metrics(collected, policy.model.stop_ids),
        **selection_metrics(rollouts),
        **learned,
        **overlap,
        **data,
        **engine,
        "time/rollout": collected.rollout_seconds,
        "time/score": collected.score_seconds,
        "time/training": ended - training,
        "time/total": ended - started,
        "time/from_scratch": clock.so_far(run.folder, ended - started),
        "time/tokens_per_second": collected.tokens / (ended - started),
        **usage_metrics(run, groups, ended - training),
    }
    every = (*collected.groups, *replayed)
    advantages, trained = _mean_advantages(every, groups, batch)
    return Made(
        step=step,
        before=before,
        metrics=metrics | reference_rewards(run.objective, metrics),
        beta=beta,
        rollouts=rollouts,
        recorded=every,
        advantages=advantages,
        trained=trained,
        replayed=len(replayed),
    )


def record(made: Made, run: Run, log: Tracker) -> None:
    """Log a step: its rollouts, samples and metrics."""
    config, step, metrics = run.config, made.step, made.metrics
    assert all(meaning(name) for name in metrics), "every metric has a meaning"
    if made.rollouts is None:
        return log.step(metrics)
    if config.save.rollouts:
        rows = run.folder.rollout_rows(made.recorded, made.advantages, made.replayed, made.trained)
        log.table("rollouts", step, rows)
    every = config.save.samples_every
    if run.world.is_main and every:
        run.samples.add(step, made.rollouts.collected.groups)
        if step % every == 0:
            run.folder.write_samples(step, run.samples.text(step))
            run.samples = SamplePage(run.samples.count)
    log.step(metrics)
    if step == 1 and config.engine.rounds and run.settings.sampled:
        log.note(lost_note(config, metrics))


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


def reference_rewards(objective: Objective, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the KL penalty in units of the reward, and the reward minus this penalty."""
    if "objective/kl" not in metrics or objective.pairs:  # the beta of a pair weighs no KL
        return {}
    cost = metrics["objective/beta"] * metrics["objective/kl"]
    return {
        "objective/non_score_reward": cost,
        "objective/rlhf_reward": metrics["objective/scores"] - cost,
    }


def usage_metrics(run: Run, groups: Sequence[Group], seconds: float) -> dict[str, float]:
    """Return the peak GPU memory and the FLOPs utilization of training; {} without a GPU."""
    model = run.policy.model
    if model.device.type != "cuda":
        return {}
    metrics = {"memory/peak": torch.cuda.max_memory_allocated(model.device) / 2**30}
    device = torch.cuda.get_device_name(model.device)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)
    if peak is not None:
        weights = sum(p.numel() for p in model.model.parameters())
        rollouts = (rollout for group in groups for rollout in group.rollouts)
        tokens = sum(len(r.prompt_tokens) + len(r.tokens) for r in rollouts)
        flops = 6 * weights * tokens * run.config.train.epochs
        metrics["time/mfu"] = flops / (seconds * peak * run.world.size)  # a GPU for each rank
    return metrics


# Notes about overlapped generation, float8, preemptions and restarts of processes.

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_truncate": "truncated importance sampling, as in decoupled PPO",
        "token_mask": "masked importance sampling, as in IcePop",
    }
)
"""Common names of importance-weight corrections."""


def overlap_note(run: Run) -> str:
    """Return a note about the maximum staleness of rollouts, and the correction for staleness."""
    overlap, options = run.config.overlap, run.config.objective.options
    age = f"overlap: rollouts are up to {overlap.staleness} steps old (mode {overlap.mode!r})"
    if run.settings.old_logp_from_sampler or "sampler_as_old" in run.objective.needs:
        return f"{age}; the objective's ratio to the engine's log-probs corrects for their age"
    name, low, high = (options[f"correction{end}"] for end in ("", "_low", "_high"))
    more = f" and objective.veto = {options['veto']:g}" if options["veto"] else ""
    if name == "none":
        return f"{age}; correction: that of objective.name = {run.config.objective.name!r}{more}"
    known = f" ({NAMES[name]})" if name in NAMES else ""
    return f"{age}; correction: objective.correction = {name!r}{known}, {low:g} to {high:g}{more}"


def engine_events(run: Run, paused: int) -> tuple[list[str], dict[str, float]]:
    """Return notes and metrics about restarts since the last call, and about paused completions."""
    engine, scoring = run.engine.events(), run.scorer.events()
    metrics: dict[str, float] = {}
    if engine or not run.engine.info.shares_weights:
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
    chosen = config.objective.options.get("correction")
    by = f"objective.correction = {chosen!r}"
    if chosen == "none":
        by = f"the correction of objective.name = {config.objective.name!r}"
    if config.train.old_logp == "sampler":
        by = "the ratio to the engine's log-probs"
    return (
        f"engine.{config.engine.rounds} = 'float8': mean |logp - sampler_logp| {gap:.2g}, "
        f"effective sample size {1 / (1 + chi2):.1%}; {by} corrects for this, and `covey numerics` "
        "shows the causes"
    )
