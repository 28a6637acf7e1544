"""Draw docs/images/algorithms/NAME.svg: the curves of each algorithm on the embedded model.

They are those that benchmarks/every_algorithm.py recorded.
"""

from __future__ import annotations

import json
from pathlib import Path

from covey.lab.page import Trend
from covey.lab.report import sheet

HERE = Path(__file__).parent
RESULTS = HERE.parent.parent / "benchmarks/results/every_algorithm.json"
TITLES = {
    "objective/verifiable_correct_rate": "Correct completions",
    "policy/entropy_avg": "Entropy",
}


def main() -> None:
    """Draw every algorithm that has recorded curves."""
    (HERE / "algorithms").mkdir(exist_ok=True)
    for result in json.loads(RESULTS.read_text())["results"]:
        charts = []
        for metric, values in result.get("curves", {}).items():
            steps = tuple(float(step) for step in range(1, len(values) + 1))
            trend = Trend(metric=metric, arm="", steps=steps, values=tuple(values))
            charts.append((TITLES[metric], trend))
        if charts:
            (HERE / "algorithms" / f"{result['algorithm']}.svg").write_text(sheet(charts))


if __name__ == "__main__":
    main()
