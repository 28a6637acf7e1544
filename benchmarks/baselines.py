"""PPO and DPO beside GRPO and GSPO on the embedded model: accuracy, seconds and memory.

    python benchmarks/baselines.py FOLDER --run      # compare first, an hour on one core
    python benchmarks/baselines.py FOLDER            # summarise a comparison that is done

All arms have the same prompts, number of training steps and seeds. DPO is there a
second time with a fifth of the learning rate: at GRPO's rate it does not learn.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from described import described

RESULTS = Path(__file__).parent / "results"
COMMAND = [
    "compare", "demo", "--algorithms", "ppo,dpo,grpo,gspo", "--seeds", "3",
    "--arm", 'dpo-slow: objective.name="dpo", optimizer.learning_rate=2e-5',
    "--set", "critic.learning_rate=3e-4", "--threads", "1",
]  # fmt: skip


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return what a reader compares: accuracy before and after by seed, and the cost of a run."""
    arms = []
    for arm in report["conclusion"]["arms"]:
        runs = [run for run in report["runs"] if run["arm"] == arm["arm"]]
        finals = [run["evaluations"][-1] for run in runs]
        arms.append(
            {
                "arm": arm["arm"],
                "initial": arm["initial"]["value"],
                "final": arm["final"]["value"],
                "final_by_seed": [final["accuracy"] for final in finals],
                "tokens_by_seed": [final["tokens"] for final in finals],
                "collapsed_seeds": len(arm["collapsed"]),
                **arm["cost"],
            }
        )
    return {
        "command": shlex.join(["covey", *COMMAND]),
        "headline": report["conclusion"]["headline"],
        "pairs": [pair["summary"] for pair in report["conclusion"]["pairs"]],
        "arms": arms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", action="store_true", help="Run or resume the comparison.")
    parser.add_argument("--output", type=Path, default=RESULTS / "baselines.json")
    given = parser.parse_args()
    if given.run:
        command = [sys.executable, "-m", "covey", *COMMAND, "--folder", str(given.folder)]
        subprocess.run(command, check=True)
    report = json.loads((given.folder / "report.json").read_text(encoding="utf-8"))
    found = {**summary(report), "environment": described(0, "cpu", 1)}
    given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for arm in found["arms"]:
        print(json.dumps(arm))


if __name__ == "__main__":
    main()
