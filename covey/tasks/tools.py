"""The `tools` task: a user request that a single tool call fulfills."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from covey.tasks.task import SplitTask, chat_messages, packaged_rows
from covey.types import Prompt

SIGNATURES = """\
calculate(operation: "add" | "subtract" | "multiply" | "divide", a: number, b: number)
    The result of one operation on a and b, in that order.
get_weather(city: string, unit: "celsius" | "fahrenheit")
    The weather in a city now.
add_event(title: string, date: string, time: string)
    An entry in the calendar; date as YYYY-MM-DD, time as HH:MM of 24 hours.
convert_units(value: number, from_unit: string, to_unit: string)
    A quantity in another unit: kilometers, miles, kilograms, pounds, liters, gallons, celsius or
    fahrenheit.
search_web(query: string, max_results: integer)
    Pages that match a query.
translate(text: string, target_language: string)
    A text in another language, which is given by its two-letter ISO 639-1 code, such as en.
list_files(folder: string, pattern: string)
    The files of a folder whose names match a pattern such as *.txt; * matches all.
set_timer(minutes: integer, label: string)
    A timer that rings after so many minutes."""

SYSTEM = f"""\
You can call these tools:

{SIGNATURES}

Fulfil the request with one call. You may think first, between <think> and </think>. Then write \
the call as JSON between the tags, and nothing after it:
<tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools(SplitTask):
    """72 requests, each for one of eight tools; a fixed quarter of the requests is held out.

    `info["call"]` is the expected tool call.
    """

    system: str = SYSTEM
    name: str = "tools"

    def _prompts(self, split: str) -> list[Prompt]:
        return [self._prompt(row, split) for row in packaged_rows("tools", split)]

    def _prompt(self, row: dict[str, Any], split: str) -> Prompt:
        call = json.dumps(row["call"])
        return Prompt(
            id=f"{self.name}/{split}/{row['id']}",
            task=self.name,
            messages=chat_messages(row["question"], self.system),
            target=call,
            info={"call": row["call"], "solution": f"<tool_call>{call}</tool_call>"},
        )
