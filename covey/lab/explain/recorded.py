"""Loads a recorded training step and the policy from before the step, and repeats the step.

A run keeps all rollouts, but only some checkpoints. Covey loads the policy from the nearest
checkpoint before the step, or the initial model if no checkpoint is early enough. To get the exact
weights before a step, Covey can repeat the recorded steps since the nearest checkpoint. Covey does
not generate or score any rollout again.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors.torch import load_file

from covey.config import load_config
from covey.config.resolve import objective_of
from covey.errors import RunError
from covey.lab.checks.result import Result
from covey.lab.explain.effect import Effect, effect, projections
from covey.lab.plan.equivalence import recorded_exact_logp
from covey.notices import notice
from covey.objective.masked import joined
from covey.policy.checkpoint import OPTIMIZER_FILE, read_weights
from covey.policy.critic import critic_of
from covey.policy.policy import load_model, policy_of
from covey.policy.schedule import Budget
from covey.records.folder import CHANGES, RunFolder
from covey.records.records import read_episode, unsaid
from covey.records.resume import last_good
from covey.run import Run, reference_of, step_settings_of, teacher_of
from covey.step import Observer, Seen, train_on
from covey.types import Batch, Group, Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """A recorded rollout, with its advantage if the step trained on the rollout."""

    line: int
    """The rollout's line number in the step's rollout file, counted from 1."""
    group: int
    """Index of the rollout's group in the step, counted from 1."""
    prompt: str
    rollout: Rollout
    advantage: float | None
    """The recorded mean advantage of the rollout's tokens; None if a filter dropped the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """All recorded rollouts and metrics of a training step."""

    step: int
    rollouts: tuple[RecordedRollout, ...]
    groups: tuple[Group, ...]
    """The groups that the step trained on, in recorded order."""
    metrics: dict[str, Any]

    @property
    def learned(self) -> list[RecordedRollout]:
        return [one for one in self.rollouts if one.advantage is not None]

    @property
    def tokens(self) -> int:
        return sum(len(one.rollout.tokens) for one in self.rollouts)


def read_step(run: RunFolder, step: int) -> Recorded:
    rows = run.require_rollouts(step)
    rollouts: list[RecordedRollout] = []
    group = 0
    for before, row in zip([None, *rows], rows, strict=False):
        same_prompt = before is not None and before["prompt_id"] == row["prompt_id"]
        if before is None or not same_prompt or row["sample"] <= before["sample"]:
            group += 1
        rollouts.append(
            RecordedRollout(
                line=len(rollouts) + 1,
                group=group,
                prompt=row["prompt"],
                rollout=_rollout(row),
                advantage=row["advantage"],
            )
        )
    groups = [
        Group(
            prompt=Prompt(
                id=row["prompt_id"],
                task=row.get("task", ""),
                messages=({"role": "user", "content": row["prompt"]},),
                target=row["target"],
                info=row.get("info", {}),
            ),
            rollouts=tuple(one.rollout for one in members),
        )
        for _, part in itertools.groupby(rollouts, key=lambda one: one.group)
        if (members := list(part))[0].advantage is not None
        for row in [rows[members[0].line - 1]]
    ]
    metrics = next((row for row in run.steps() if row["step"] == step), {})
    return Recorded(step=step, rollouts=tuple(rollouts), groups=tuple(groups), metrics=metrics)


def check_trained(recorded: Recorded) -> None:
    if not recorded.groups:
        raise RunError(
            f"step {recorded.step} did not train on any rollout, because filters dropped all its "
            "groups; choose another step"
        )


_RECORDED = (
    "prompt_id", "sample", "prompt_tokens", "tokens", "trained", "sampler_logp", "text", "finish",
    "policy_version", "reward", "success", "parts", "reward_id",
)  # fmt: skip


def _rollout(row: dict[str, Any]) -> Rollout:
    lacking = [name for name in _RECORDED if name not in row]
    if lacking or len(row["tokens"]) != len(row["sampler_logp"]):
        problem = (
            f"{lacking[0]} is missing" if lacking else "it has more or fewer tokens than log-probs"
        )
        raise RunError(f"a recorded rollout of prompt {row['prompt_id']} cannot be used: {problem}")
    values = {name: row[name] for name in _RECORDED}
    values["teacher_prompt"] = tuple(row.get("teacher_prompt", ()))
    if row.get("segments"):  # of a multi-turn environment
        for name in ("prompt_tokens", "tokens", "trained", "sampler_logp", "policy_version"):
            del values[name]
        try:
            return Rollout(**values, **read_episode(row))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"cannot read the recorded episode of prompt {row['prompt_id']}: {error!r}"
            ) from None
    for name in ("prompt_tokens", "tokens", "sampler_logp"):
        values[name] = tuple(row[name])
    if isinstance(row["trained"], bool):  # False if a filter masked it, as relearn does again
        values["trained"] = (True,) * len(row["tokens"])
    else:
        values["trained"] = tuple(row["trained"])
    values["kept"] = tuple(row.get("kept", ()))
    return Rollout.single_turn(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The origin of the model weights with which a step is explained."""

    checkpoint: int
    """The step of the loaded checkpoint; 0 means the initial model."""
    path: str
    replayed_steps: int
    steps_behind: int
    """The number of training steps by which the restored weights are older than the weights that
    generated the rollouts."""

    @property
    def exact(self) -> bool:
        return self.steps_behind == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """A run as it was before a step, with all models that training needs."""

    run: Run
    origin: Origin


