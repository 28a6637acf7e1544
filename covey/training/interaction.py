"""Build the interaction of rollouts with an environment from the configuration."""

from __future__ import annotations

from dataclasses import replace

from covey.config import Config
from covey.engines.protocol import Sampling
from covey.environments import Factory, make_factory, make_host
from covey.environments.calls import CALL_FORMATS
from covey.environments.registry import NONE
from covey.errors import ConfigError
from covey.models.language_model import LanguageModel
from covey.rollout.multi_turn import Interaction


def interaction_of(
    config: Config, model: LanguageModel, factory: Factory | None = None
) -> Interaction | None:
    """Build the environment host and its limits; `factory` replaces the configured environment.

    Return None if there is no environment; every rollout is then one completion.
    """
    section = config.environment
    if factory is None:
        if section.name == NONE:
            return None
        factory = make_factory(section.name, section.options)
    if section.max_tokens <= config.rollout.max_tokens:
        raise ConfigError(
            f"config: environment.max_tokens = {section.max_tokens} (for a whole conversation) "
            f"must be more than rollout.max_tokens = {config.rollout.max_tokens} (for one turn)"
        )
    name = section.call_format if section.call_format != "auto" else call_format_of(model)
    form = CALL_FORMATS[name]
    stops: list[str] = []
    if not section.parallel_calls or name == "tags":
        tools = getattr(factory(), "tools", None) if name == "tags" else None
        stops = form.stops(list(tools()) if callable(tools) else [])
    return Interaction(
        host=make_host(
            section.name,
            factory,
            workers=section.workers,
            timeout=section.timeout,
            gigabytes=section.gigabytes,
        ),
        call_format=form,
        stops=tuple(stops),
        max_turns=section.max_turns,
        max_calls=section.max_calls,
        max_tokens=section.max_tokens,
    )


def with_stops(sampling: Sampling, interaction: Interaction | None) -> Sampling:
    """Return sampling settings that also stop at the interaction's stop strings."""
    if interaction is None:
        return sampling
    stops = dict.fromkeys([*sampling.stop_strings, *interaction.stops])
    return replace(sampling, stop_strings=tuple(stops))


def call_format_of(model: LanguageModel) -> str:
    """Return the tool-call format that the chat template describes; the default is hermes."""
    renderer = model.renderer
    template = renderer.tokenizer.get_chat_template() if renderer and renderer.chat else ""
    is_llama = "<tool_call>" not in template and "ipython" in template
    return "llama3" if is_llama else "hermes"
