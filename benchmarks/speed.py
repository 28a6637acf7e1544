"""How fast covey is on a GPU, beside its peers and beside what the machine could do, in one run.

    python benchmarks/speed.py --out benchmarks/results/speed-gpu.json
    python benchmarks/speed.py --only step,startup --out benchmarks/results/speed-gpu.json
    python benchmarks/speed.py --table benchmarks/results/speed-gpu.json     # as Markdown
    python benchmarks/speed.py --device cpu        # tiny shapes: to see that all of it works

Weights are random, nothing is downloaded, and no answer ends before its time. Every row is in the
file as soon as it is known, and a run with `--only` replaces those sections there and leaves the
others. A peer that cannot be imported, or fails, is reported with the reason, and the rest goes on;
speed_step.py says what TRL needs.

sampler     tokens a second; a decode step by itself, with answers half written; its floor: weights,
            keys and values read once, a group's prompt once, at the measured speed of a copy
update      tokens a second, counted as if every prompt were read for every answer; MFU over those,
            `work` over the tokens that are really seen: 6 flops a weight and token, and attention,
            against the 989 Tflop/s of the data sheet
step        sampling, judging and one update, beside TRL, each in a fresh process
ragged      answers of 1 to 1,024 tokens, by the geometric law: slots that are filled again as
            answers end, and batches that wait for their longest answer; the same answers
linear      16 to 2,048 answers at a time
seed_shape  three algorithms, 2 x 8 answers of 400 tokens a step; projected to 200 steps of each,
            from a model being made to the last update, imports not counted
startup     from a loaded model to the first tokens of a rollout batch, in a fresh process
numerics    sampler against trainer, and greedy text against `generate`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from own_process import WorkerFailed, in_own_process
from speed_report import COLUMNS, Report, load, markdown

WORKER_SECONDS = 150.0
"""After which a process of its own is given up."""


def environment_of(device: str, megabytes: int) -> dict[str, Any]:
    """Return versions, the machine, and how fast it copies."""
    import torch
    from described import described
    from speed_device import copy_bandwidth

    cuda = device.startswith("cuda")
    name = torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} CPU cores"
    return {
        **described(0, device, torch.get_num_threads()),
        "machine": name,
        "copy_bytes_per_s": copy_bandwidth(device, megabytes),
    }


def sections(own_process: Callable[..., Any]) -> Mapping[str, Callable[..., None]]:
    """Return what measures each section."""
    from speed_checks import numerics, startup
    from speed_sampler import linear, ragged, sampler
    from speed_step import seed_shape, step
    from speed_update import update

    return {
        "sampler": sampler,
        "update": update,
        "step": partial(step, own_process=own_process),
        "ragged": ragged,
        "linear": linear,
        "seed_shape": seed_shape,
        "startup": partial(startup, own_process=own_process),
        "numerics": numerics,
    }


def work(name: str, sizes: Any) -> Any:
    """Measure what has a process of its own, in that process."""
    from speed_checks import first_rollout
    from speed_step import step_covey, step_trl

    kind, _, shape = name.partition(" ")
    if kind == "startup":
        return first_rollout(sizes, shape)
    return {"step_covey": step_covey, "step_trl": step_trl}[kind](sizes)


def sizes_of(arguments: argparse.Namespace) -> Any:
    """Return how large everything is."""
    import torch
    from speed_sizes import sizes_for

    if not arguments.device.startswith("cuda"):
        torch.set_num_threads(1)  # tiny shapes gain nothing by more, and lose on a busy machine
    changes = {"repeat": arguments.repeat} if arguments.repeat else {}
    return sizes_for(arguments.device, **changes)


def parse() -> argparse.Namespace:
    """Read the command line."""
    about, *_ = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--only", default=",".join(COLUMNS), help="sections, with commas")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for tiny shapes")
    parser.add_argument("--out", "--output", type=Path, help="where the JSON goes, or is added to")
    parser.add_argument("--table", type=Path, help="print a file's tables, and measure nothing")
    parser.add_argument("--repeat", type=int, default=0, help="timed runs; 0: as many as usual")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    if unknown := [name for name in arguments.only if name not in COLUMNS]:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(COLUMNS)}")
    return arguments


def main() -> None:
    """Measure, say how it goes, and print the tables."""
    arguments = parse()
    if arguments.table is not None:
        print(markdown(load(arguments.table)["sections"]))
        return
    sizes = sizes_of(arguments)
    if arguments.worker:
        arguments.out.write_text(json.dumps(work(arguments.worker, sizes)))
        return
    report = Report.at(arguments.out, environment_of(arguments.device, sizes.copied_megabytes))
    command = [sys.executable, __file__, "--device", arguments.device]

    def own_process(worker: str, environment: Mapping[str, str] | None = None) -> Any:
        told = [*command, "--worker", worker]
        try:
            return in_own_process(told, environment=environment, seconds=WORKER_SECONDS)
        except WorkerFailed as error:
            print(*str(error).splitlines()[-20:], sep="\n", flush=True)
            raise

    measures = sections(own_process)
    for name in (name for name in COLUMNS if name in arguments.only):
        with report.section(name):
            measures[name](sizes, report)
    print(markdown({name: report.sections[name] for name in arguments.only}))


if __name__ == "__main__":
    main()
