"""Builds the design of a comparison: its common configuration, arms, seeds and budget.

Each arm takes the settings that the user gave for all arms, and overrides some of them. Default
values are filled in after the overrides, so an arm with another algorithm gets the defaults of its
own algorithm. No arm may change the budget or the held-out evaluation, because all arms must be
measured in the same way. Even an arm that overrides the reward is evaluated with the common reward.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.config import Config, parse_config, toml_value
from covey.config.algorithm_names import PAIRED
from covey.config.load import overridden, read_settings
from covey.config.resolve import held_out_of, resolve, task_of
from covey.config.smoke import smoke_settings
from covey.errors import ConfigError, DataError, RunError
from covey.lab.compare.comparison import DESIGN_FILE, Arm, BudgetKind, Design, read_design
from covey.notices import notice
from covey.objective import find_algorithm
from covey.tasks.task import Task, shared_prompts
from covey.types import Prompt

FIXED = ("train.steps", "train.stop_after", "evaluate.", "seed")
"""Settings that no arm may change. To train with different seeds than the other arms, an arm can
add an offset, such as `seed+=1000`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A comparison as the user requests it on the command line or in Python."""

    source: str
    """A configuration file or a recipe; empty for the default settings."""
    overrides: tuple[str, ...] = ()
    smoke: bool = False
    algorithms: tuple[str, ...] = ()
    arms: tuple[Arm, ...] = ()
    seeds: int = 3
    budget: BudgetKind = "steps"
    amount: int | None = None
    threads: int = 0
    """The number of threads of each run, or 0 for a number that suits this machine."""

    def command(self) -> str:
        words = ["covey", "compare", *([self.source] if self.source else [])]
        words += ["--algorithms", ",".join(self.algorithms)] if self.algorithms else []
        for arm in self.arms:
            words += ["--arm", arm.text]
        words += ["--seeds", str(self.seeds)]
        words += ["--budget", self.budget] if self.budget != "steps" else []
        words += ["--amount", str(self.amount)] if self.amount is not None else []
        words += ["--threads", str(self.threads)] if self.threads else []
        words += ["--smoke"] if self.smoke else []
        for override in self.overrides:
            words += ["--set", override]
        return shlex.join(words)


def parse_arm(text: str) -> Arm:
    """Parse an arm such as `frozen: optimizer.learning_rate=0` or `again: seed+=1000`."""
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not colon or not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", name):
        raise ConfigError(
            f"the arm {text!r} must have the form 'NAME: key=value, key=value'; NAME may contain "
            "letters, digits and the characters _ . + -"
        )
    settings, offset = [], 0
    # Commas separate settings, except inside brackets and quotes.
    for part in re.findall(r"""(?:"[^"]*"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^,])+""", rest):
        moved = re.fullmatch(r"seed\s*\+=\s*(\d+)", part.strip())
        if moved:
            offset = int(moved.group(1))
        elif part.strip():
            settings.append(part.strip())
    return Arm(name=name, settings=tuple(settings), seed_offset=offset)


def design_comparison(request: Request) -> Design:
    if request.smoke:
        given, _ = smoke_settings(request.source, request.overrides)
    else:
        settings = read_settings(request.source) if request.source else {}
        given = overridden(settings, request.overrides, notice)
    common = resolve(parse_config(given))
    given, amount = _with_budget(given, common, request.budget, request.amount)
    common = resolve(parse_config(given))
    if common.evaluate.every == 0:
        raise ConfigError(
            "config: evaluate.every = 0 turns evaluations off, but a comparison needs them; set "
            "evaluate.every to a number of steps"
        )
    design = Design(
        command=request.command(),
        given=given,
        common=common.model_dump(),
        arms=(),
        seeds=tuple(range(common.seed, common.seed + request.seeds)),
        budget=request.budget,
        amount=amount,
        threads=request.threads,
    )
    # A single arm is compared with the common configuration, named after its algorithm.
    single = not request.algorithms and len(request.arms) == 1
    base = (common.objective.name,) if single else ()
    return with_arms(design, (*base, *request.algorithms), request.arms)


def _with_budget(
    given: Mapping[str, Any], common: Config, budget: BudgetKind, amount: int | None
) -> tuple[dict[str, Any], int]:
    if budget == "steps":
        amount = common.train.steps if amount is None else amount
        kept = {k: v for k, v in given.get("train", {}).items() if k != "stop_after"}
        return overridden({**given, "train": kept}, [f"train.steps={amount}"]), amount
    if amount is None:
        if budget == "tokens":
            raise ConfigError(
                "--budget tokens needs --amount TOKENS, the number of tokens that each run may "
                "sample"
            )
        amount = common.train.total_optimizer_steps
    return overridden(given, [f"train.stop_after={{{budget}={amount}}}"]), amount


