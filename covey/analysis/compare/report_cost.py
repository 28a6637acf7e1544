"""The cost table of a report: time and memory of each arm, beside its final accuracy."""

from __future__ import annotations

from covey.analysis.compare.conclusion import Conclusion
from covey.analysis.compare.report_tables import EMPTY, shown_level
from covey.analysis.page.text_table import TextTable

COST_NOTE = (
    "Medians over finished seeds; memory is the largest. Seconds leave out the first step and "
    "evaluations, and depend on what else the machine does; CPU seconds are of the whole process. "
    "Memory is that of the GPU's tensors, or without a GPU of the whole process."
)


def cost_table(found: Conclusion) -> TextTable:
    """Return a table of the time, memory and final accuracy of each arm."""
    costs = [(arm, arm.cost) for arm in found.arms if arm.cost is not None]
    return TextTable(
        title="Cost of a run",
        head=["arm", "final", "seconds of training", "CPU seconds", "peak memory, GiB"],
        rows=[
            [
                arm.arm,
                shown_level(arm.final, arm),
                f"{cost.seconds:,.0f}",
                EMPTY if cost.cpu_seconds is None else f"{cost.cpu_seconds:,.0f}",
                EMPTY if cost.memory_gib is None else f"{cost.memory_gib:.2f}",
            ]
            for arm, cost in costs
        ],
        note=COST_NOTE,
    )
