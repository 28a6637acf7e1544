"""Replays a recorded training step with other algorithms, and compares their gradients.

All algorithms are replayed on the recorded rollouts. Covey computes the gradients of every
algorithm twice: with the policy before the run's training step, which generated the rollouts, and
with the policy after the step. With the policy after the step, importance ratios differ from 1 and
may be clipped. Algorithms differ only in their token gradients, d loss / d logp. A backward pass
turns the token gradients into the gradient of the parameters. Algorithms with proportional token
gradients share a backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from covey.collate import collate
from covey.config import load_config
from covey.config.resolve import objective_of, resolve
from covey.errors import ConfigError
from covey.lab.explain.effect import Effect, whole_effect
from covey.lab.explain.recorded import Origin, Recorded, Trainee, check_trained, relearn
from covey.models.logp import LogProbs
from covey.objective import ALGORITHMS, Objective, find_algorithm
from covey.objective.advantage import zero_variance
from covey.objective.loss import Need
from covey.parallel.passes import micro_batches, whole_batch
from covey.policy.policy import Policy
from covey.records.folder import RunFolder
from covey.run import reference_of, teacher_of
from covey.step import prepare, trained_batch
from covey.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Loss, gradient norm and clip fraction of one algorithm."""

    name: str
    loss: float
    grad_norm: float
    """The norm of the gradient of all parameters, before gradient clipping."""
    clipped: float
    zero_gradient: float
    per_advantage: float
    """The mean weight of a token in the loss, which is
    `sum(|d loss / d logp|) / sum(|advantage|)`."""
    lengths: tuple[LengthBin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The results of all algorithms with the policy from before or after the run's step."""

    updates: int
    """The number of optimizer steps that the policy has already taken in the recorded step."""
    algorithms: tuple[Replayed, ...]
    cosine: tuple[tuple[float | None, ...], ...]
    """The cosine similarity between the parameter gradients of each pair of algorithms, or None if
    one of the two gradients is 0."""
    families: tuple[Family, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The replay of one recorded step with many algorithms."""

    step: int
    run_algorithm: str
    """The run's own algorithm, which is replayed with the run's options. All algorithms other than
    the run's own are replayed with their default options."""
    options: Mapping[str, str]
    """Options that the user set for all algorithms. An algorithm ignores options that it does not
    have."""
    origin: Origin
    rollouts: int
    moments: tuple[Moment, ...]


def objectives(
    run: RunFolder, names: Sequence[str], options: Sequence[str] = ()
) -> dict[str, Objective]:
    """Build the named algorithms, each with the given options (key=value) that it supports."""
    config = load_config(str(run.config_file))
    own = config.objective.name
    every = list(names) == ["all"]
    if every:
        names = [*([] if own in ALGORITHMS else [own]), *ALGORITHMS]
    keys = [option.partition("=")[0].strip() for option in options]
    used: set[str] = set()
    built = {}
    for name in names:
        pieces = config.objective.options if name == own else None
        has = inspect.signature(find_algorithm(name, pieces)).parameters
        given = [f"objective.{o}" for o, key in zip(options, keys, strict=True) if key in has]
        used |= {key for key in keys if key in has}
        changed = load_config(str(run.config_file), [f"objective.name={name}", *given])
        try:
            built[name] = objective_of(resolve(changed))
        except ConfigError:
            if not every or name == own:
                raise  # with "all", algorithms that do not suit this run are skipped instead
    if every and "parts" not in built[own].needs:
        built = {name: o for name, o in built.items() if "parts" not in o.needs}
    if "values" not in objective_of(resolve(config)).needs:
        critics = [name for name, o in built.items() if "values" in o.needs]
        if critics and not every:
            raise ConfigError(
                f"--replay {critics[0]}: this algorithm needs a critic, but the run has no critic; "
                "leave out the algorithm"
            )
        built = {name: o for name, o in built.items() if name not in critics}
    unknown = [key for key in keys if key not in used]
    if unknown:
        names = ", ".join(built)
        raise ConfigError(f"--set {unknown[0]}: none of the algorithms {names} has this option")
    return built


def replay(
    trainee: Trainee,
    recorded: Recorded,
    algorithms: Mapping[str, Objective],
    options: Sequence[str] = (),
) -> Replay:
    """Compute the gradient of each algorithm in a recorded step.

    Compute all gradients with the policy before the step, and again with the policy after the step.
    """
    check_trained(recorded)
    policy, budget = trainee.run.policy, trainee.run.config.train.micro_batch_tokens
    given = dict(option.split("=", 1) for option in options)
    own, beta = trainee.run.config.objective.name, recorded.metrics.get("objective/beta")
    if "beta" not in given and own in algorithms and beta is not None:  # the step's adaptive beta
        algorithms = {**algorithms, own: replace(algorithms[own], beta=beta)}
    base = _base(trainee, recorded, algorithms)
    masks, batches = trainee.run.config.filter.mask_truncated, {}
    for name, objective in algorithms.items():
        old = "sampler_logp" if "sampler_as_old" in objective.needs else "old_logp"
        batch = replace(base, old_logp=getattr(base, old))
        batches[name] = trained_batch(objective, batch, mask_truncated=masks)
    assert base.old_logp is not None
    assert base.entropy is not None
    before = LogProbs(logp=base.old_logp, entropy=base.entropy)
    first = _moment(policy, algorithms, batches, before, budget, updates=0)
    _, watched, _ = relearn(trainee, recorded)
    with torch.no_grad():
        after = whole_batch(base, budget, policy.logp)
    updates = int(watched["number"].max()) + 1
    second = _moment(policy, algorithms, batches, after, budget, updates=updates)
    return Replay(
        step=recorded.step,
        run_algorithm=own,
        options=given,
        origin=trainee.origin,
        rollouts=len(base),
        moments=(first, second),
    )


def _base(trainee: Trainee, recorded: Recorded, algorithms: Mapping[str, Objective]) -> Batch:
    model, reference = trainee.run.policy.model, trainee.run.reference
    penalized = next((o for o in algorithms.values() if "reference" in o.needs), None)
    if penalized is not None and reference is None:
        reference = reference_of(trainee.run.config, model, penalized)
    taught = next((o for o in algorithms.values() if "teacher" in o.needs), None)
    teacher = trainee.run.teacher
    if taught is not None and teacher is None:
        teacher = teacher_of(trainee.run.config, model, taught)
    some = penalized or next(iter(algorithms.values()))
    reads: set[Need] = {"old_entropy"}
    if taught is not None:
        reads |= taught.needs & {"teacher", "privileged", "old_logp"}
    if any("values" in o.needs for o in algorithms.values()):
        reads.add("values")
    objective = replace(some, reads=(some.reads | reads) - {"sampler_as_old"})
    run = replace(trainee.run, objective=objective, reference=reference, teacher=teacher)
    parts = next((o.parts for o in algorithms.values() if "parts" in o.needs), None)
    return prepare(run, collate(recorded.groups, model.device, parts))


def _moment(
    policy: Policy,
    algorithms: Mapping[str, Objective],
    batches: Mapping[str, Batch],
    now: LogProbs,
    budget: int,
    *,
    updates: int,
) -> Moment:
    effects = {name: whole_effect(o, batches[name], now) for name, o in algorithms.items()}
    slopes = {  # for each algorithm, a vector of all gradients of log-probs and entropies
        name: torch.cat([found.gradient.flatten(), found.entropy_gradient.flatten()]).double()
        for name, found in effects.items()
    }
    found = families(slopes)
    leaders = {family.leader: effects[family.leader] for family in found}
    some = next(iter(batches.values()))
    gradients = parameter_gradients(policy, some, leaders, budget)
    factors = {m.name: (f.leader, m.factor) for f in found for m in f.members}
    dots = {
        (a, b): float((x.double() * y.double()).sum())
        for a, x in gradients.items()
        for b, y in gradients.items()
    }

    def dot(a: str, b: str) -> float:
        (lead_a, by_a), (lead_b, by_b) = factors[a], factors[b]
        return dots[lead_a, lead_b] * by_a * by_b

    norms = {name: dot(name, name) ** 0.5 for name in algorithms}

    def cosine(a: str, b: str) -> float | None:
        size = norms[a] * norms[b]
        return max(-1.0, min(1.0, dot(a, b) / size)) if size else None

    return Moment(
        updates=updates,
        algorithms=tuple(
            _replayed(name, batches[name], effects[name], norms[name]) for name in algorithms
        ),
        cosine=tuple(tuple(cosine(a, b) for b in algorithms) for a in algorithms),
        families=found,
    )


def _replayed(name: str, batch: Batch, found: Effect, norm: float) -> Replayed:
    mask = batch.mask
    tokens = max(1, int(mask.sum()))
    silent = mask & (found.gradient == 0) & (found.entropy_gradient == 0)
    assert batch.advantage is not None
    worth = float(batch.advantage.abs()[mask].double().sum())
    return Replayed(
        name=name,
        loss=float(found.loss),
        grad_norm=norm,
        clipped=int((found.clipped != 0).sum()) / tokens,
        zero_gradient=int(silent.sum()) / tokens,
        per_advantage=float(found.gradient.abs().double().sum()) / worth if worth else 0.0,
        lengths=length_bins(batch, found.gradient),
    )


# Families of algorithms with proportional gradients, and the length bias of algorithms.
#
# An algorithm changes a policy only through its token gradients, d loss / d logp. With equal token
# gradients, two algorithms give the same update on a batch. With proportional token gradients, two
# algorithms differ like two learning rates, and Adam and gradient clipping mostly remove even this
# difference.

ROUNDING = 1e-5
"""The largest relative deviation for which token gradients still count as proportional."""
BINS = 4
"""The number of length bins; all bins have about the same number of completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An algorithm in a group of algorithms with proportional token gradients."""

    name: str
    factor: float
    """The ratio of this algorithm's token gradients to the first algorithm's token gradients."""
    identical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Algorithms with proportional token gradients; the first algorithm is called the leader."""

    members: tuple[Member, ...]

    @property
    def leader(self) -> str:
        return self.members[0].name


def multiple(slopes: torch.Tensor, of: torch.Tensor) -> float | None:
    """Return the factor c > 0 with `slopes = c * of` up to rounding, or None if no such c exists.

    Return 1 if `slopes` and `of` are both 0, and None if only one of these vectors is 0.
    """
    largest = float(slopes.abs().max()) if slopes.numel() else 0.0
    square = float(of @ of)
    if largest == 0.0 or square == 0.0:
        return 1.0 if largest == 0.0 and square == 0.0 else None
    factor = float(slopes @ of) / square
    near = bool((slopes - factor * of).abs().max() <= ROUNDING * largest)
    return factor if near and factor > 0.0 else None


def families(slopes: Mapping[str, torch.Tensor]) -> tuple[Family, ...]:
    """Group the algorithms whose token gradients are proportional.

    `slopes` maps the name of each algorithm to its token gradients, a float64 vector.
    """
    found: list[list[Member]] = []
    for name, row in slopes.items():
        for members in found:
            leader = slopes[members[0].name]
            identical = torch.equal(row, leader)
            factor = 1.0 if identical else multiple(row, leader)
            if factor is not None:
                members.append(Member(name=name, factor=factor, identical=identical))
                break
        else:
            found.append([Member(name=name, factor=1.0, identical=True)])
    return tuple(Family(members=tuple(members)) for members in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """The average weight of a token in the loss, for completions of similar length."""

    shortest: int
    longest: int
    completions: int
    gradient: float
    """Mean |d loss / d logp| over the tokens of the completions in this bin."""
    per_advantage: float
    """The mean weight of a token in the loss, which is `sum(|d loss / d logp|) / sum(|advantage|)`,
    or 0 if all advantages are 0."""


def length_bins(batch: Batch, gradient: torch.Tensor) -> tuple[LengthBin, ...]:
    """Sort completions into bins by length, and return the mean weight of a token in each bin."""
    assert batch.advantage is not None
    lengths = batch.mask.sum(dim=1)
    trained = lengths[lengths > 0].sort().values
    places = [len(trained) * n // BINS for n in range(1, BINS + 1)]
    edges = sorted({int(trained[place - 1]) for place in places if place})
    found, low = [], 0
    for edge in edges:
        rows = (lengths > low) & (lengths <= edge)
        mask = batch.mask[rows]
        size = float(gradient[rows].abs()[mask].double().sum())
        worth = float(batch.advantage[rows].abs()[mask].double().sum())
        found.append(
            LengthBin(
                shortest=int(lengths[rows].min()),
                longest=edge,
                completions=int(rows.sum()),
                gradient=size / int(mask.sum()),
                per_advantage=size / worth if worth else 0.0,
            )
        )
        low = edge
    return tuple(found)


# Computes gradients of the parameters from gradients of log-probs and entropies.


def parameter_gradients(
    policy: Policy, batch: Batch, effects: Mapping[str, Effect], budget: int
) -> dict[str, torch.Tensor]:
    """Return the gradient of all trained parameters, as one vector per algorithm in `effects`.

    The algorithms share one forward pass, and each algorithm has its own backward pass. The
    gradients of all algorithms are in memory at the same time.
    """
    # The optimizer collects the gradients, as in training, because some gradients bypass autograd
    # on a GPU.
    optimizer = policy.optimizer
    size = sum(parameter.numel() for parameter in optimizer.parameters.values())
    totals = {name: torch.zeros(size, device=batch.tokens.device) for name in effects}
    policy.model.model.train()
    for rows in _passes(batch, budget):
        width = max(1, int(batch.lengths[rows].max()))
        slopes = {
            name: (e.gradient[rows, :width], e.entropy_gradient[rows, :width])
            for name, e in effects.items()
        }
        nonzero = {name: s for name, s in slopes.items() if any(bool(part.any()) for part in s)}
        if not nonzero:
            continue
        now = policy.plain_logp(batch.rows(rows))
        for name, (by_logp, by_entropy) in nonzero.items():
            outputs, sent = [now.logp], [by_logp.to(now.logp.dtype)]
            if by_entropy.any():
                outputs.append(now.entropy)
                sent.append(by_entropy.to(now.entropy.dtype))
            optimizer.zero_grad()
            torch.autograd.backward(outputs, sent, retain_graph=True)
            gradients = optimizer.gradients()
            parts = [
                torch.zeros_like(p) if (g := gradients[n]) is None else g
                for n, p in optimizer.parameters.items()
            ]
            totals[name] += torch.cat([part.flatten().float() for part in parts])
    optimizer.zero_grad()
    return totals


def _passes(batch: Batch, budget: int) -> Iterator[torch.Tensor]:
    """Split the batch into forward passes, and yield the row indices of each pass.

    A group whose completions all have the same reward never shares a forward pass with a group
    whose rewards differ. Many algorithms skip the passes of equal-reward groups, because these
    groups have no gradient.
    """
    equal = zero_variance(batch.rewards, batch.group)
    for chosen in (~equal, equal):
        rows = chosen.nonzero().squeeze(1)
        if len(rows):
            yield from (rows[part] for part in micro_batches(batch.rows(rows), budget))
