"""Environments, which reply to the policy in multi-turn rollouts.

An environment is a class; each instance of the class runs one episode (see environment.py).

    reset(prompt, seed)   returns the first messages; or Start(messages=, tools=, state=)
    step(message)         takes the policy's message, returns the next messages; None or
                          Step(done=True) ends the episode;
                          Step(messages=, reward=, state=) also gives a reward or a state
    reward()              optional: the reward of the episode, or its parts; `reward.name =
                          "environment"` reads it
    prepare(**options)    optional class method: loads data that all episodes of a process share
    quick = True          optional: the environment is never slow and never crashes, so it runs in
                          this process and not in a worker process with limits (host.py)

Methods of an environment may be plain or async. An exception in a method ends the rollout with the
finish reason `error` and without a reward.

Most environments are subclasses of `ToolEnvironment` (tool_environment.py). The policy calls the
public methods of a `ToolEnvironment` as tools. Covey derives the JSON schema of a tool from the
type hints and the docstring of its method. In a `ToolEnvironment`, a message without tool calls
ends the episode. If a tool of a `ToolEnvironment` raises an exception, the policy sees the
exception as an error message.

To add an environment to the package, write its class and add it to ENVIRONMENTS (registry.py),
which this file does not import, because demonstration environments stand in `covey.recipes`. The
modules models/chat.py and rollout/episode.py handle chat templates, tokens and masks.
"""

from covey.environments.adapters import as_environment, environment_factory
from covey.environments.environment import Environment, Factory, Start, Step
from covey.environments.host import Host, InlineHost, make_host
from covey.environments.play import Played, call, play
from covey.environments.tool_environment import ToolEnvironment, ToolError

__all__ = [
    "Environment",
    "Factory",
    "Host",
    "InlineHost",
    "Played",
    "Start",
    "Step",
    "ToolEnvironment",
    "ToolError",
    "as_environment",
    "call",
    "environment_factory",
    "make_host",
    "play",
]
