"""The reward registry, and functions that build a reward from a config section.

To add a reward, write its class in this folder, as in `think_answer.py`, or in the folder of its
recipe, and add it to `REWARDS`.

The rewards of published systems stand with their recipes. Their bugs are fixed, and the docstring
of each reward names the fixes: expressions are evaluated with limits and without `eval`, the signs
of numbers are read, numbers are compared exactly, and no completion raises an error. Known hacks of
the published rewards are not fixed, because published models were trained with these rewards; the
command `covey rewards lab` tries them, and each docstring lists those that work.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from covey.config.resolve_options import resolve_options
from covey.config.schema import Named
from covey.errors import ConfigError, nearest
from covey.recipes.agent_book import rewards as templates
from covey.recipes.agent_book.citations import Citations
from covey.recipes.agent_book.safety import Safety
from covey.recipes.grpo_zero.rewards import GrpoZero
from covey.recipes.lm_book.rewards import LmBook
from covey.recipes.nano_aha.rewards import NanoAha
from covey.recipes.open_instruct.rewards import OpenInstruct
from covey.recipes.simple_grpo.rewards import SimpleGrpo
from covey.rewards.code import CodeTests
from covey.rewards.coherence import Coherence, Efficiency
from covey.rewards.countdown import Countdown
from covey.rewards.environment import EnvironmentReward
from covey.rewards.format import AgentExampleForm, ThinkAnswerForm, ThinkToolForm
from covey.rewards.instructions import Instructions
from covey.rewards.judge import Judge
from covey.rewards.math_answer import MathAnswer
from covey.rewards.mix import ByTask, Mix
from covey.rewards.reasoning_gym import ReasoningGym
from covey.rewards.score import Reward
from covey.rewards.text_match import ExactText, FuzzyText
from covey.rewards.think_answer import ThinkAnswer
from covey.rewards.tool_call import ToolCall
from covey.rewards.user import FUNCTIONS, as_reward, function_reward, is_trl_style
from covey.trust import import_callable, is_import_path


def mix(
    *,
    parts: Mapping[str, Mapping[str, Any]],
    gated: bool = True,
    robust: bool = False,
    early: Mapping[str, float] | None = None,
    early_until: float = 0.2,
    correct_first: bool = False,
) -> Mix:
    """A weighted mean of rewards.

    Each entry of `parts` is a config table with the `name`, the `weight` and the options of a
    reward. With `correct_first`, a correct completion scores higher than any incorrect completion,
    and an empty completion scores lowest. Without `correct_first`, reward parts such as
    `efficiency` and `safety` reward even an empty completion.
    """
    rewards, weights = {}, {}
    for key, table in parts.items():
        options = dict(table)
        weight = options.pop("weight", None)
        if not isinstance(weight, int | float) or isinstance(weight, bool):
            raise ConfigError(f"config: reward.parts.{key}.weight must be a number, not {weight!r}")
        weights[key] = float(weight)
        rewards[key] = _inner(f"reward.parts.{key}", options)
    return Mix(
        parts=rewards,
        weights=weights,
        gated=gated,
        robust=robust,
        early=early or {},
        early_until=early_until,
        correct_first=correct_first,
    )


def by_task(
    *, tasks: Mapping[str, Mapping[str, Any]], column: str = "", default: str = ""
) -> ByTask:
    """Score the prompts of each task with the task's own reward.

    Each entry of `tasks` is a config table with the `name` and the options of a reward. If `column`
    names a data column, the prompt's value in this column selects the reward, instead of the
    prompt's task. Prompts without a value in the column `column` get the reward `tasks[default]`.
    """
    rewards = {}
    for key, table in tasks.items():
        where = f"reward.tasks.{key}"
        rewards[key] = check_alone(str(table.get("name")), _inner(where, dict(table)), where)
    if default and default not in rewards:
        raise ConfigError(
            f"config: reward.default = {default!r} must be one of the names in reward.tasks"
        )
    return ByTask(tasks=rewards, column=column, default=default)


def sum_of(
    *, functions: Sequence[str], weights: Sequence[float] = (), success_at: float = 1.0
) -> Reward:
    """The weighted sum of your own functions, as in TRL.

    `functions` lists import paths, such as "my_rewards:correct", and `weights` has one number per
    function; without `weights`, each is 1. A completion is a success if the first function gives it
    at least `success_at`. The functions run in the training process.
    """
    if weights and len(weights) != len(functions):
        raise ConfigError(
            f"config: reward.weights has {len(weights)} numbers, but reward.functions has "
            f"{len(functions)} functions; give one weight per function"
        )
    found = [import_callable(path, "reward.functions") for path in functions]
    pairs = zip(found, weights or [1.0] * len(found), strict=True)
    return function_reward(list(pairs), success_at=success_at)


REWARDS: Mapping[str, Callable[..., Reward]] = MappingProxyType(
    {
        # correctness
        "think_answer": ThinkAnswer,
        "math_answer": MathAnswer,
        "environment": EnvironmentReward,
        "countdown": Countdown,
        "code_tests": CodeTests,
        "tool_call": ToolCall,
        "exact_text": ExactText,
        "fuzzy_text": FuzzyText,
        "reasoning_gym": ReasoningGym,
        "instructions": Instructions,
        "judge": Judge,
        # format and style
        "think_answer_form": ThinkAnswerForm,
        "think_tool_form": ThinkToolForm,
        "agent_example_form": AgentExampleForm,
        "efficiency": Efficiency,
        "safety": Safety,
        "citations": Citations,
        "coherence": Coherence,
        # composite
        "mix": mix,
        "by_task": by_task,
        "sum": sum_of,
        "math": templates.math,
        "code": templates.code,
        "retrieval": templates.retrieval,
        "agent": templates.agent,
        # published implementations
        "lm_book": LmBook,
        "nano_aha": NanoAha,
        "grpo_zero": GrpoZero,
        "simple_grpo": SimpleGrpo,
        "open_instruct": OpenInstruct,
    }
)


def gamed_by(reward: object) -> tuple[str, ...]:
    """Return the hacks that work on a published reward, as listed in the reward's docstring.

    >>> gamed_by(NanoAha)[-1], gamed_by(str)
    ('correct then wrong', ())
    """
    _, _, listed = (inspect.getdoc(reward) or "").partition("Hacks that work on this reward are ")
    return tuple(re.findall(r"`(.*?)`", listed.partition("\n\n")[0]))


def find_reward(name: str, table: str = "reward") -> Callable[..., Any]:
    if name in REWARDS:
        return REWARDS[name]
    if is_import_path(name):
        return import_callable(name, f"{table}.name")
    if name == FUNCTIONS:
        raise ConfigError(
            f"config: {table}.name = {name!r} needs reward functions from Python; name them with "
            f"{table}.name = 'sum', {table}.functions = ['MODULE:FUNCTION'] and --trust MODULE, or "
            "call covey.train(..., rewards=...) in Python, with resume=RUN to resume a run"
        )
    hint = nearest(name, REWARDS)
    raise ConfigError(f"config: {table}.name = {name!r} is not a known reward{hint}")


def reward_options(section: Named, table: str = "reward") -> dict[str, Any]:
    """Validate a reward's config section, and return all of the reward's options."""
    maker = find_reward(section.name, table)
    if section.name in REWARDS or inspect.isclass(maker):
        return resolve_options(maker, section, table)
    return _function_options(maker, section, table)


def _function_options(function: Callable[..., Any], section: Named, table: str) -> dict[str, Any]:
    """Check the options of a user's reward function against its keyword-only arguments.

    In a TRL-style reward function, arguments without a default are data columns, not options.
    """
    trl_style = is_trl_style(function)
    known = {
        name: p.default
        for name, p in inspect.signature(function).parameters.items()
        if p.kind is p.KEYWORD_ONLY and (not trl_style or p.default is not p.empty)
    }
    known |= {"success_at": 1.0, "conversational": False}
    for key in section.options:
        if key not in known:
            hint = nearest(key, known)
            raise ConfigError(f"config: {table}.{key} is not an option of {section.name}{hint}")
    options = known | section.options
    for key, value in options.items():
        if value is inspect.Parameter.empty:
            raise ConfigError(
                f"config: {table}.{key} must be set for {section.name}, because it has no default"
            )
    return options


def make_reward(name: str, options: Mapping[str, Any], table: str = "reward") -> Reward:
    maker = find_reward(name, table)
    return maker(**options) if name in REWARDS else as_reward(maker, options)


def check_alone(name: str, reward: Reward, table: str = "reward") -> Reward:
    """Raise ConfigError for a reward that must not be the only reward, such as an LLM judge."""
    if getattr(reward, "needs_rule", False):
        raise ConfigError(
            f"config: {table}.name = {name!r} cannot be the only reward, because a policy can "
            "learn to manipulate an LLM judge; combine the judge with a rule-based reward in "
            "'mix', or use the reward 'retrieval'"
        )
    return reward


def _inner(table: str, options: dict[str, Any]) -> Reward:
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"config: {table}.name must be set to the name of a reward")
    section = Named.model_validate({"name": name, **options})
    return make_reward(name, reward_options(section, table), table)
