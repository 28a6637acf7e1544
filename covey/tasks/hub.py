"""The `hub` task: prompts from a dataset of the Hugging Face Hub, or from local files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.errors import ConfigError, DataError, nearest
from covey.hub_access import offline_if_unreachable
from covey.notices import is_quiet
from covey.tasks.rows import NumberedRow, RowReader, check_share
from covey.tasks.task import SplitTask, require_module
from covey.types import Prompt

FORMATS = {".csv": "csv", ".parquet": "parquet", ".json": "json", ".jsonl": "json"}
OPTIONS: Mapping[str, Mapping[str, Any]] = {"csv": {"keep_default_na": False, "na_values": [""]}}
"""Options of `load_dataset` for each file format. In CSV, only an empty cell is a missing value; NA
and None are text."""


def load_splits(path: str, subset: str = "", revision: str = "") -> Mapping[str, Any]:
    """Load a Hub dataset, a folder or a file; return {split name: rows}.

    A single .csv, .parquet, .json or .jsonl file becomes one split, `train`.
    """
    local = Path(path)
    if not local.exists():
        offline_if_unreachable()  # set before datasets is imported, which reads the setting
    datasets = require_module("datasets")
    kind = FORMATS.get(local.suffix, "") if local.is_file() else None
    if kind == "":
        endings = ", ".join(FORMATS)
        raise DataError(f"task: cannot read {path}: the file name must end in one of {endings}")
    if is_quiet():
        datasets.disable_progress_bars()
    try:
        if kind is None:
            return dict(datasets.load_dataset(path, subset or None, revision=revision or None))
        options = OPTIONS.get(kind, {})
        return dict(datasets.load_dataset(kind, data_files=str(local), **options))
    except Exception as error:  # errors of datasets, the network or a file format
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(
            f"task: cannot load the dataset {path!r}: {why}; without access to the Hugging Face "
            "Hub, give the path of a local folder or file, or use the task jsonl"
        ) from None


def rows_of(splits: Mapping[str, Any], split: str, source: str) -> Iterator[NumberedRow]:
    """Yield the rows of one split with their indices, from 0."""
    if split not in splits:
        hint = nearest(split, splits)
        raise DataError(f"task: {source} has no split {split!r}{hint}")
    for number, row in enumerate(splits[split]):
        yield number, f"{source} {split}[{number}]", row


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub(RowReader, SplitTask):
    """Prompts and targets from `path`: the name of a Hub dataset, a folder, or a file.

    If a dataset has only one split, leave `held_out_split` empty to hold out the fraction
    `held_out_share` of its rows; a share of 0 holds out no prompts. A hash of the prompt's text
    decides whether the prompt is held out. Every run holds out the same prompts, and prompts with
    equal text are in the same split.
    `RowReader` documents the options that define the meaning of the columns.
    """

    path: str
    subset: str = ""
    revision: str = ""
    train_split: str = "train"
    held_out_split: str = ""
    held_out_share: float = 0.1
    name: str = "hub"

    def __post_init__(self) -> None:
        RowReader.__post_init__(self)
        check_share(self.held_out_share, "split")
        if self.held_out_split == self.train_split:
            raise ConfigError(
                f"task: train_split and held_out_split are both {self.train_split!r}; leave "
                "held_out_split empty to hold out a fraction of train_split"
            )

    def _prompts(self, split: str) -> list[Prompt]:
        splits = load_splits(self.path, self.subset, self.revision)
        source_split = (split == "held_out" and self.held_out_split) or self.train_split
        source = f"{self.path}/{self.subset}" if self.subset else self.path
        prompts = self.read(split, rows_of(splits, source_split, source), source)
        if self.held_out_split:
            return prompts
        return self.part(split, prompts, self.held_out_share, source)