def policy_before(folder: RunFolder, step: int, *, exact: bool = False) -> Trainee:
    """Return the run with the weights of the nearest checkpoint before `step`.

    If `exact` is true, repeat the recorded steps between the checkpoint and `step`. The repeated
    steps give the same weights as in the run, and take as long as the run's updates did.
    """
    config = load_config(str(folder.config_file))
    found = last_good(folder, before=step, note=notice)
    usual = objective_of(config).beta
    if not usual:  # a resume may have removed the KL penalty, and with it the reference
        first = found.step + 1 if exact else step
        rows = (row for row in folder.steps(unsaid) if first <= row["step"] <= step)
        if beta := max((row.get("objective/beta") or 0.0 for row in rows), default=0.0):
            config = load_config(str(folder.config_file), [f"objective.beta={beta!r}"])
    model, objective = load_model(config), objective_of(config)
    exact_logp = recorded_exact_logp(folder, config)
    run = Run(
        config=config,
        budget=Budget(settings=config.train),
        settings=step_settings_of(config, objective, exact_logp=exact_logp),
        policy=policy_of(config, model),
        objective=objective,
        reference=reference_of(config, model, objective),
        teacher=teacher_of(config, model, objective),
        critic=critic_of(config, model, objective),
    )
    run.restore(found)
    run.beta = run.beta if usual else 0.0
    behind = max(0, step - 1 - found.step)
    path = str(found.checkpoint or config.model.path)
    origin = Origin(checkpoint=found.step, path=path, replayed_steps=0, steps_behind=behind)
    if not exact:
        return Trainee(run=run, origin=origin)
    for again in range(run.step + 1, step):
        recorded = read_step(folder, again)
        run.beta = recorded.metrics.get("objective/beta", run.beta if usual else 0.0)
        *_, run.beta = train_on(recorded.groups, run, again)
        run.step = again
        run.episode += len(recorded.rollouts)
        run.tokens += recorded.tokens
    return Trainee(run=run, origin=replace(origin, replayed_steps=behind, steps_behind=0))


Watched = dict[str, torch.Tensor]
"""Maps the names of token values to tensors [B, T]. The names are logp, entropy, weight, and the
fields of `Effect` except `loss`. The value of a token comes from the last optimizer step that
trains on the token. The entry `number` [B] is the index, counted from 0, of the last optimizer step
that trains on each row. The entry `projection` [B] is each row's part of the step's gradient; NaN
means that the time did not suffice."""

SECONDS = 120.0


def relearn(
    trainee: Trainee,
    recorded: Recorded,
    seconds: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Batch, Watched, dict[str, float]]:
    """Repeat the optimizer steps of a recorded training step.

    Return a batch with one row for each rollout, the token values, and the step's metrics. The
    projections on the gradient take at most `seconds`.
    """
    run = trainee.run
    if (beta := recorded.metrics.get("objective/beta")) is not None:
        run.beta = beta
    settings = replace(run.settings, skip_zero_gradient=False)
    if not trainee.origin.exact:
        # With other weights, recorded log-probs would look like a change of the policy.
        settings = replace(settings, old_logp_from_sampler=False)
    run = replace(run, settings=settings)
    watch = _Watch(run=run, seconds=seconds, say=say)
    batch, metrics, trainee.run.beta = train_on(recorded.groups, run, recorded.step, observer=watch)
    assert batch is not None, "there are groups"
    watched: Watched = {"number": torch.zeros_like(batch.lengths)}
    for one, found in watch.passes:
        watched["number"][one.rows] = one.number
        now = {"logp": one.now.logp, "entropy": one.now.entropy, "weight": one.micro.weight}
        for name, value in {**now, **found._asdict()}.items():
            if value is not None and name != "loss":
                dtype = torch.int64 if name == "clipped" else torch.float64
                blank = torch.zeros_like(batch.mask, dtype=dtype)
                watched.setdefault(name, blank)[one.rows, : value.shape[1]] = value.to(dtype)
    watched["projection"] = watch.shares(len(batch))
    rollouts = joined(batch)
    if rollouts.batch is batch:
        return batch, watched, metrics
    assert batch.rollout is not None
    assert rollouts.batch.rollout is not None
    places = [(batch.rollout == number).nonzero()[:, 0] for number in rollouts.batch.rollout]
    tokens = {name: rollouts.join(v) for name, v in watched.items() if v.ndim == 2}
    watched = {
        **tokens,
        "number": watched["number"][torch.stack([rows[0] for rows in places])],
        "projection": torch.stack([watched["projection"][rows.cpu()].sum() for rows in places]),
    }
    return rollouts.batch, watched, metrics


