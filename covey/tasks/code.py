"""The `code` task: small Python problems, each with hidden tests and a solution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covey.tasks.task import SplitTask, chat_messages, packaged_rows, with_instruction
from covey.types import Prompt

INSTRUCTION = (
    "You may think first, between <think> and </think>. Then give the whole solution in one code "
    "block that begins with ```python."
)


def prompt_text(row: Mapping[str, Any]) -> str:
    if row["signature"]:
        examples = "\n".join(f"    {e['call']} -> {e['expected']}" for e in row["examples"])
        form = f"Write it as a Python function:\n\n    {row['signature']}"
        form += f"\n\nFor example:\n\n{examples}"
    else:
        example = row["examples"][0]
        form = (
            "Write it as a Python program that reads standard input and writes to standard output."
            f" For example, this input:\n\n{_indented(example['stdin'])}\n\n"
            f"gives this output:\n\n{_indented(example['stdout'])}"
        )
    return f"{row['question']}\n\n{form}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Code(SplitTask):
    """48 small programming problems; a fixed quarter of the problems is held out.

    `info["tests"]` is a list of tests. A test of a function is {call, expected}, where `expected`
    is a Python literal. A test of a program is {stdin, stdout}. The examples in the prompt are not
    among the tests. The target is the problem's id. If the problem asks for a function, the
    problem's id is also the name of this function.
    """

    system: str = ""
    instruction: str = INSTRUCTION
    name: str = "code"

    def _prompts(self, split: str) -> list[Prompt]:
        return [self._prompt(row, split) for row in packaged_rows("code", split)]

    def _prompt(self, row: Mapping[str, Any], split: str) -> Prompt:
        text = with_instruction(prompt_text(row), self.instruction)
        return Prompt(
            id=f"{self.name}/{split}/{row['id']}",
            task=self.name,
            messages=chat_messages(text, self.system),
            target=row["id"],
            info={"tests": row["tests"], "solution": f"```python\n{row['solution']}```"},
        )
