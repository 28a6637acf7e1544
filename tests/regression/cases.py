"""The cases: small runs of everything that computes, each from a command to series of numbers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.regression import names
from tests.regression.series import Series, flat, prefixed, read_lines, run_series, weights_digest

STEPS = 12
ALGORITHMS = (
    "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "gtpo", "grpo_s", "gtpo_trajectory", "rloo",
    "reinforce_pp", "reinforce_pp_baseline", "lite_ppo", "opo", "gpg", "cispo", "gmpo", "sapo",
    "clip_cov", "kl_cov", "luspo", "vespo", "dppo",
)  # fmt: skip

SMALL: dict[str, Any] = {
    "seed": 7,
    "model.path": "embedded",
    "model.device": "cpu",
    "task.name": "arithmetic",
    "task.min_operations": 1,
    "task.max_operations": 2,
    "reward.name": "think_answer",
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 6,
    "rollout.max_tokens": 24,
    "engine.max_concurrent": 16,
    "optimizer.learning_rate": 3e-4,
    "optimizer.beta2": 0.99,
    "optimizer.schedule": "linear",
    "optimizer.warmup_steps": 2,
    "train.steps": STEPS,
    "train.mini_batches": 2,
    "train.micro_batch_tokens": 400,
    "evaluate.every": 0,
    "evaluate.prompts": 12,
    "save.every": 1,
    "save.keep": 2 * STEPS,
    "save.samples_every": 0,
}
"""Ratios leave 1, some groups are mixed, some completions are cut off, and a batch is several
micro-batches."""

KL = {"objective.name": "grpo", "objective.beta": 0.1}
NO_KL = {"objective.name": "grpo", "objective.beta": 0.0}
LORA = {"adapter.rank": 4, "adapter.alpha": 8, "optimizer.learning_rate": 5e-3}


def command(name: str, *arguments: object, ends: int = 0) -> str:
    """Run a command that must end with this exit code, and return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = names.run_command(name, *map(str, arguments))
    assert code == ends, f"{name} ended with {code}: {err.getvalue()}{out.getvalue()}"
    return out.getvalue()


def written(folder: Path, settings: dict[str, Any]) -> Path:
    """Write a configuration file."""
    file = folder / "settings.toml"
    file.write_text(names.settings_toml({**SMALL, **settings}), encoding="utf-8")
    return file


def trained(folder: Path, name: str = "train", ends: int = 0, **settings: Any) -> Path:
    """Make a run with these settings, and return its folder."""
    run = folder / "run"
    command(name, written(folder, settings), "--run", run, ends=ends)
    return run


def train(folder: Path, **settings: Any) -> Series:
    return run_series(trained(folder, **settings))


def supervised(folder: Path, **settings: Any) -> Series:
    return run_series(trained(folder, "supervised", **settings))


def stopped(folder: Path, **settings: Any) -> Series:
    """Stop a run by a signal once it has a few steps, and resume it."""
    run = folder / "run"
    over = threading.Event()

    def stop_soon() -> None:
        log = run / names.STEPS_FILE
        while not over.is_set() and not (log.exists() and len(log.read_bytes().splitlines()) >= 3):
            time.sleep(0.002)
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=stop_soon)
    watcher.start()
    try:
        trained(folder, ends=names.INTERRUPTED, **settings)
    finally:
        over.set()
        watcher.join()
    done = len(read_lines(run / names.STEPS_FILE))
    assert 0 < done < STEPS, f"the run was to be stopped in the middle, and has {done} steps"
    return _resumed(run)


def killed(folder: Path, name: str = "train", **settings: Any) -> Series:
    """Make a run, remove its checkpoints after step 5 as if it had died before, and resume it."""
    run = trained(folder, name, **settings)
    for step in range(6, STEPS + 1):
        shutil.rmtree(run / names.CHECKPOINT_FOLDER.format(step=step))
    return _resumed(run, name, "--step", 5)


def _resumed(run: Path, name: str = "train", *options: object) -> Series:
    command(name, "--resume", run, *options)
    found = run_series(run)
    assert len(found["weights"]) == STEPS
    return found


def with_server(folder: Path, **settings: Any) -> Series:
    with _server() as url:
        return train(folder, **settings, **{"reference.kind": "server", "reference.url": url})


@contextlib.contextmanager
def _server() -> Iterator[str]:
    line = names.process_of("serve", "--model", "embedded", "--port", "0", "--device", "cpu")
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(names.SERVING, process.stdout.readline())
        assert found, "the server did not say where it is"
        yield found[1]
    finally:
        process.terminate()
        process.communicate()


def evaluate(folder: Path) -> Series:
    """Evaluate a trained model beside the one that it started from."""
    run, items = trained(folder, **{"train.steps": 4}), folder / "items.jsonl"
    against = ("--against", "embedded", "--by", "operations")
    printed = command("evaluate", run, "--samples", 4, *against, "--json", "--out", items)
    return flat(json.loads(printed)) | prefixed("items", flat(_item_rows(items)))


def _item_rows(file: Path) -> list[dict[str, Any]]:
    """Return the lines of an evaluation's items, and of their samples, under fixed names."""
    fixed = names.ITEM_FIELDS
    rows = [{fixed.get(k, k): v for k, v in row.items()} for row in read_lines(file)]
    samples = [[{fixed.get(k, k): v for k, v in s.items()} for s in r["samples"]] for r in rows]
    return [{**row, "samples": found} for row, found in zip(rows, samples, strict=True)]


