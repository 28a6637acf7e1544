"""The section [train] of the configuration: how long a run is, and its optimizer steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from covey.config.section import Count, Names, Positive, Section


class StopAfter(Section):
    """[train.stop_after]: at most one of these."""

    steps: Count = 0
    """Training steps."""
    tokens: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Sampled tokens."""
    updates: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Optimizer steps."""
    epochs: Annotated[float, Field(ge=0, le=10**6)] = 0.0
    """Passes over the training prompts; `train.steps` follows from the data."""

    @property
    def kind(self) -> Literal["steps", "tokens", "updates"]:
        """The limit that is set; steps if none is."""
        return "tokens" if self.tokens else "updates" if self.updates else "steps"

    @model_validator(mode="after")
    def _one(self) -> StopAfter:
        if sum(value > 0 for value in (self.steps, self.tokens, self.updates, self.epochs)) > 1:
            raise ValueError("train.stop_after takes one of steps, tokens, updates and epochs")
        return self


class Train(Section):
    """[train]"""

    steps: Positive = 100
    """Training steps."""
    stop_after: StopAfter = StopAfter()
    """Stop after {tokens = n} sampled tokens, {updates = n} optimizer steps or {epochs = n} passes
    over the training prompts; {steps = n} is the same as `steps`. Learning rate and evaluations
    follow the share that is used up, as if it took `steps` steps."""
    mini_batches: Positive = 1
    """Optimizer steps per epoch of a step."""
    epochs: Positive = 1
    """Passes over the completions of a step."""
    micro_batch_tokens: Positive = 16_384
    """Padded tokens in one forward and backward pass."""
    logits_megabytes: Annotated[float, Field(gt=0)] = 256.0
    """Memory for logits, which are computed for some tokens at a time."""
    old_logp: Literal["auto", "recompute", "sampler"] = "auto"
    """Source of old_logp when a step has several optimizer steps; auto: the engine if it shares the
    trainer's float32 weights and samples from all tokens."""
    graphs: Literal["auto", "off"] = "auto"
    """On a GPU, use CUDA graphs for forward and backward passes if the model allows it: faster for
    small models, but activations stay in memory between steps."""

    stop_on: Names = Field(default_factory=list)
    """Health findings that end the run, such as nan or collapse; docs/health.md lists them."""
    patience: Count = 0
    """End the run after this many measurements of save.best without a new best; 0: never."""

    @model_validator(mode="before")
    @classmethod
    def _steps(cls, data: Any) -> Any:
        """Take `stop_after = {steps = n}` for `steps = n`."""
        if not isinstance(data, dict):
            return data
        stop = data.get("stop_after")
        if not isinstance(stop, dict) or not stop.get("steps"):
            return data
        others = {k: v for k, v in stop.items() if k != "steps"}
        return {**data, "steps": stop["steps"], "stop_after": others}

    def over_prompts(self, prompts: int, per_step: int) -> Train:
        """Return the settings with the number of steps that `stop_after.epochs` needs, if set.

        A step lies within one epoch, so prompts that do not fill a last step are left out of it.
        """
        if not self.stop_after.epochs:
            return self
        steps = max(1, round(self.stop_after.epochs * (prompts // per_step)))
        return self.model_copy(update={"steps": steps})

    @property
    def budget(self) -> Literal["steps", "tokens", "updates"]:
        """Unit of the limit that ends the run."""
        return self.stop_after.kind

    @property
    def amount(self) -> int:
        """The limit, in that unit."""
        return self.steps if self.budget == "steps" else getattr(self.stop_after, self.budget)

    @property
    def updates(self) -> int:
        """Optimizer steps per training step."""
        return self.mini_batches * self.epochs
