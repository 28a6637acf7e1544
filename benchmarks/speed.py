"""Speed on a GPU: engine, update and whole step beside peers and hardware floors, in one run.

    python benchmarks/speed.py --out benchmarks/results/speed-gpu.json
    python benchmarks/speed.py --only step,startup --out benchmarks/results/speed-gpu.json
    python benchmarks/speed.py --table benchmarks/results/speed-gpu.json     # as Markdown
    python benchmarks/speed.py --device cpu        # tiny shapes: to see that all of it works

Weights are random, nothing is downloaded, and every completion has its full length. Each row is
written to the file as soon as it is measured. `--only` replaces those sections of the file and
keeps the others. If a peer cannot be imported or fails, its row gives the reason and the benchmark
continues; speed_step.py says what TRL needs.

sampler     tokens per second; one decode step at half length; its floor: weights, keys and values
            read once (a group's prompt once) at the measured copy bandwidth
float8      the same for a model of 7B parameters, in each precision of the engine, and how long
            the engine takes to prepare new weights
sampler_long  decode steps of 64 completions of up to 16,384 tokens, with peak and forecast memory;
            a generation whose KV cache has room for half of the completions
update      tokens per second, counting the prompt once per completion; MFU over those tokens,
            `work` over the tokens processed: 6 flops per weight and token plus attention, against
            the 989 Tflop/s of the data sheet
step        sampling, scoring and one update, beside TRL, each in a fresh process
ragged      completions of 1 to 1,024 tokens with geometric lengths: refilling free slots against
            static batches that wait for their longest completion, on the same completions
linear      16 to 2,048 completions at a time
seed_shape  three algorithms, 2 x 8 completions of 400 tokens per step; projected to 200 steps each,
            from model creation to the last update, without imports
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
"""Time limit of a worker process."""


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
    from speed_float8 import float8
    from speed_long import sampler_long
    from speed_sampler import linear, ragged, sampler
    from speed_step import seed_shape, step
    from speed_update import update

    return {
        "sampler": sampler,
        "float8": float8,
        "sampler_long": sampler_long,
        "update": update,
        "step": partial(step, own_process=own_process),
        "ragged": ragged,
        "linear": linear,
        "seed_shape": seed_shape,
        "startup": partial(startup, own_process=own_process),
        "numerics": numerics,
    }


def work(name: str, sizes: Any) -> Any:
    """Run one worker's measurement in this process."""
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
    """Measure, show progress, and print the tables."""
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
        words = [*command, "--worker", worker]
        try:
            return in_own_process(words, environment=environment, seconds=WORKER_SECONDS)
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
