"""Checks the checkpoints of a run: whether they are whole, and follow from the rollouts."""

from __future__ import annotations

import json

from safetensors.torch import load_file

from covey.config import load_config
from covey.errors import RunError
from covey.lab.doctor.result import Result
from covey.lab.explain.recorded import policy_before, read_step
from covey.policy.checkpoint import OPTIMIZER_FILE, read_weights
from covey.records.files import damage
from covey.records.folder import CHANGES, RunFolder
from covey.records.records import read_object
from covey.step import train_on

NAME = "recomputed step"


def checkpoint_checks(run: RunFolder) -> list[Result]:
    """Return one result per checkpoint: whether its files have their digests and can be read."""
    found = []
    for step, folder in run.checkpoints():
        problem = damage(folder)
        if problem is None:
            try:
                read_object(folder / "covey.json")
            except RunError as error:
                problem = str(error)
        found.append(
            Result(
                name=f"checkpoint {step}",
                passed=problem is None,
                figure=problem or "its files are as they were written",
                remedy="resume from another checkpoint, with --resume RUN --step N",
            )
        )
    return found or [
        Result(name="checkpoints", passed=None, figure="the run has no checkpoint yet")
    ]


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
    if (change := _changed_after(run, trainee.origin.checkpoint)) is not None:
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


def _changed_after(run: RunFolder, first: int) -> int | None:
    """Return the first step after `first` at which a resume changed the settings, or None."""
    file = run.path / CHANGES
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    steps = [int(json.loads(line)["step"]) for line in lines]
    return next((step for step in steps if step > first), None)
