"""What an update does, in numbers: exact over trained tokens, however a step is split.

Every mean is kept as (sum, count) and divided once at the end, never a mean of means. Where all
tokens of an answer share one ratio, ratio and clip are counted once an answer.
"""

from __future__ import annotations

import torch

from covey.objective.loss import Objective, PolicyLoss
from covey.objective.masked import MAX_LOG_RATIO, bounded, difference, row_mean
from covey.types import Batch


class Meter:
    """Collects (sum, count), largest and smallest by name.

    Numbers stay on the device until they are asked for, so that watching does not make it wait.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[torch.Tensor]] = {}
        self._counts: dict[str, list[torch.Tensor]] = {}
        self._smallest: dict[str, list[torch.Tensor]] = {}
        self._largest: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, value: float | torch.Tensor, count: float | torch.Tensor = 1) -> None:
        """Add `value`, the sum of `count` observations."""
        self._sums.setdefault(name, []).append(torch.as_tensor(value, dtype=torch.float64))
        self._counts.setdefault(name, []).append(torch.as_tensor(count, dtype=torch.float64))

    def mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add one observation for each element in the mask."""
        self.add(name, values.where(mask, 0.0).sum(dtype=torch.float64), mask.sum())

    def extremes(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Note the smallest and the largest of the elements in the mask."""
        if values.numel():
            self._smallest.setdefault(name, []).append(values.where(mask, torch.inf).min())
            self._largest.setdefault(name, []).append(values.where(mask, -torch.inf).max())

    def read(self) -> dict[str, float]:
        """Return means, and extremes as `name_min` and `name_max`, of all that was seen."""
        sums, counts = self._total(self._sums), self._total(self._counts)
        result = {name: sums[name] / count for name, count in counts.items() if count}
        for kept, sign, suffix in ((self._smallest, 1, "min"), (self._largest, -1, "max")):
            for name, values in kept.items():
                extreme = sign * float(torch.stack([sign * v for v in values]).min())
                if abs(extreme) != float("inf"):
                    result[f"{name}_{suffix}"] = extreme
        return result

    @staticmethod
    def _total(parts: dict[str, list[torch.Tensor]]) -> dict[str, float]:
        if not parts:
            return {}
        device = next((v.device for values in parts.values() for v in values if v.is_cuda), None)
        totals = [torch.stack([v.to(device) for v in values]).sum() for values in parts.values()]
        return dict(zip(parts, torch.stack(totals).tolist(), strict=True))


def observe(
    meter: Meter,
    objective: Objective,
    batch: Batch,
    output: PolicyLoss,
    entropy: torch.Tensor | None = None,
) -> None:
    """Count what a micro-batch did to the policy."""
    assert batch.advantage is not None
    mask = batch.mask
    x = bounded(output.x)
    meter.mean("policy/approxkl_k1", -x, mask)
    meter.mean("policy/approxkl_k2", x.square() / 2, mask)
    meter.mean("policy/approxkl_avg", torch.expm1(x) - x, mask)
    meter.mean("policy/ratio_overflow", (output.x.abs() > MAX_LOG_RATIO).float(), mask)
    if entropy is not None:
        meter.mean("policy/entropy_avg", entropy.detach(), mask)
    if output.penalty is not None:
        meter.mean("objective/kl_avg", output.penalty, mask)
    elif batch.token_penalty is not None:
        meter.mean("objective/kl_avg", batch.token_penalty / objective.beta, mask)
    meter.mean("val/advantages_mean", batch.advantage, mask)
    meter.extremes("val/advantages", batch.advantage, mask)
    if output.kept is not None:
        meter.mean("val/off_policy_dropped", (~output.kept).float(), mask)
    _observe_ratio(meter, objective, mask, output)


def _observe_ratio(
    meter: Meter, objective: Objective, mask: torch.Tensor, output: PolicyLoss
) -> None:
    gain, votes = output.gain, mask

    def vote(values: torch.Tensor) -> torch.Tensor:
        return row_mean(values, mask) if objective.per_answer else values

    if objective.per_answer:
        votes = mask.any(dim=1, keepdim=True)
    ratio = vote(output.log_ratio).exp()
    low, high = vote(gain.clipped_low.float()), vote(gain.clipped_high.float())
    meter.mean("policy/clipfrac_low", low, votes)
    meter.mean("policy/clipfrac_high", high, votes)
    meter.mean("policy/clipfrac_avg", low + high, votes)
    if gain.clipped_dual is not None:
        meter.mean("policy/clipfrac_dual", vote(gain.clipped_dual.float()), votes)
    meter.mean("val/ratio", ratio, votes)
    meter.mean("ratio_square", ratio.double().square(), votes)
    meter.extremes("val/ratio", ratio, votes)


def observe_sampler(meter: Meter, batch: Batch, logp: torch.Tensor) -> None:
    """Count how far the sampler's numerics are from the trainer's `logp`, before any update."""
    mask = batch.mask
    gap = difference(logp.detach(), batch.sampler_logp, mask)
    log_rho = bounded(gap)
    rho = log_rho.exp()
    meter.mean("debug/sampler_logp_diff_mean", gap.abs(), mask)
    meter.extremes("debug/sampler_logp_diff", gap.abs(), mask)
    meter.mean("debug/sampler_kl", -log_rho, mask)
    meter.mean("debug/sampler_k3", torch.expm1(log_rho) - log_rho, mask)
    meter.mean("debug/rho_mean", rho, mask)
    meter.extremes("debug/rho", rho, mask)
    meter.mean("rho_square", rho.double().square(), mask)
    answers = mask.any(dim=1, keepdim=True)
    meter.mean("debug/sampler_ppl_ratio", bounded(row_mean(-gap, mask)).exp(), answers)


def observe_correction(meter: Meter, batch: Batch) -> None:
    """Count what the correction does to the tokens of an optimizer step."""
    if batch.correction is None:
        return
    meter.mean("val/correction_mean", batch.correction, batch.mask)
    meter.mean("correction_square", batch.correction.double().square(), batch.mask)
    meter.mean("val/correction_dropped", (batch.correction == 0).float(), batch.mask)


def summary(meter: Meter) -> dict[str, float]:
    """Return every number by its metric's name."""
    numbers = meter.read()
    if "ratio_square" in numbers:
        # Var r = E r^2 - (E r)^2, from sums that add up over micro-batches.
        variance = numbers.pop("ratio_square") - numbers["val/ratio"] ** 2
        numbers["val/ratio_var"] = max(0.0, variance)
    if "rho_square" in numbers:
        numbers["debug/sampler_chi2"] = numbers.pop("rho_square") - 1.0
    if "correction_square" in numbers:
        square = numbers.pop("correction_square")
        share = numbers["val/correction_mean"] ** 2 / square if square else 0.0
        numbers["val/correction_ess"] = share
    numbers.pop("debug/sampler_logp_diff_min", None)
    return numbers
