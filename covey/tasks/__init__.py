"""Tasks: prompts with targets, from generators, packaged problems, files and the Hub. No torch."""

from covey.tasks.arithmetic import Arithmetic
from covey.tasks.code import Code
from covey.tasks.countdown import Countdown
from covey.tasks.gsm8k import Gsm8k
from covey.tasks.hub import Hub
from covey.tasks.jsonl import Jsonl
from covey.tasks.mixed import Mixed
from covey.tasks.reasoning_gym import ReasoningGym
from covey.tasks.registry import TASKS, find_task, is_user_task, make_task
from covey.tasks.task import Task, bad_rows_of
from covey.tasks.tools import Tools

__all__ = [
    "TASKS",
    "Arithmetic",
    "Code",
    "Countdown",
    "Gsm8k",
    "Hub",
    "Jsonl",
    "Mixed",
    "ReasoningGym",
    "Task",
    "Tools",
    "bad_rows_of",
    "find_task",
    "is_user_task",
    "make_task",
]