@dataclass(slots=True, kw_only=True)
class _Watch(Observer):
    """Keeps the passes of a training step, and projects rows on the gradients of its last epoch."""

    run: Run
    seconds: float
    say: Callable[[str], None]
    passes: list[tuple[Seen, Effect]] = field(default_factory=list)
    projected: list[dict[int, float]] = field(default_factory=list)
    """For each optimizer step of the last epoch, the projection of each row on its gradient."""

    def seen(self, one: Seen) -> None:
        self.passes.append((one, effect(self.run.objective, one.micro, one.now)))

    def before_step(self, number: int) -> None:
        settings = self.run.settings
        first = settings.mini_batches * (settings.epochs - 1)
        if number < first or not self.seconds:
            return
        passes = [(one.rows, one.micro, e) for one, e in self.passes if one.number == number]
        total, started = sum(len(rows) for rows, *_ in passes), time.monotonic()
        step = f"optimizer step {number + 1}"
        left = settings.mini_batches * settings.epochs - number
        found = projections(
            self.run.policy,
            passes,
            started + self.seconds / left,
            lambda done: self.say(f"{step}: projected the gradients of {done} of {total} rows"),
        )
        self.seconds = max(1e-9, self.seconds - (time.monotonic() - started))
        self.projected.append(found)

    def shares(self, rows: int) -> torch.Tensor:
        """Return the projection of each row, divided so that all of the step add up to 1."""
        shares = torch.full((rows,), torch.nan, dtype=torch.float64)
        steps = max(1, sum(any(found.values()) for found in self.projected))
        for found in self.projected:
            for row, value in found.items():
                shares[row] = value / steps
        return shares


# Repeats the last training steps of a run, and compares the weights with its newest checkpoint.


NAME = "recomputed step"


def recomputed(run: RunFolder) -> Result:
    """Repeat the steps between the two newest checkpoints, and compare the resulting weights.

    The repeated steps train on the recorded rollouts and rewards, so nothing is generated or scored
    again.
    """
    saved = run.checkpoints()
    if not saved:
        return Result(name=NAME, passed=None, figure="the run has no checkpoint yet")
    step, folder = saved[-1]
    if load_config(str(run.config_file)).replay.groups:
        what = "with replay.groups, steps train on more than their own rollouts"
        return Result(name=NAME, passed=None, figure=what)
    trainee = policy_before(run, step, exact=True)
    changes = run.path / CHANGES
    lines = changes.read_text(encoding="utf-8").splitlines() if changes.exists() else []
    steps = [int(json.loads(line)["step"]) for line in lines]
    change = next((s for s in steps if s > trainee.origin.checkpoint), None)
    if change is not None:
        what = f"settings changed after step {change}, and the earlier ones would be needed"
        return Result(name=NAME, passed=None, figure=what)
    recorded = read_step(run, step)
    train_on(recorded.groups, trainee.run, step)
    if not (folder / OPTIMIZER_FILE).exists():
        raise RunError(
            f"the checkpoint {folder} was saved by several ranks; verify the run with the same "
            "number of ranks"
        )
    found = {**trainee.run.policy.optimizer.masters, **trainee.run.policy.optimizer.state()}
    then = {**read_weights(trainee.run.policy, folder), **load_file(folder / OPTIMIZER_FILE)}
    other = [
        name
        for name, value in found.items()
        if not value.detach().cpu().equal(then[name].detach().cpu().to(value.dtype))
    ]
    origin = trainee.origin.checkpoint
    what = f"step {step} from step {origin}, {step - origin} steps of recorded rollouts"
    bits = f"other bits in {len(other)} of {len(then)} tensors" if other else "the same bits"
    gpu = (
        trainee.run.policy.model.device.type != "cpu" and not trainee.run.config.model.deterministic
    )
    return Result(
        name=NAME,
        passed=True if not other else None if gpu else False,
        figure=f"{what}: {bits}",
        remedy="the checkpoint does not follow from its rollouts: resume from an earlier "
        "checkpoint with --step; on a GPU, bits are the same only with model.deterministic = true",
    )
