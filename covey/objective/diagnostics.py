"""Diagnostics of a training step, as means that do not depend on micro-batch sizes.

Every mean is stored as a sum and a count, and divided once at the end, so it is never a mean of
means. If the objective has one ratio per completion, the ratio and clip metrics count each row of
the batch once. If the objective has one ratio per token, the ratio and clip metrics count each
token once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from covey.objective.algorithms.distillation import LEAST_LOGP, teacher_gap
from covey.objective.loss import CriticLoss, Objective, PolicyLoss
from covey.objective.masked import MAX_LOG_RATIO, bounded, difference, joined, row_mean, row_sum
from covey.types import Batch


@dataclass(frozen=True, slots=True)
class Measured:
    """Sums, counts and ranges of measurements, which can be merged over ranks."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Sum and count of each measurement, by its name."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest value of each measurement, by its name."""

    @staticmethod
    def joined(parts: Sequence[Measured]) -> Measured:
        """Merge the measurements of several ranks."""
        sums: dict[str, list[tuple[float, float]]] = {}
        ranges: dict[str, list[tuple[float, float]]] = {}
        for part in parts:
            for name, pair in part.sums.items():
                sums.setdefault(name, []).append(pair)
            for name, pair in part.ranges.items():
                ranges.setdefault(name, []).append(pair)
        return Measured(
            {n: (math.fsum(v for v, _ in s), math.fsum(c for _, c in s)) for n, s in sums.items()},
            {n: (min(low for low, _ in r), max(high for _, high in r)) for n, r in ranges.items()},
        )

    def means(self) -> dict[str, float]:
        """Return the mean of each measurement, and its extremes as `name_min` and `name_max`."""
        result = {name: total / count for name, (total, count) in self.sums.items() if count}
        for name, (low, high) in self.ranges.items():
            if low <= high:  # otherwise no element was in a mask
                result |= {f"{name}_min": low, f"{name}_max": high}
        return result


class Meter:
    """Collects the sum, count, smallest and largest value of each measurement, by name.

    Values that are observed together are summed in one operation, because many small sums would
    cost more time than the objective itself. The sums stay on the device until `measured` copies
    all of them.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._ranges: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._added: dict[str, list[tuple[float, float]]] = {}

    def add(self, name: str, value: float, count: float = 1.0) -> None:
        """Add `value`, the sum of `count` observations, to the measurement `name`."""
        self._added.setdefault(name, []).append((value, count))

    def means(self, values: Mapping[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Add the elements of each tensor inside the mask as observations."""
        stacked = torch.stack([v.double() for v in values.values()])
        sums = stacked.where(mask, 0.0).flatten(1).sum(dim=1)
        count = mask.sum(dtype=torch.float64)
        self._sums.setdefault(tuple(values), []).append((sums, count))

    def extremes(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Record the smallest and the largest element inside the mask."""
        if values.numel():
            low, high = values.where(mask, torch.inf).amin(), values.where(mask, -torch.inf).amax()
            self._ranges.setdefault(name, []).append((low.double(), high.double()))

    def measured(self) -> Measured:
        """Copy all observations to the CPU at once, and return sums, counts and ranges by name.

        The reduction runs on the CPU, because a CPU adds a few numbers faster than a GPU launches a
        kernel.
        """
        groups = (*self._sums.values(), *self._ranges.values())
        flat = [part.reshape(-1) for pairs in groups for pair in pairs for part in pair]
        sizes = [len(part) for part in flat]
        at_host = iter(torch.cat(flat).cpu().split(sizes) if flat else ())

        def stacked(pairs: Sequence[object]) -> list[torch.Tensor]:
            """Return the stacked first tensors and the stacked second tensors of all pairs."""
            copies = [(next(at_host), next(at_host)) for _ in pairs]
            return [torch.stack(side) for side in zip(*copies, strict=True)]

        measured = Measured()
        for names, pairs in self._sums.items():
            sums, counts = stacked(pairs)
            totals, count = sums.sum(dim=0).tolist(), float(counts.sum())
            measured.sums.update(
                (n, (total, count)) for n, total in zip(names, totals, strict=True)
            )
        for name, values in self._added.items():
            count = math.fsum(count for _, count in values)
            measured.sums[name] = math.fsum(value for value, _ in values), count
        for name, pairs in self._ranges.items():
            low, high = stacked(pairs)
            measured.ranges[name] = float(low.amin()), float(high.amax())
        return measured


def observe(
    meter: Meter,
    objective: Objective,
    batch: Batch,
    output: PolicyLoss,
    entropy: torch.Tensor | None = None,
) -> None:
    """Record the metrics of a micro-batch's policy loss."""
    assert batch.advantage is not None
    x = bounded(output.x)
    values = {
        "policy/approxkl_k1": -x,
        "policy/approxkl_k2": x.square() / 2,
        "policy/approxkl_avg": torch.expm1(x) - x,
        "val/ratio_overflow": output.x.abs() > MAX_LOG_RATIO,
        "reward/advantages_mean": batch.advantage,
    }
    if entropy is not None:
        values["policy/entropy_avg"] = entropy.detach()
    if output.penalty is not None:
        values["objective/kl_avg"] = output.penalty
    elif batch.token_penalty is not None:
        values["objective/kl_avg"] = batch.token_penalty / objective.beta
    if batch.teacher_logp is not None and batch.old_logp is not None:
        values["objective/teacher_kl"] = -teacher_gap(batch)
        values["objective/teacher_floored"] = batch.teacher_logp < LEAST_LOGP
    if output.kept is not None:
        values["policy/off_policy_dropped"] = ~output.kept
    meter.means(values, batch.mask)
    meter.extremes("reward/advantages", batch.advantage, batch.mask)
    if batch.old_logp is None:  # then the loss computed the corrections too
        observe_correction(meter, replace(batch, correction=output.correction))
    _observe_ratio(meter, objective, batch, output)


def _observe_ratio(meter: Meter, objective: Objective, batch: Batch, output: PolicyLoss) -> None:
    gain, votes = output.gain, batch.mask
    # A token without a policy gradient has nothing that a clip could remove.
    clippable = votes if batch.selected is None else votes & batch.selected
    flags = {"policy/clipfrac_low": gain.clipped_low, "policy/clipfrac_high": gain.clipped_high}
    if gain.clipped_dual is not None:
        flags["policy/clipfrac_dual"] = gain.clipped_dual
    values = {name: flag.double() for name, flag in flags.items()}
    log_ratio = output.log_ratio.double()
    if objective.per_sequence:
        values = {name: row_mean(value, clippable) for name, value in values.items()}
        log_ratio = row_mean(log_ratio, votes)
        votes, clippable = (mask.any(dim=1, keepdim=True) for mask in (votes, clippable))
    ratio = log_ratio.exp()
    values["policy/clipfrac_avg"] = values["policy/clipfrac_low"] + values["policy/clipfrac_high"]
    meter.means(values, clippable)
    meter.means({"val/ratio": ratio, "ratio_square": ratio.square()}, votes)
    meter.extremes("val/ratio", ratio, votes)


def observe_reference(meter: Meter, batch: Batch, logp: torch.Tensor) -> None:
    """If there is a reference, record each rollout's KL to the reference, summed over tokens.

    `logp` are the log-probs under the policy that sampled the tokens. The mean of logp - ref_logp
    then estimates KL(that policy, reference), which is not negative. With the log-probs of the
    current policy, it would estimate -KL(reference, current policy) as long as the reference itself
    has sampled the tokens.
    """
    if batch.ref_logp is None:
        return
    rollouts = joined(batch)
    mask = rollouts.batch.mask
    gap = rollouts.join(bounded(difference(logp.detach(), batch.ref_logp, batch.mask).double()))
    values = {
        "objective/kl": gap,
        "objective/kl2": gap.square() / 2,
        "objective/kl3": torch.expm1(-gap) + gap,
    }
    sums = {name: row_sum(value, mask) for name, value in values.items()}
    meter.means(sums, mask.any(dim=1, keepdim=True))


def observe_pairs(meter: Meter, objective: Objective, batch: Batch) -> None:
    """Record the margin of each pair in an optimizer step, if the objective has pairs."""
    if not objective.pairs or batch.marked is None or batch.advantage is None:
        return
    rollouts = joined(batch)
    margin, advantage, mask = (
        rollouts.join(values) for values in (batch.marked, batch.advantage, batch.mask)
    )
    # Each pair counts once, by the row of its chosen completion.
    margin, chosen = row_mean(margin.nan_to_num(nan=0.0), mask), (advantage > 0) & mask
    votes = (chosen & ~rollouts.join(batch.marked).isnan()).any(dim=1, keepdim=True)
    values = {"pairs/margin": margin, "pairs/accuracy": (margin > 0).double()}
    meter.means(values, votes)


def observe_values(meter: Meter, batch: Batch, output: CriticLoss) -> None:
    """Record the metrics of the critic's loss on a micro-batch."""
    assert batch.values is not None
    assert batch.targets is not None
    values = {
        "critic/clipfrac": output.tokens.clipped,
        "critic/value_mean": batch.values,
        "critic/target_mean": batch.targets,
    }
    meter.means(values, batch.mask)


def observe_sampler(meter: Meter, batch: Batch, logp: torch.Tensor) -> None:
    """Record how engine and trainer log-probs differ before a step's first optimizer step."""
    mask = batch.mask
    gap = difference(logp.detach(), batch.sampler_logp, mask).double()
    log_rho = bounded(gap)
    rho = log_rho.exp()
    values = {
        "debug/sampler_logp_diff_mean": gap.abs(),
        "debug/sampler_kl": -log_rho,
        "debug/sampler_k3": torch.expm1(log_rho) - log_rho,
        "debug/rho_mean": rho,
        "rho_square": rho.square(),
    }
    if batch.kept is not None:
        values["debug/kept_tokens"] = torch.from_numpy(batch.kept.counts).to(gap)
    meter.means(values, mask)
    meter.extremes("debug/sampler_logp_diff", gap.abs(), mask)
    meter.extremes("debug/rho", rho, mask)
    completions = mask.any(dim=1, keepdim=True)
    perplexity = bounded(row_mean(-gap, mask)).exp()
    meter.means({"debug/sampler_ppl_ratio": perplexity}, completions)


def observe_correction(meter: Meter, batch: Batch) -> None:
    """Record the correction factor of each token, if the batch has correction factors."""
    if batch.correction is None:
        return
    correction = batch.correction.double()
    values = {
        "policy/correction_mean": correction,
        "correction_square": correction.square(),
        "policy/correction_dropped": correction == 0,
    }
    meter.means(values, batch.mask)


def summary(measured: Measured) -> dict[str, float]:
    """Return the value of each metric by name; variances are derived from sums of squares."""
    numbers = measured.means()
    if "ratio_square" in numbers:
        # Var r = E r^2 - (E r)^2, from sums that add up over micro-batches.
        variance = numbers.pop("ratio_square") - numbers["val/ratio"] ** 2
        numbers["val/ratio_var"] = max(0.0, variance)
    if "rho_square" in numbers:
        numbers["debug/sampler_chi2"] = numbers.pop("rho_square") - 1.0
    if "correction_square" in numbers:
        square, mean = numbers.pop("correction_square"), numbers["policy/correction_mean"]
        numbers["policy/correction_ess"] = mean**2 / square if square else 0.0
    numbers.pop("debug/sampler_logp_diff_min", None)
    return numbers
