"""The section [train] of the configuration: the length of a run, and its optimizer steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from covey.config.section import Count, Names, Positive, Section


class StopAfter(Section):
    """[train.stop_after]: the limit at which a run ends, in one of four units."""

    steps: Count = 0
    """Training steps."""
    tokens: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Sampled tokens."""
    updates: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Optimizer steps."""
    epochs: Annotated[float, Field(ge=0, le=10**6)] = 0.0
    """Passes over the training prompts; the number of prompts then determines `train.steps`."""

    @property
    def kind(self) -> Literal["steps", "tokens", "updates"]:
        """The unit of the limit; steps if no limit is set."""
        return "tokens" if self.tokens else "updates" if self.updates else "steps"

    @model_validator(mode="after")
    def _one(self) -> StopAfter:
        if sum(value > 0 for value in (self.steps, self.tokens, self.updates, self.epochs)) > 1:
            raise ValueError("train.stop_after takes only one of steps, tokens, updates and epochs")
        return self


class Train(Section):
    """[train]"""

    steps: Positive = 100
    """Training steps."""
    stop_after: StopAfter = StopAfter()
    """Stop after {tokens = n} sampled tokens, {updates = n} optimizer steps or {epochs = n} passes
    over the training prompts; {steps = n} is the same as `steps`. The learning rate and the times
    of evaluations depend on the used fraction of the limit, as if the run had `steps` steps."""
    mini_batches: Positive = 1
    """Mini-batches in one epoch of a training step. Each mini-batch takes one optimizer step."""
    epochs: Positive = 1
    """Epochs: passes over the completions of a training step."""
    micro_batch_tokens: Positive = 16_384
    """Maximum number of padded tokens in one micro-batch (a forward and backward pass)."""
    logits_megabytes: Annotated[float, Field(gt=0)] = 256.0
    """Maximum memory for logits, which are computed for a few tokens at a time."""
    old_logp: Literal["auto", "recompute", "sampler"] = "auto"
    """Source of old_logp: a forward pass of the trainer before the first optimizer step (recompute)
    or the engine (sampler). With auto, the engine is the source if its log-probs are exact
    (float32, no truncation) or if the ratio has to correct for staleness. In all other cases, auto
    chooses the trainer, without an extra forward pass if a training step has one optimizer step."""
    graphs: Literal["auto", "off"] = "auto"
    """On a GPU, use CUDA graphs for forward and backward passes if the model allows it: faster for
    small models, but activations stay in memory between steps."""

    stop_on: Names = Field(default_factory=list)
    """Health findings that end the run, such as nan or collapse; docs/health.md lists them."""
    patience: Count = 0
    """End the run if the metric save.best does not improve in this many measurements; 0: never."""

    @model_validator(mode="before")
    @classmethod
    def _steps(cls, data: Any) -> Any:
        """Treat `stop_after = {steps = n}` as `steps = n`."""
        if not isinstance(data, dict):
            return data
        stop = data.get("stop_after")
        if not isinstance(stop, dict) or not stop.get("steps"):
            return data
        others = {k: v for k, v in stop.items() if k != "steps"}
        return {**data, "steps": stop["steps"], "stop_after": others}

    def over_prompts(self, prompts: int, per_step: int) -> Train:
        """Return the settings with the number of steps computed from a given `stop_after.epochs`.

        Every step draws its prompts from one epoch. If the last prompts of an epoch do not fill a
        step, the epoch omits these prompts.
        """
        if not self.stop_after.epochs:
            return self
        steps = max(1, round(self.stop_after.epochs * (prompts // per_step)))
        return self.model_copy(update={"steps": steps})

    @property
    def budget(self) -> Literal["steps", "tokens", "updates"]:
        """The unit of the limit that ends the run."""
        return self.stop_after.kind

    @property
    def amount(self) -> int:
        """The limit that ends the run, in the unit `budget`."""
        return self.steps if self.budget == "steps" else getattr(self.stop_after, self.budget)

    @property
    def updates(self) -> int:
        """The number of optimizer steps per training step."""
        return self.mini_batches * self.epochs

    @property
    def total_updates(self) -> int:
        """The number of optimizer steps of a run.

        With a token budget, it is the number for `train.steps` training steps.
        """
        return self.amount if self.budget == "updates" else self.steps * self.updates
