"""The start of a run: rank 0 creates and locks the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from covey.config import Config, to_toml
from covey.environments.registry import PASSED
from covey.rewards.user import FUNCTIONS
from covey.run.folder import RunFolder
from covey.run.new_run import set_aside_failed
from covey.run.provenance import describe_environment
from covey.run.records import to_stderr
from covey.run.resume import resume_command
from covey.run.reward_changes import record_change
from covey.tasks.dataset import NAME as DATASET
from covey.training.build import Components
from covey.training.parallel.world import World


def created_run(parts: Components, path: Path, more: Mapping[str, object]) -> RunFolder:
    """Create the folder of a run, and return it on every rank.

    `more` is added to environment.json.
    """

    def create() -> RunFolder:
        device, threads = str(parts.policy.model.device), torch.get_num_threads()
        environment = {
            **describe_environment(parts.config.seed, device, threads),
            "ranks": parts.world.size,
            "reward": parts.scorer.identity,
            "evaluation_reward": parts.eval_scorer.identity,
            "notes": list(parts.notes),
            **more,
        }
        if note := set_aside_failed(path):
            to_stderr(note)
        run = RunFolder.create(path, to_toml(parts.config), environment)
        if not run.is_sft:
            record_change(run, **parts.config.reward_change.model_dump())
        return run

    return parts.world.from_main(create)


def resume_hint(run: RunFolder, config: Config) -> str:
    """Return the command that resumes a run, or a Python call if objects must be passed again."""
    passed = {
        "dataset": config.task.name == DATASET,
        "rewards": config.reward.name == FUNCTIONS,
        "environment": config.environment.name == PASSED,
    }
    again = "".join(f", {name}=..." for name, given in passed.items() if given)
    return f"covey.train(resume={str(run.path)!r}{again})" if again else resume_command(run)


def locked_by_main(folder: RunFolder, world: World) -> AbstractContextManager[None]:
    """Return a context in which rank 0 locks the run folder for all ranks."""
    return folder.locked() if world.is_main else nullcontext()
