"""Notes and metrics about overlapped generation: staleness, waiting times and restarts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from covey.engines.native.engine import NativeEngine
from covey.engines.protocol import News
from covey.rollout.source import StepRollouts
from covey.training.build import Parts

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_truncate": "truncated importance sampling, as in decoupled PPO",
        "token_mask": "masked importance sampling, as in IcePop",
    }
)
"""Common names of importance-weight corrections."""


def overlap_note(parts: Parts) -> str:
    """Return a note about the maximum staleness of rollouts, and about the correction for it."""
    overlap, options = parts.config.overlap, parts.config.objective.options
    age = f"overlap: rollouts are up to {overlap.staleness} steps old (mode {overlap.mode!r})"
    if parts.step_settings.old_logp_from_sampler:
        return f"{age}; the objective's ratio to the engine's log-probs corrects for their age"
    name, low, high = (options[f"correction{end}"] for end in ("", "_low", "_high"))
    known = f" ({NAMES[name]})" if name in NAMES else ""
    more = f" and objective.veto = {options['veto']:g}" if options["veto"] else ""
    return f"{age}; correction: objective.correction = {name!r}{known}, {low:g} to {high:g}{more}"


def overlap_metrics(
    parts: Parts, rollouts: StepRollouts, waited: float, version: int
) -> dict[str, float]:
    """Return the overlap metrics of a step that starts at policy version `version`."""
    overlap, metrics = parts.config.overlap, {}
    if not overlap.staleness:
        return {}
    spans = [
        span for rollout in rollouts.collected.rollouts for s in rollout.segments
        for span in s.versions
    ]  # fmt: skip
    sizes, versions = [span.stop - span.start for span in spans], [span.version for span in spans]
    mean = sum(s * v for s, v in zip(sizes, versions, strict=True)) / max(1, sum(sizes))
    metrics = {
        "overlap/staleness": version - mean,
        "overlap/staleness_max": version - min(versions),
        "overlap/version_min": min(versions),
        "overlap/version_max": max(versions),
    }
    if overlap.mode == "copy":
        metrics["time/wait_rollouts"] = waited
        metrics["time/wait_training"] = rollouts.engine_waited
    return metrics


def restarts(parts: Parts) -> tuple[list[str], dict[str, float]]:
    """Return notes and metrics about restarts and preempted completions since the last call."""
    engine, scoring = parts.engine.events(), parts.scorer.events()
    metrics: dict[str, float] = {}
    if engine or not parts.engine.info.shares_weights:
        metrics["engine/restarts"] = sum(not isinstance(event, News) for event in engine)
    paused = parts.engine.take_preemptions() if isinstance(parts.engine, NativeEngine) else 0
    if paused:
        metrics["engine/preemptions"] = paused
        engine = [*engine, f"engine: paused {paused} completions because the KV cache was full"]
    if scoring:
        metrics["scoring/restarts"] = len(scoring)
    return [*engine, *scoring], metrics
