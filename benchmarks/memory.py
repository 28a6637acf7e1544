"""Peak memory beside its forecast: each setting runs for two steps.

    python benchmarks/memory.py                  # resident memory, on the CPU
    python benchmarks/memory.py --device cuda    # what torch allocates, on the first GPU
    python benchmarks/memory.py --only smollm2-lora --out lora.json

Models have published shapes and random weights: memory does not depend on what a model has learned,
and a random model generates completions of full length, as the forecast assumes. Nothing is
downloaded. On a CPU each setting runs in its own process, because a peak of resident memory cannot
be reset, and weights come from a temporary folder. On a GPU torch counts the peak, one process runs
all settings, and weights are created on the device. No checkpoint is written: saving was measured
to add nothing to the peak and takes long on a large model.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from described import described
from own_process import in_own_process

RESULTS = Path(__file__).parent / "results"
TOLERANCE = {"cpu": 0.25, "cuda": 0.15}
"""How far a forecast may be off, as a share of what was measured."""
SECONDS = 900
"""Time limit of a setting's process; on a GPU, a third of it for all settings."""

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "smollm2": {
        "vocab_size": 49_152, "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "llama-1b": {
        "vocab_size": 128_256, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""SmolLM2-135M and Llama-3.2-1B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run to measure."""

    model: str
    """One of SHAPES, or `embedded`."""
    overrides: tuple[str, ...] = ()

    @property
    def adapted(self) -> bool:
        """Whether it needs peft."""
        return any(override.startswith("adapter.rank") for override in self.overrides)


SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=32",
    "evaluate.every=0",
)
LARGE = (
    "rollout.prompts_per_step=32",
    "rollout.group_size=8",
    "rollout.max_tokens=256",
    "evaluate.every=0",
)
LORA = ("adapter.rank=16", "objective.beta=0.04")
EVALUATED = ("evaluate.every=2", "evaluate.prompts=64")
SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    "cpu": {
        "embedded": Setting(model="embedded"),
        "smollm2-full": Setting(
            model="smollm2",
            overrides=(*SMALL, "objective.beta=0.0", "train.micro_batch_tokens=400"),
        ),
        "smollm2-lora": Setting(
            model="smollm2", overrides=(*SMALL, *LORA, "train.micro_batch_tokens=1024")
        ),
    },
    "cuda": {
        "smollm2-full": Setting(
            model="smollm2", overrides=(*LARGE, "objective.beta=0.04", *EVALUATED)
        ),
        "smollm2-lora": Setting(
            model="smollm2", overrides=(*LARGE, *LORA, "reference.kind=adapter_off")
        ),
        "llama-1b-recomputed": Setting(
            model="llama-1b",
            overrides=(*LARGE, "objective.beta=0.0", "model.gradient_checkpointing=true"),
        ),
        "llama-1b-fsdp": Setting(
            model="llama-1b",
            overrides=(
                *LARGE,
                "objective.beta=0.04",
                "model.gradient_checkpointing=true",
                "parallel.strategy=fsdp",
            ),
        ),
    },
}


def make_model(shape: Mapping[str, Any], folder: Path, *, weights: bool) -> None:
    """Write a model of a shape with random weights, or none, and the embedded model's tokenizer."""
    import torch
    import transformers

    from covey.embedded import CHECKPOINT

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    config = transformers.LlamaConfig(**shape, **ends, architectures=["LlamaForCausalLM"])
    if weights:
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(folder)


def random_model(
    path: str,
    *,
    dtype: str,
    device: str,
    gradient_checkpointing: bool,
    offload_activations: bool,
    template: Any,
    **_: Any,
) -> Any:
    """Stand in for load_language_model: make weights on the device instead of reading them."""
    import torch
    import transformers

    from covey.accel.activation_offload import checkpoint_layers
    from covey.models.load_model import wrap

    kind = torch.bfloat16 if device.startswith("cuda") else torch.float32
    assert dtype == "auto"
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=kind)
    model.tie_weights()
    if gradient_checkpointing:
        checkpoint_layers(model, offload=offload_activations)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return wrap(model.eval(), tokenizer, name=path, template=template)


def config_of(setting: Setting, device: str, folder: Path) -> Any:
    from covey.config import load_config
    from covey.training.resolve import resolve

    path = "embedded" if setting.model == "embedded" else str(folder / setting.model)
    always = (
        f"model.path={path}",
        f"model.device={device}",
        "train.steps=2",
        "save.rollouts=false",
    )
    return resolve(load_config(None, [*always, *setting.overrides]))


def run_setting(config: Any) -> None:
    """Train for two steps in a temporary folder."""
    from covey.loop import train
    from covey.parallel.join import joined_world
    from covey.records.folder import RunFolder
    from covey.run import Run
    from covey.stopping import StopSignal

    with tempfile.TemporaryDirectory() as runs, joined_world(config) as world:
        parts = Run.build(config, world=world)
        run = RunFolder.create(Path(runs) / "run", "", {})
        with closing(parts.scorer), mock.patch.object(Run, "save"):
            train(parts, run, [], StopSignal())


def on_cpu(name: str, folder: Path) -> dict[str, Any]:
    """Run a setting in this process, and return the peak."""
    run_setting(config_of(SETTINGS["cpu"][name], "cpu", folder))
    return {"resident_bytes": resident_peak()}


