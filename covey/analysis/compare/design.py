"""What is compared: a common configuration, arms that each declare how they differ, equal budgets.

An arm is the common settings as they were given, with overrides; only then are defaults written
out. So an arm that names another algorithm gets that algorithm's own defaults, and not those of the
one that it replaces. What may not differ is what makes the measurement: the budget, and what is
asked at evaluations. Who judges them is the common reward, whatever an arm learns from.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey.analysis.compare.outcome import BudgetKind
from covey.analysis.compare.record import ArmRecord, Record
from covey.config import Config, parse_config, toml_value
from covey.config.load import overridden, read_settings
from covey.config.smoke import smoke_settings
from covey.errors import ConfigError
from covey.objective import algorithm
from covey.training.build import resolve
from covey.training.schedule import total_updates

FIXED = ("train.steps", "train.stop_after", "evaluate.", "seed")
"""What no arm may change; seeds are moved."""
SAMPLING = ("model.", "adapter.", "task.", "rollout.", "seed")
"""What decides the answers of the first step ..."""
NOT_SAMPLING = ("engine.max_concurrent", "model.gradient_checkpointing", "model.deterministic")
"""... but for these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedArm:
    """An arm as somebody asks for it."""

    name: str
    settings: tuple[str, ...] = ()
    seed_offset: int = 0

    @property
    def text(self) -> str:
        """The same as it is written."""
        moved = [f"seed+={self.seed_offset}"] if self.seed_offset else []
        return f"{self.name}: {', '.join([*self.settings, *moved])}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A comparison as somebody asks for it."""

    source: str
    overrides: tuple[str, ...] = ()
    smoke: bool = False
    """Whether the common configuration is made small first."""
    algorithms: tuple[str, ...] = ()
    arms: tuple[AskedArm, ...] = ()
    seeds: int = 3
    budget: BudgetKind = "steps"
    amount: int | None = None
    threads: int = 0
    """Of each run; 0: what suits the machine."""

    def command(self) -> str:
        """Return a command line that asks for the same."""
        words = ["covey", "compare", self.source]
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


def parse_arm(text: str) -> AskedArm:
    """Read an arm such as `frozen: optimizer.learning_rate=0` or `again: seed+=1000`."""
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not colon or not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", name):
        raise ConfigError(
            f"--arm takes 'NAME: key=value, key=value', with a name that can be a folder's, not "
            f"{text!r}"
        )
    settings, offset = [], 0
    for part in _parts(rest):
        moved = re.fullmatch(r"seed\s*\+=\s*(\d+)", part)
        if moved:
            offset = int(moved.group(1))
        else:
            settings.append(part)
    return AskedArm(name=name, settings=tuple(settings), seed_offset=offset)


def _parts(text: str) -> list[str]:
    """Split at commas, but not inside of brackets or quotes."""
    pieces = re.findall(r"""(?:"[^"]*"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^,])+""", text)
    return [piece.strip() for piece in pieces if piece.strip()]


def plan_comparison(asked: Asked) -> Record:
    """Work out the common configuration and every arm, and refuse what would not be fair."""
    if asked.smoke:
        given, _ = smoke_settings(asked.source, asked.overrides)
    else:
        given = overridden(read_settings(asked.source), asked.overrides)
    common = resolve(parse_config(given))
    given, amount = _with_budget(given, common, asked.budget, asked.amount)
    common = resolve(parse_config(given))
    if common.evaluate.every == 0:
        raise ConfigError("config: evaluate.every = 0, but a comparison is made of evaluations")
    record = Record(
        command=asked.command(),
        given=given,
        common=plain(common),
        arms=(),
        seeds=tuple(range(common.seed, common.seed + asked.seeds)),
        budget=asked.budget,
        amount=amount,
        threads=asked.threads,
    )
    # A single arm is compared with the common configuration, which goes by its algorithm's name.
    base = (common.objective.name,) if not asked.algorithms and len(asked.arms) == 1 else ()
    return with_arms(record, (*base, *asked.algorithms), asked.arms)


def with_arms(
    record: Record, algorithms: Iterable[str] = (), arms: Iterable[AskedArm] = ()
) -> Record:
    """Add an arm for each algorithm, and arms as they are asked for."""
    added = [*(algorithm_arm(record.given, name) for name in algorithms), *arms]
    found = {arm.name: arm for arm in record.arms}
    for arm in added:
        made = _declared(record, arm)
        if found.setdefault(arm.name, made) != made:
            raise ConfigError(f"two arms are called {arm.name!r}; give one of them another name")
    return replace(record, arms=tuple(found.values()))


