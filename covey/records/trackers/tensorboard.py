"""Tracker for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.records.samples import quoted
from covey.records.trackers.external import COLUMNS, ExternalTracker


class TensorBoardTracker(ExternalTracker):
    """Writes metrics as single-precision scalars, and completions as text."""

    writer: Any = None

    def open(self, done: int) -> None:
        """Open a new event file, which tells TensorBoard to discard the old events of repeated
        steps."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(self.run.path / "tensorboard")
        # The first file needs purge_step too: TensorBoard treats a second file as a restart.
        self.writer = SummaryWriter(folder, purge_step=done + 1 if done else 0)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Write all scalars in one event, in TensorBoard's older format, which all readers
        support."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.writer.file_writer.add_summary(Summary(value=scalars), step)

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Write completions as indented Markdown blocks, in which Markdown has no effect."""
        lines: list[str] = []
        for row in rows:
            cells = dict(zip(COLUMNS, row, strict=True))
            lines += [f"reward {cells['reward']:.3g}", ""]
            for name in ("prompt", "completion", "target", "parts"):
                lines += [f"{name}:", "", *quoted(str(cells[name])), ""]
        self.writer.add_text("completions", "\n".join(lines), step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