def with_arms(design: Design, algorithms: Iterable[str] = (), arms: Iterable[Arm] = ()) -> Design:
    found = {arm.name: arm for arm in design.arms}
    for arm in (*(algorithm_arm(design.given, name) for name in algorithms), *arms):
        declared = _declared(design, arm)
        if found.setdefault(arm.name, declared) != declared:
            raise ConfigError(f"two arms have the name {arm.name!r}; rename one of them")
    return replace(design, arms=tuple(found.values()))


def with_seeds(design: Design, count: int) -> Design:
    """Add seeds to a design until it has at least `count` seeds."""
    first = min(design.seeds)
    seeds = sorted({*design.seeds, *range(first, first + count)})
    return replace(design, seeds=tuple(seeds))


def algorithm_arm(given: Mapping[str, Any], name: str) -> Arm:
    label = name.replace(":", ".")
    if _common_algorithm(given) == name:
        return Arm(name=label)
    options = inspect.signature(find_algorithm(name)).parameters
    kept = {k: v for k, v in _shared_options(given, name).items() if k in options}
    settings = [f"objective.{key}={toml_value(value)}" for key, value in kept.items()]
    return Arm(name=label, settings=(f"objective.name={toml_value(name)}", *settings))


def _shared_options(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the user's objective options that have the same meaning in the algorithm `name`.

    For example, DPO does not get GRPO's `beta`, because DPO's `beta` is not a KL weight.
    """
    paired = (name in PAIRED) != (_common_algorithm(given) in PAIRED)
    own = {"name", "beta"} if paired else {"name"}
    return {k: v for k, v in given.get("objective", {}).items() if k not in own}


def _common_algorithm(given: Mapping[str, Any]) -> str:
    name: str = given.get("objective", {}).get("name", Config().objective.name)
    return name


def kept_options(design: Design, arm: Arm) -> dict[str, tuple[Any, Any]]:
    """Return the user's objective options that differ from the defaults of the arm's algorithm.

    The returned dict maps each option to a pair: the user's value, and the default of the arm's
    algorithm. For example, `--algorithms gspo` keeps the clip range of a GRPO recipe, although this
    range is hundreds of times wider than GSPO's default. An option is omitted if its default is the
    same in the recipe's algorithm and in the arm's algorithm.
    """
    common, name = _common_algorithm(design.given), config_of(design, arm).objective.name
    if name == common or arm.settings != algorithm_arm(design.given, name).settings:
        return {}  # a user's arm keeps no options of another algorithm
    given = design.given.get("objective", {})
    own = inspect.signature(find_algorithm(name)).parameters
    other = inspect.signature(find_algorithm(common, given)).parameters
    return {
        key: (value, own[key].default)
        for key, value in _shared_options(design.given, name).items()
        # An option with the same default in both algorithms means the same in both.
        if key in own and own[key].default not in (value, other[key].default)
    }


def config_of(design: Design, arm: Arm, seed: int | None = None) -> Config:
    config = resolve(parse_config(overridden(design.given, arm.settings)))
    first = config.seed if seed is None else seed
    return config.model_copy(update={"seed": first + arm.seed_offset})


def arm_configs(design: Design) -> dict[str, Config]:
    return {arm.name: config_of(design, arm, min(design.seeds)) for arm in design.arms}


def _declared(design: Design, arm: Arm) -> Arm:
    """Fill in the `differences` of an arm.

    Raise an error if the arm changes a setting that all arms must share.
    """
    config = config_of(design, replace(arm, seed_offset=0))
    before, after = _flat(design.common), _flat(config.model_dump())
    differences = {
        key: after.get(key)
        for key in (*after, *(key for key in before if key not in after))
        if after.get(key) != before.get(key)
    }
    fixed = [key for key in differences if key.startswith(FIXED)]
    if config.preferences.file:
        raise ConfigError(
            "config: a comparison cannot use preferences.file, because arms learn from what "
            "they sample; delete preferences.file to take the preference pairs from sampled groups"
        )
    if fixed:
        key, value = fixed[0], toml_value(differences[fixed[0]])
        other_seeds = ", or add an offset with seed+=1000" if key == "seed" else ""
        raise ConfigError(
            f"arm {arm.name} sets {key} = {value}, but all arms must have the same {key}; set "
            f"{key} for all arms{other_seeds}"
        )
    if arm.seed_offset:
        differences["seed"] = f"+{arm.seed_offset}"
    return replace(arm, differences=differences)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section, values in settings.items():
        if isinstance(values, Mapping):
            found |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            found[section] = values
    return found


def same_comparison(old: Design, new: Design) -> bool:
    """Return whether the old design has the common settings and all arms of the new design."""
    have = {arm.name: (arm.settings, arm.seed_offset) for arm in old.arms}
    want = {arm.name: (arm.settings, arm.seed_offset) for arm in new.arms}
    alike = (old.given, old.budget, old.amount) == (new.given, new.budget, new.amount)
    return alike and want.items() <= have.items()


# Checks before training that a comparison is fair, and possible problems.


Row = Mapping[str, str]

GENERATION = (
    "rollout.max_tokens", "rollout.stop", "model.template", "model.chat_options", "model.prefill",
)  # fmt: skip
"""Settings that affect how the policy generates completions, both in training and in
evaluations."""
HOSTING = ("environment.workers", "environment.timeout", "environment.gigabytes")
"""Settings of the environment that do not affect completions."""


def check_prompts(configs: Mapping[str, Config]) -> None:
    first, expected = next(iter(configs)), ""
    seen: list[dict[str, object]] = []
    for name, config in configs.items():
        task = task_of(config)
        held_out = held_out_of(config, task)
        digest = prompts_digest(held_out)
        expected = expected or digest  # the digest of the first arm
        if digest != expected:
            raise ConfigError(
                f"arm {name} and arm {first} have different held-out prompts, so their accuracies "
                "cannot be compared; use the same [task] settings for all arms"
            )
        section = config.task.model_dump()
        if section in seen:
            continue
        seen.append(section)
        if found := shared_prompts(task.train(), held_out):
            raise DataError(
                f"task: {len(found)} of {len(held_out)} held-out prompts are also training "
                "prompts, so evaluations would measure memorization; remove these prompts from the "
                f"training data; the first such prompt is {found[0].id}: {found[0].text!r}"
            )


def task_digest(task: Task) -> str:
    return " ".join(prompts_digest(prompts) for prompts in (task.train(), task.held_out()))


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Return the SHA-256 digest of prompts, including all data that scoring reads."""
    digest = hashlib.sha256()
    for prompt in prompts:
        messages = [dict(message) for message in prompt.messages]
        row = [prompt.id, prompt.task, messages, prompt.target, dict(prompt.info)]
        digest.update(json.dumps(row, default=str).encode() + b"\n")
    return digest.hexdigest()


def known_beforehand(design: Design, configs: Mapping[str, Config]) -> tuple[Row, ...]:
    """Return the possible problems that are known before training, with the names of their arms."""
    from covey.lab.plan.equivalence import coincidences
    from covey.lab.plan.findings import findings

    rows: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, config in configs.items():
        for finding in findings(config):
            rows.setdefault(tuple(finding.row().items()), []).append(name)
    across = [dict(finding.row()) for finding in coincidences(configs)]
    single = [{**dict(row), "arms": ", ".join(names)} for row, names in rows.items()]
    own: list[Row] = []

    def add(arms: Iterable[Arm], *, title: str, why: str, remedy: str) -> None:
        if names := ", ".join(arm.name for arm in arms):
            about = {"title": title, "why": why, "remedy": remedy}
            own.append({**about, "docs": "docs/compare.md", "arms": names})

    def generates(key: str) -> bool:
        return key in GENERATION or (key.startswith("environment.") and key not in HOSTING)

    arms = design.arms if len(design.arms) > 1 else ()
    common = design.common
    reward = common["evaluate"].get("reward", {}).get("name") or common["reward"]["name"]
    add(
        [arm for arm in arms if any(key.startswith("reward.") for key in arm.differences)],
        title="some arms are trained on a different reward than the one that evaluates them",
        why="The common reward scores the held-out completions of all arms, so that accuracies "
        "mean the same; an arm that is not trained on it may be at a disadvantage.",
        remedy=f"choose it with evaluate.reward.name; now it is {reward}",
    )
    add(
        [arm for arm in arms if any(map(generates, arm.differences))],
        title="some arms generate the held-out completions with their own settings",
        why="Their prompt format, stop strings, length limit or environment also apply in "
        "evaluations, so a difference may come from these settings, without any learning.",
        remedy="compare the first evaluations, before training; or change the setting for all arms",
    )
    for arm in design.arms:
        if kept := kept_options(design, arm):
            values = ", ".join(f"objective.{key} = {toml_value(v)}" for key, (v, _) in kept.items())
            usual = ", ".join(f"{key} = {toml_value(v)}" for key, (_, v) in kept.items())
            add(
                [arm],
                title=f"options of the recipe are kept: {values}",
                why=f"The recipe sets them for {common['objective']['name']}; {arm.name}'s own "
                f"defaults are {usual}.",
                remedy=f"for the defaults of {arm.name}, add the arm "
                f"'{arm.name}-default: {arm.settings[0]}'",
            )
    return (*across, *own, *single)


# The folder of a comparison: new, resumed or extended.


PARENT = Path("comparisons")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A comparison that is ready to run."""

    folder: Path
    design: Design
    previous: Design | None
    """The design of the comparison that the folder already contains, or None."""


def prepare(request: Request, folder: Path | None = None) -> Prepared:
    """Choose the folder of a comparison.

    If the folder already contains a comparison with the same design, resume this comparison.
    Without `folder`, choose the next free folder comparisons/NAME-N.
    """
    design = design_comparison(request)
    if len(design.arms) < 2:
        raise ConfigError(
            "nothing to compare: give at least two arms, such as the algorithms grpo and gspo"
        )
    stem = Path(request.source).stem or "dataset"
    numbered = (PARENT / f"{stem}-{number}" for number in itertools.count(1))
    for path in numbered if folder is None else [folder]:
        if (path / DESIGN_FILE).is_file():
            if same_comparison(read_design(path), design):
                return extend(path, seeds=len(design.seeds), threads=request.threads)
        elif not path.exists() or not any(path.iterdir()):
            return Prepared(folder=path, design=design, previous=None)
        elif folder is not None:
            raise RunError(
                f"{path} already contains files that do not belong to a comparison; choose another "
                "folder"
            )
    raise ConfigError(
        f"{folder} already contains a comparison with different settings, arms or budget; choose "
        f"another folder, or add an arm with covey compare --folder {folder} --add ALGORITHM"
    )


def extend(
    folder: Path,
    algorithms: Iterable[str] = (),
    arms: Iterable[Arm] = (),
    seeds: int | None = None,
    threads: int = 0,
) -> Prepared:
    """Add arms or seeds to the comparison in a folder, without changing its existing runs."""
    old = read_design(folder)
    if threads not in (0, old.threads):
        raise ConfigError(
            f"--threads {threads}: the existing runs in {folder} use {old.threads} threads, and "
            "another number of threads would change the last digits of the results; leave out "
            "--threads, or choose another --folder"
        )
    new = with_arms(old, algorithms, arms)
    new = new if seeds is None else with_seeds(new, seeds)
    if new != old:
        words = ["covey", "compare", "--folder", str(folder)]
        for arm in new.arms[len(old.arms) :]:
            words += ["--arm", arm.text]
        words += ["--seeds", str(len(new.seeds))] if new.seeds != old.seeds else []
        new = replace(new, command=f"{old.command}\n{shlex.join(words)}")
    return Prepared(folder=folder, design=new, previous=old)


def checked(prepared: Prepared) -> Prepared:
    """Raise an error if a comparison is unfair.

    The returned comparison contains the possible problems and the number of threads.
    """
    design, old = prepared.design, prepared.previous
    configs = arm_configs(design)
    check_prompts(configs)  # also for a resumed comparison, because its data may have been edited
    if old is not None and [a.name for a in old.arms] == [a.name for a in design.arms]:
        return prepared
    threads = design.threads
    if not threads and _on_gpu(configs.values()):
        import torch

        threads = torch.get_num_threads()
    elif not threads:  # the runs share the cores equally
        threads = max(1, (os.cpu_count() or 1) // (len(design.arms) * len(design.seeds)))
    findings = known_beforehand(design, configs)
    return replace(prepared, design=replace(design, threads=threads, findings=findings))


def parallel_runs(design: Design) -> int:
    if _on_gpu([parse_config(design.common)]):
        return 1
    return max(1, (os.cpu_count() or 1) // design.threads)


def _on_gpu(configs: Iterable[Config]) -> bool:
    import torch

    devices = {config.model.device for config in configs}
    found = torch.cuda.is_available()
    return any(d.startswith("cuda") or (d == "auto" and found) for d in devices)