def explain(folder: Path) -> Series:
    """Explain a step of a run, and put it through all algorithms."""
    run = trained(folder, **KL, **{"train.steps": 4, "save.every": 2})
    found = prefixed("step", flat(json.loads(command("explain", run, "--step", 3, "--json"))))
    asked = ("--step", 4, "--exact", "--replay", ",".join(ALGORITHMS), "--json")
    return found | prefixed("replay", flat(json.loads(command("explain", run, *asked))))


def compare(folder: Path) -> Series:
    """Compare two algorithms with two seeds each."""
    arms, seeds, steps = ("grpo", "dr_grpo"), (7, 8), 4
    file = written(folder, {"train.steps": steps, "evaluate.every": 2})
    place = folder / "comparison"
    how = ("--algorithms", ",".join(arms), "--seeds", len(seeds), "--threads", 1, "--parallel", 1)
    command("compare", file, *how, "--folder", place)
    report = json.loads((place / names.REPORT_FILE).read_text(encoding="utf-8"))
    found = flat({section: report[section] for section in names.REPORT_SECTIONS})
    runs = [place / names.ARM_FOLDER.format(arm=arm, seed=seed) for arm in arms for seed in seeds]
    return found | {"weights": [weights_digest(run, steps) for run in runs]}


def _references() -> dict[str, Callable[[Path], Series]]:
    kinds: dict[str, dict[str, Any]] = {
        "frozen": {},
        "offloaded": {},
        "adapter_off": LORA,
        "moving": {"reference.alpha": 0.6, "reference.every": 3},
        "renewed": {"reference.every": 5},
    }
    cases = {
        kind: partial(train, **KL, **more, **{"reference.kind": kind})
        for kind, more in kinds.items()
    }
    return {**cases, "server": partial(with_server, **KL)}


SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {**NO_KL, **LORA},
    "lora_also_train": {**LORA, "adapter.targets": ["q_proj", "v_proj"], "adapter.also_train": ["norm"]},
    "dynamic": {**NO_KL, "filter.dynamic": True, "filter.max_rounds": 3},
    "kl_in_reward": {**KL, "objective.kl": "k1", "objective.kl_in": "reward"},
    "adaptive_kl": {**KL, "objective.kl_target": 0.02, "objective.kl_horizon": 200},
    "clip_range": {**NO_KL, "objective.clip_low": 0.05, "objective.clip_high": 0.1, "objective.dual": 3.0},
    "epochs": {**NO_KL, "train.epochs": 2, "train.mini_batches": 3, "train.old_logp": "recompute"},
    "left_out": {**NO_KL, "filter.mask_truncated": True, "filter.skip_zero_gradient": True, "overlap.max_staleness": 3},
    "truncated_sampling": {"rollout.temperature": 0.8, "rollout.top_k": 20, "rollout.top_p": 0.9, "rollout.min_p": 0.02},
    "correction": {**NO_KL, "objective.correction": "token_truncate", "objective.veto": 1e-4, "train.old_logp": "recompute"},
    "length_penalty": {**NO_KL, "length_penalty.name": "group_relative", "objective.entropy_bonus": 0.001},
    "composed": {"objective.advantage": "leave_one_out", "objective.ratio": "sequence", "objective.surrogate": "clipped", "objective.weights": "token_mean"},
    "compact_optimizer": {**NO_KL, "optimizer.state": "compact", "optimizer.weight_decay": 0.01, "optimizer.schedule": "cosine"},
    "bfloat16": {"model.dtype": "bfloat16", "train.steps": 6},
    "stop_after_tokens": {"train.stop_after": (3000, "tokens"), "evaluate.every": 4, "evaluate.samples": 2},
    "stop_after_updates": {"train.stop_after": (16, "updates"), "optimizer.schedule": "cosine"},
    "gradient_checkpointing": {"model.gradient_checkpointing": True, "model.prefill": "<think>", "train.steps": 6},
}  # fmt: skip
SFT = {"sft.steps": STEPS, "sft.solutions": 6, "sft.learning_rate": 5e-4, "sft.warmup_steps": 2, "sft.evaluate_every": 6}  # fmt: skip

CASES: dict[str, Callable[[Path], Series]] = {
    **{f"algorithm/{a}": partial(train, **{"objective.name": a}) for a in ALGORITHMS},
    **{f"reference/{kind}": case for kind, case in _references().items()},
    **{f"settings/{name}": partial(train, **settings) for name, settings in SETTINGS.items()},
    "resume/stopped": partial(stopped, **NO_KL),
    "resume/killed": partial(
        killed, **KL, **{"reference.kind": "moving", "reference.every": 3, "objective.kl_target": 0.02}
    ),
    "resume/lora": partial(killed, **KL, **LORA),
    "supervised/steps": partial(supervised, **SFT),
    "supervised/resumed": partial(killed, name="supervised", **SFT),
    "evaluate": evaluate,
    "explain": explain,
    "compare": compare,
}  # fmt: skip
ROUNDING_DECIDES = {
    "algorithm/clip_cov": "tokens are chosen by a range of covariances",
    "algorithm/kl_cov": "tokens are chosen by the order of covariances",
    "algorithm/sapo": "a last bit of the first steps changes a token of the third",
    "settings/bfloat16": "sums in bfloat16 depend on their order",
    "settings/kl_in_reward": "equal rewards differ by the rounding of a KL divergence of 0",
}
"""Cases whose numbers on another kind of processor say nothing, with the reason."""
QUICK = (
    "algorithm/grpo", "algorithm/clip_cov", "settings/lora", "settings/dynamic", "resume/killed",
    "supervised/steps", "evaluate",
)  # fmt: skip
"""What the test suite checks; `record.py --check` checks all."""
