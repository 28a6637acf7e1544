"""The `gsm8k` task: grade school word problems whose worked solutions end in `#### 18`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from covey.errors import ConfigError
from covey.tasks.hub import load_splits, rows_of
from covey.tasks.rows import Row, RowReader, json_lines
from covey.tasks.task import THINK_THEN_ANSWER, SplitTask
from covey.types import Prompt

HUB_PATH, HUB_SUBSET = "openai/gsm8k", "main"
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def read_solution(text: str) -> tuple[str, str] | None:
    """Split a worked solution into text and final answer; return None if there is no final answer.

    Calculator annotations and thousands separators are removed.

    >>> read_solution("He has 3*400=<<3*400=1200>>1200 eggs.\\n#### 1,200")
    ('He has 3*400=1200 eggs.', '1200')
    """
    worked, mark, answer = text.rpartition("####")
    answer = answer.strip().replace(",", "")
    return (_CALCULATOR.sub("", worked).strip(), answer) if mark and answer else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gsm8k(SplitTask):
    """Grade school word problems, from the Hub or from local files in the same format.

    `train_file` and `held_out_file` are JSON Lines files with the fields `question` and `answer`.
    Without local files, the task uses the splits `train` (7473 problems) and `test` (1319 problems)
    of openai/gsm8k. The text `instruction` is appended to each prompt.
    """

    train_file: str = ""
    held_out_file: str = ""
    system: str = ""
    instruction: str = THINK_THEN_ANSWER
    skip_bad_rows: bool = False
    name: str = "gsm8k"
    bad_rows: dict[str, list[str]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        if bool(self.train_file) != bool(self.held_out_file):
            raise ConfigError(
                "task: set both train_file and held_out_file, or leave out both; without files, "
                "the task uses the dataset openai/gsm8k"
            )

    def _prompts(self, split: str) -> list[Prompt]:
        source = self.train_file if split == "train" else self.held_out_file
        if source:
            rows = json_lines(Path(source))
        else:
            source = f"{HUB_PATH}/{HUB_SUBSET}"
            splits = load_splits(HUB_PATH, HUB_SUBSET)
            rows = rows_of(splits, "train" if split == "train" else "test", source)
        reader = RowReader(
            prompt="question",
            target="final",
            system=self.system,
            instruction=self.instruction,
            skip_bad_rows=self.skip_bad_rows,
            name=self.name,
        )
        solved = ((number, where, _with_final(row)) for number, where, row in rows)
        prompts = reader.read(split, solved, source)
        self.bad_rows.update(reader.bad_rows)
        return prompts


def _with_final(row: Row | str) -> Row | str:
    if isinstance(row, str):
        return row
    worked = row.get("answer")
    if not isinstance(worked, str):
        return "has no 'answer' that is text"
    read = read_solution(worked)
    if read is None:
        return "has an 'answer' without #### and a number"
    rest = {k: v for k, v in row.items() if k != "answer"}
    return {**rest, "worked": read[0], "final": read[1]}