def with_seeds(record: Record, count: int) -> Record:
    """Have at least so many seeds."""
    first = min(record.seeds)
    seeds = sorted({*record.seeds, *range(first, first + count)})
    return replace(record, seeds=tuple(seeds))


def algorithm_arm(given: Mapping[str, Any], name: str) -> AskedArm:
    """Return the arm of an algorithm: options that were given and that it has too are kept."""
    section = given.get("objective", {})
    label = name.replace(":", ".")
    if section.get("name", Config().objective.name) == name:
        return AskedArm(name=label)
    has = inspect.signature(algorithm(name)).parameters
    kept = {key: value for key, value in section.items() if key in has and key != "name"}
    settings = [f"objective.{key}={toml_value(value)}" for key, value in kept.items()]
    return AskedArm(name=label, settings=(f"objective.name={toml_value(name)}", *settings))


def config_of(record: Record, arm: ArmRecord | AskedArm, seed: int | None = None) -> Config:
    """Return the resolved configuration of an arm, with one of the comparison's seeds."""
    config = resolve(parse_config(overridden(record.given, arm.settings)))
    first = config.seed if seed is None else seed
    return config.model_copy(update={"seed": first + arm.seed_offset})


def _declared(record: Record, arm: AskedArm) -> ArmRecord:
    """Say all that an arm makes different, and refuse what no arm may change."""
    unmoved = replace(arm, seed_offset=0)
    before, after = flat(record.common), flat(plain(config_of(record, unmoved)))
    differences = {
        key: after.get(key)
        for key in (*after, *(key for key in before if key not in after))
        if after.get(key) != before.get(key)
    }
    fixed = [key for key in differences if key.startswith(FIXED)]
    if fixed:
        raise ConfigError(
            f"--arm {arm.name}: {fixed[0]} = {toml_value(differences[fixed[0]])} would measure it "
            "by other means than the others; change it for all arms with --set (for another seed, "
            "seed+=1000)"
        )
    if arm.seed_offset:
        differences["seed"] = f"+{arm.seed_offset}"
    return ArmRecord(
        name=arm.name,
        settings=arm.settings,
        seed_offset=arm.seed_offset,
        differences=differences,
    )


def _with_budget(
    given: Mapping[str, Any], common: Config, budget: BudgetKind, amount: int | None
) -> tuple[dict[str, Any], int]:
    """Give every arm the same amount of the same thing."""
    if budget == "steps":
        amount = common.train.steps if amount is None else amount
        kept = {k: v for k, v in given.get("train", {}).items() if k != "stop_after"}
        return overridden({**given, "train": kept}, [f"train.steps={amount}"]), amount
    if amount is None:
        if budget == "tokens":
            raise ConfigError("--budget tokens needs --amount: how many tokens each run may sample")
        amount = total_updates(common.train)
    settings = [f"train.stop_after={{{budget}={amount}}}"]
    return overridden(given, settings), amount


def shares_first_answers(arm: ArmRecord) -> bool:
    """Whether an arm asks and samples like the common configuration in the first step."""
    changed = [key for key in arm.differences if key.startswith(SAMPLING)]
    return all(key in NOT_SAMPLING for key in changed)


def plain(config: Config) -> dict[str, Any]:
    """Return a configuration as plain data."""
    data: dict[str, Any] = config.model_dump()
    return data


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and not prefix:
            found |= flat(value, f"{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def same_comparison(old: Record, new: Record) -> bool:
    """Whether a new request is for what an old one has, or for a part of it."""
    have = {arm.name: (arm.settings, arm.seed_offset) for arm in old.arms}
    wants = {arm.name: (arm.settings, arm.seed_offset) for arm in new.arms}
    alike = (old.given, old.budget, old.amount) == (new.given, new.budget, new.amount)
    return alike and wants.items() <= have.items()


def arm_configs(record: Record, names: Sequence[str] = ()) -> dict[str, Config]:
    """Return the configuration of every arm, with the first seed."""
    seed = min(record.seeds)
    wanted = (arm for arm in record.arms if not names or arm.name in names)
    return {arm.name: config_of(record, arm, seed) for arm in wanted}