def on_gpu(name: str, folder: Path, device: str = "cuda") -> dict[str, Any]:
    """Run a setting in this process, and return the peaks: of all, and of each phase."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # left by an earlier setting: cuBLAS workspaces
    peaks: dict[str, int] = {}
    started = time.perf_counter()
    with mock.patch("covey.policy.models.load_language_model", random_model), watched(peaks):
        run_setting(config_of(SETTINGS["cuda"][name], device, folder))
    peaks["rest"] = max(peaks.get("rest", 0), torch.cuda.max_memory_allocated())
    return {
        "allocated_bytes": max(peaks.values()) - before,
        "before_bytes": before,
        "phase_bytes": {phase: peak - before for phase, peak in peaks.items()},
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "context_bytes": context_bytes(),
        "seconds": round(time.perf_counter() - started, 1),
    }


@contextmanager
def watched(peaks: dict[str, int]) -> Iterator[None]:
    """Note the peaks while completions are sampled, and while the policy is trained on them."""
    import torch

    from covey.rollout.collect import collect_steps
    from covey.step import train_on

    def watching(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            peaks["rest"] = max(peaks.get("rest", 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            found = function(*arguments, **options)
            peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            return found

        return run

    with (
        mock.patch("covey.rollout.queue.collect_steps", watching("sample", collect_steps)),
        mock.patch("covey.loop.train_on", watching("update", train_on)),
    ):
        yield


def resident_peak() -> int:
    """Return this process's peak of resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise SystemExit("error: /proc/self/status has no VmHWM line on this system")


def context_bytes() -> int:
    """Return GPU memory outside torch: CUDA's context, if no other process uses the GPU."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def compare(name: str, device: str, folder: Path) -> dict[str, Any]:
    """Forecast and measure a setting's memory."""
    from covey.lab.plan.memory import forecast

    predicted = forecast(config_of(SETTINGS[device][name], device, folder))
    command = [sys.executable, __file__, "--only", name, "--worker", str(folder)]
    measured = in_own_process(command, seconds=SECONDS) if device == "cpu" else on_gpu(name, folder)
    forecast_bytes = predicted.peak if device == "cpu" else predicted.tensors
    truth = measured["resident_bytes" if device == "cpu" else "allocated_bytes"]
    return {
        "model": SETTINGS[device][name].model,
        "overrides": list(SETTINGS[device][name].overrides),
        "forecast_bytes": forecast_bytes,
        **measured,
        "ratio": forecast_bytes / truth,
        "forecast": predicted.row(),
    }


def report(device: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return all results as plain data."""
    import torch

    where = torch.cuda.get_device_name() if device == "cuda" else device
    about = described(0, where, torch.get_num_threads())
    return {"environment": about, "tolerance": TOLERANCE[device], "settings": rows}


def line(name: str, device: str, row: Mapping[str, Any]) -> str:
    """Format a setting's forecast beside its measurement."""
    truth = row["resident_bytes" if device == "cpu" else "allocated_bytes"]
    sizes = f"{row['forecast_bytes'] / 2**20:9,.0f} MiB predicted {truth / 2**20:9,.0f} measured"
    text = f"{name:20} {sizes}  ratio {row['ratio']:.2f}"
    if device == "cpu":
        return text
    own = sum(p["bytes"] for p in row["forecast"]["parts"] if p["name"] == "framework")
    phases = (
        f"{phase} {(row['forecast']['phases'][phase] - own) / 2**20:,.0f} / {taken / 2**20:,.0f}"
        for phase, taken in row["phase_bytes"].items()
        if phase in row["forecast"]["phases"]
    )
    kept = f"{row['reserved_bytes'] / 2**20:,.0f} reserved, {row['seconds']} s"
    return f"{text} ({kept}; {', '.join(phases)})"


def measure(device: str, names: list[str]) -> dict[str, Any]:
    """Measure settings one after the other and print each result."""
    rows: dict[str, Any] = {}
    settings = SETTINGS[device]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for model in sorted({settings[name].model for name in names} - {"embedded"}):
            make_model(SHAPES[model], folder / model, weights=device == "cpu")
        for name in names:
            if settings[name].adapted and not importlib.util.find_spec("peft"):
                print(f"{name:20} skipped: peft is not installed", flush=True)
                continue
            rows[name] = compare(name, device, folder)
            print(line(name, device, rows[name]), flush=True)
    return rows


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=list(SETTINGS), default="cpu")
    parser.add_argument(
        "--only", action="append", help="measure this setting only; may be repeated"
    )
    parser.add_argument(
        "--out", "--output", type=Path, help="default: benchmarks/results/memory-*.json"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device, settings = arguments.device, SETTINGS[arguments.device]
    names = arguments.only or list(settings)
    if unknown := set(names) - set(settings):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(settings)}")
    if arguments.worker:
        arguments.out.write_text(json.dumps(on_cpu(names[0], arguments.worker)))
        return
    if device == "cuda":
        faulthandler.dump_traceback_later(SECONDS // 3, exit=True)
    rows = measure(device, names)
    output = arguments.out or RESULTS / f"memory-{'gpu' if device == 'cuda' else 'cpu'}.json"
    output.write_text(json.dumps(report(device, rows), indent=1) + "\n")
    off = [n for n, row in rows.items() if abs(row["ratio"] - 1) > TOLERANCE[device]]
    if off:
        sys.exit(f"error: off by more than {TOLERANCE[device]:.0%}: {', '.join(off)}")


if __name__ == "__main__":
    main()
