"""The TensorBoard tracker: event files in the run folder, for `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from covey.run.samples import quoted
from covey.run.trackers.external import COLUMNS, ExternalTracker


class TensorBoardTracker(ExternalTracker):
    """Scalars in double precision, and completions as text."""

    writer: Any = None

    def open(self, done: int) -> None:
        """Open a new event file. TensorBoard drops earlier events of the steps that follow."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(self.run.path / "tensorboard")
        # The first file says so as well: TensorBoard takes a second one for a restart.
        self.writer = SummaryWriter(folder, purge_step=done + 1 if done else 0)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars: single precision would round counts of tokens."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, new_style=True, double_precision=True)

    def completions(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Write completions as indented Markdown, which no text can leave."""
        lines: list[str] = []
        for row in rows:
            cells = dict(zip(COLUMNS, row, strict=True))
            lines += [f"reward {cells['reward']:.3g}", ""]
            for name in ("prompt", "completion", "target", "parts"):
                lines += [f"{name}:", "", *quoted(str(cells[name])), ""]
        self.writer.add_text("completions", "\n".join(lines), step)

    def close(self) -> None:
        """Write what is left."""
        if self.writer is not None:
            self.writer.close()
