"""Record what every part of the program computes, or check that it still computes the same.

    python tests/regression/record.py                  record all cases of this kind of machine
    python tests/regression/record.py --check          compare all cases with the recorded numbers
    python tests/regression/record.py --only NAME ...  these cases only; a name may be a beginning

The folder numbers/ has one file for each kind of processor that recorded. A change that is to leave
all numbers alone must pass --check without recording anew. On a processor that recorded, every
metric, weight and rollout must be the same to the last bit. On others the first steps of the metrics
in clear must agree up to rounding, except in cases where rounding decides what is chosen.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ["OMP_NUM_THREADS"] = "1"  # processes that a case starts read it, as torch does here
os.environ["HF_HUB_OFFLINE"] = "1"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for a script; pytest has it there

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from tests.regression.cases import CASES, ROUNDING_DECIDES  # noqa: E402
from tests.regression.series import Series, Value, digest  # noqa: E402

FOLDER = Path(__file__).with_name("numbers")
CLEAR = (
    "loss/policy_avg", "loss/cross_entropy", "objective/scores", "objective/kl_avg",
    "optim/grad_norm", "greedy/value", "verdict/arms/", "weights", "rollouts",
)  # fmt: skip
"""Series kept as they are, so that a difference can be read. Of others the digest is kept."""
FIRST_STEPS, RELATIVE, ABSOLUTE = 3, 1e-4, 1e-6
"""Elsewhere: of how many steps values are compared, and how far apart they may be. With other vector
instructions the first steps differ by 1e-5; later an optimizer makes more of a last bit."""

Kept = dict[str, list[Value] | str]


def environment() -> dict[str, str]:
    """Return what decides the last bits."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "transformers": transformers.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    about = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    return " ".join(about.get(key, "?") for key in ("vendor_id", "cpu family", "model"))


def computed(name: str) -> Series:
    """Run a case on one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return CASES[name](Path(folder))


def kept(series: Series) -> Kept:
    """Return what the fixture holds of series."""
    return {n: v if n.startswith(CLEAR) else digest(v) for n, v in sorted(series.items())}


def differences(recorded: Mapping[str, Any], series: Series, *, exact: bool) -> list[str]:
    """Return a line for each recorded series that is not the same. What is new is not looked at."""
    found = []
    for name, then in recorded.items():
        if name not in series:
            found.append(f"{name} is missing")
        elif isinstance(then, str):
            if exact and digest(series[name]) != then:
                found.append(f"{name} differs; it is now {_shown(series[name])}")
        elif (line := _difference(then, series[name], exact=exact)) is not None:
            found.append(f"{name} {line}")
    return found


def _shown(values: Sequence[Value]) -> str:
    return f"{values[:4]}{' ...' if len(values) > 4 else ''}"


def _difference(then: Sequence[Value], now: Sequence[Value], *, exact: bool) -> str | None:
    if not exact:
        then, now = then[:FIRST_STEPS], now[:FIRST_STEPS]
    if len(then) != len(now):
        return f"has {len(now)} values, not {len(then)}"
    for place, (a, b) in enumerate(zip(then, now, strict=True)):
        if a != b and (exact or not _close(a, b)):
            return f"differs from value {place + 1} on: it was {a!r} and is now {b!r}"
    return None


def _close(a: Value, b: Value) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return True  # digests say nothing about how near things are
    if a is None or b is None or isinstance(a, str) or isinstance(b, str):
        return False
    return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def own_file() -> Path:
    """Return the file with the numbers of this kind of processor."""
    return FOLDER / f"{environment()['processor'].replace(' ', '-')}.json"


def load() -> dict[str, Any]:
    """Read the numbers of this kind of processor, or else those of the first that recorded."""
    file = own_file() if own_file().exists() else min(FOLDER.glob("*.json"))
    fixture: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return fixture


def write(cases: Mapping[str, Kept]) -> None:
    """Write the numbers of this kind of processor, a line for each series."""
    parts = []
    for name, series in sorted(cases.items()):
        lines = ",\n".join(f"{json.dumps(n)}: {json.dumps(v)}" for n, v in series.items())
        parts.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    body = ",\n".join(parts)
    text = f'{{"environment": {json.dumps(environment())},\n"cases": {{\n{body}\n}}}}\n'
    own_file().write_text(text, encoding="utf-8")


def check(name: str, fixture: Mapping[str, Any], *, exact: bool = False) -> list[str]:
    """Run a case and return how it differs from what was recorded.

    Bit for bit where all is as it was when it was recorded; with `exact`, everywhere.
    """
    exact = exact or fixture["environment"] == environment()
    recorded = fixture["cases"][name]
    if not exact and name in ROUNDING_DECIDES:
        recorded = dict.fromkeys(recorded, "")  # only that each series is there
    return differences(recorded, computed(name), exact=exact)


def _check_all(chosen: Sequence[str], *, exact: bool) -> int:
    fixture = load()
    if fixture["environment"] != environment():
        how = "compared to the last bit all the same" if exact else "compared up to rounding"
        print(f"recorded with {fixture['environment']}\n     this is {environment()}: {how}")
    failed = 0
    for name in chosen:
        started = time.monotonic()
        lines = check(name, fixture, exact=exact)
        failed += bool(lines)
        print(f"{name}: {'DIFFERENT' if lines else 'the same'}, {time.monotonic() - started:.1f} s")
        for line in lines:
            print(f"    {line}")
        sys.stdout.flush()
    print(f"{len(chosen) - failed} of {len(chosen)} cases are the same")
    return 1 if failed else 0


def _record(chosen: Sequence[str]) -> None:
    cases: dict[str, Kept] = {}
    if len(chosen) < len(CASES) and own_file().exists():
        fixture = load()
        if fixture["environment"] != environment():
            sys.exit("the other cases were recorded elsewhere: record all of them here")
        cases = fixture["cases"]
    for name in chosen:
        started = time.monotonic()
        cases[name] = kept(computed(name))
        print(f"{name}: {len(cases[name])} series, {time.monotonic() - started:.1f} s", flush=True)
    write({name: series for name, series in cases.items() if name in CASES})
    print(f"{own_file()}: {own_file().stat().st_size / 1000:.0f} kB")


def main() -> int:
    """Record or check, as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of recording")
    parser.add_argument("--exact", action="store_true", help="to the last bit on any machine")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="these cases only")
    given = parser.parse_args()
    chosen = [n for n in CASES if not given.only or n.startswith(tuple(given.only))]
    if not chosen:
        parser.error(f"no case is called so; there are {', '.join(CASES)}")
    if given.check:
        return _check_all(chosen, exact=given.exact)
    _record(chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
