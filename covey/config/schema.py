"""The configuration: plain data, one documented line a field.

Sections `task`, `reward` and `objective` name a function and carry its options; the options are
checked against the function itself when a run is assembled, so that a task's or an algorithm's
settings are written down in one place only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MOST = 10**9
"""No number of steps, prompts or tokens is beyond this; more is a slip of the hand."""
MOST_COMPLETIONS = 10**7
"""Completions of one step. Each is kept until the step is learned from."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(gt=0, le=1)]
Names = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
"""Several names; a single one may go without brackets."""


class Section(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Named(Section):
    """A table that names a function; every other key is one of its options."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The keys that are not `name`."""
        return dict(self.model_extra or {})


class Model(Section):
    """[model]"""

    path: Annotated[str, Field(min_length=1)] = Field(
        "embedded", description="A folder, a hub name, a GGUF file, 'smollm2' or 'embedded'."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Compute type; auto is bfloat16 on a GPU and float32 elsewhere."
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,4})?)$")] = Field(
        "auto", description="cpu, cuda, cuda:1, or auto."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: slower, less memory."
    )
    deterministic: bool = Field(
        False,
        description="On a GPU, give the same bits every time: slower. A CPU always does.",
    )
    template: str = Field(
        "auto",
        description="How questions are put: chat, plain, a text with {question} and perhaps "
        "{system}; auto is the tokenizer's chat template, or plain if it has none.",
    )
    chat_options: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="What the chat template is told beside the messages, as in "
        "{enable_thinking = false}.",
    )
    prefill: str = Field(
        "", description="How every answer begins. Part of the prompt: it is not trained."
    )
    prefill_in_text: bool = Field(
        True, description="Judge and record answers with the prefill in front of them."
    )


class Adapter(Section):
    """[adapter]"""

    rank: Annotated[int, Field(ge=0, le=2**16)] = Field(
        0, description="Train a LoRA adapter of this rank instead of the weights; 0: none."
    )
    alpha: Positive = Field(32, description="The adapter counts alpha / rank times.")
    targets: Names = Field(
        ["all-linear"],
        description="Linear layers to adapt, such as q_proj; 'all-linear' is all but the head.",
    )
    also_train: Names = Field(
        [], description="Modules to train in full beside the adapter, such as lm_head."
    )


class Task(Named):
    """[task]"""

    name: str = Field("arithmetic", description="A task; `covey train --help` lists them.")


class Reward(Named):
    """[reward]"""

    name: str = Field("think_answer", description="A reward.")


class LengthPenalty(Named):
    """[length_penalty]"""

    name: str = Field("none", description="A punishment of long answers, added to rewards.")


class Objective(Named):
    """[objective]"""

    name: str = Field(
        "grpo",
        description="An algorithm, a dotted path to one, or 'composed', which is understood when "
        "pieces are named instead.",
    )

    @model_validator(mode="before")
    @classmethod
    def _composed(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        pieces = sorted({"advantage", "ratio", "surrogate", "weights"} & data.keys())
        if not pieces:
            return data
        name = str(data.get("name", "composed"))
        if name != "composed" and "." not in name and ":" not in name:
            what = f"objective.{pieces[0]} needs objective.name = 'composed'"
            raise ValueError(f"{what}; {name!r} has pieces of its own")
        return {"name": name, **data}


class Reference(Section):
    """[reference]. Settings that the kind does not have are refused when a run is assembled."""

    kind: Literal["frozen", "offloaded", "adapter_off", "moving", "renewed", "server"] = Field(
        "frozen",
        description="What the KL penalty is taken against: the starting weights (frozen beside the "
        "policy, offloaded to main memory, or under the adapter), weights that follow the policy "
        "(moving, renewed), or a server. Without a penalty nothing is loaded.",
    )
    alpha: Share = Field(
        0.6, description="moving: reference = alpha * policy + (1 - alpha) * reference."
    )
    every: Positive = Field(
        100, description="moving, renewed: optimizer steps from one move to the next."
    )
    url: str = Field("", description="server: such as http://127.0.0.1:8500.")
    token_env: str = Field(
        "", description="server: NAME of the environment variable that holds the bearer token."
    )
    timeout: Annotated[float, Field(gt=0)] = Field(
        120.0, description="server: seconds without a sign from it, for one try."
    )
    patience: Annotated[float, Field(ge=0)] = Field(
        300.0, description="server: seconds of trying again while it is away."
    )
    fingerprint: str = Field(
        "", description="server: digest that its weights must have; empty: any, always the same."
    )


class Rollout(Section):
    """[rollout]"""

    prompts_per_step: Annotated[int, Field(ge=1, le=10**6)] = Field(
        16, description="Prompts in a training step."
    )
    group_size: Annotated[int, Field(ge=2, le=10**5)] = Field(
        8, description="Completions of each prompt. One alone has nothing to be compared with."
    )
    max_tokens: Annotated[int, Field(ge=1, le=10**7)] = Field(64, description="The longest answer.")
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="Sampling temperature.")
    top_k: Count = Field(0, description="Keep the k likeliest tokens; 0 keeps all.")
    top_p: Share = Field(1.0, description="Keep the likeliest tokens up to this mass.")
    min_p: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Keep tokens at least this likely relative to the likeliest."
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        [], description="Texts that end an answer, or special tokens such as <|im_end|>."
    )


class Engine(Section):
    """[engine]"""

    max_concurrent: Annotated[int, Field(ge=1, le=10**6)] = Field(
        256, description="Completions generated at the same time."
    )


class Scoring(Section):
    """[scoring]"""

    workers: Annotated[int, Field(ge=0, le=4096)] = Field(
        0,
        description="Processes for rewards that may take long; 0: one a core. Quick rewards need "
        "none.",
    )
    timeout: Annotated[float, Field(gt=0)] = Field(
        30.0, description="Seconds for one answer. Then its process is killed, and it is unscored."
    )
    gigabytes: Annotated[float, Field(ge=0.25, le=1e6)] = Field(
        8.0, description="The most memory that a scoring process may take."
    )
    max_unscored: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="Stop the run when more than this share of a step cannot be scored."
    )


class Filter(Section):
    """[filter]"""

    dynamic_sampling: bool = Field(
        False, description="Learn only from groups that are neither all right nor all wrong."
    )
    max_rounds: Positive = Field(
        4, description="With dynamic: sample at most so often to fill a step."
    )
    mask_truncated: bool = Field(
        False, description="Train no token of answers that were cut off; statistics keep them."
    )
    skip_zero_gradient: bool = Field(
        False,
        description="No forward pass for answers without advantage: the same gradient, sooner, but "
        "metrics over tokens are then of the others only.",
    )


class Overlap(Section):
    """[overlap]"""

    max_staleness: Count = Field(
        0,
        description="Drop groups generated more than this many optimizer steps ago; 0: keep all.",
    )


class Optimizer(Section):
    """[optimizer]"""

    learning_rate: Annotated[float, Field(ge=0)] = Field(1e-6, description="Peak rate of AdamW.")
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(1.0, description="Clip the norm to this.")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = Field(0, description="Optimizer steps of linear warm-up.")
    state: Literal["float32", "compact"] = Field(
        "float32",
        description="How moments and, beside weights in bfloat16, masters are kept; compact: "
        "moments in bfloat16 with stochastic rounding, and of masters the lower half only.",
    )


class StopAfter(Section):
    """[train.stop_after]: at most one of them."""

    steps: Count = Field(0, description="Training steps.")
    tokens: Annotated[int, Field(ge=0, le=10**15)] = Field(0, description="Sampled tokens.")
    updates: Annotated[int, Field(ge=0, le=10**15)] = Field(0, description="Optimizer steps.")

    @property
    def kind(self) -> Literal["steps", "tokens", "updates"]:
        """Which of them is given; steps if none is."""
        return "tokens" if self.tokens else "updates" if self.updates else "steps"

    @model_validator(mode="after")
    def _one(self) -> StopAfter:
        if (self.steps > 0) + (self.tokens > 0) + (self.updates > 0) > 1:
            raise ValueError("train.stop_after takes one of steps, tokens and updates")
        return self


class Train(Section):
    """[train]"""

    steps: Positive = Field(100, description="Steps: rollout batches collected and learned from.")
    stop_after: StopAfter = Field(
        StopAfter(),
        description="End at the first step that reaches {tokens = n} sampled tokens or "
        "{updates = n} optimizer steps; {steps = n} is the same as `steps`. Schedules and "
        "evaluations then follow the share that is spent, as if the whole were `steps` steps.",
    )
    mini_batches: Positive = Field(1, description="Optimizer steps in one pass over a batch.")
    epochs: Positive = Field(1, description="Passes over each rollout batch.")
    micro_batch_tokens: Positive = Field(
        16_384, description="Tokens, padded, in one forward and backward pass."
    )
    logits_megabytes: Annotated[float, Field(gt=0)] = Field(
        256.0, description="Memory for logits, which exist for a chunk of tokens at a time."
    )
    old_logp: Literal["auto", "recompute", "sampler"] = Field(
        "auto",
        description="Source of old_logp when a batch has several optimizer steps; auto: from the "
        "sampler if it shares the trainer's float32 weights and truncates nothing.",
    )
    graphs: Literal["auto", "off"] = Field(
        "auto",
        description="On a GPU, record forward and backward passes as CUDA graphs where the model "
        "allows it: faster for small models, but activations stay in memory between steps.",
    )

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

    @property
    def budget(self) -> Literal["steps", "tokens", "updates"]:
        """What ends the run."""
        return self.stop_after.kind

    @property
    def amount(self) -> int:
        """How many of them."""
        return self.steps if self.budget == "steps" else getattr(self.stop_after, self.budget)

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.mini_batches * self.epochs


class Sft(Section):
    """[sft]"""

    steps: Count = Field(0, description="Optimizer steps; 0: as many as `epochs` takes.")
    epochs: Positive = Field(1, description="Passes over all solutions, where steps is 0.")
    solutions: Positive = Field(32, description="Solutions learned from in an optimizer step.")
    learning_rate: Annotated[float, Field(ge=0)] = Field(1e-5, description="Peak rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup_steps: Count = Field(0, description="Optimizer steps of linear warm-up.")
    max_tokens: Count = Field(
        0,
        description="Leave out longer solutions; 0: those longer than rollout.max_tokens, which "
        "could never be sampled.",
    )
    template: str = Field(
        "<think>{worked}</think><answer>{answer}</answer>",
        description="A solution as the reward wants it, with {worked}, {solution} and {answer}.",
    )
    file: str = Field(
        "", description="JSON Lines of question and completion, instead of the task's solutions."
    )
    evaluate_every: Count = Field(
        50, description="Evaluate every so many steps, first and last as well; 0: never."
    )


class Evaluate(Section):
    """[evaluate]"""

    every: Count = Field(
        20, description="Evaluate every so many steps, first and last as well; 0: never."
    )
    prompts: Count = Field(0, description="Held-out prompts to use; 0: all.")
    samples: Annotated[int, Field(ge=0, le=10**5)] = Field(
        0, description="Sampled answers a prompt for mean@k and pass@k; 0: greedy only."
    )
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="For those samples.")


class Save(Section):
    """[save]"""

    every: Count = Field(
        50, description="Save every so many steps, and the last; 0: only the last."
    )
    keep: Positive = Field(2, description="Checkpoints kept, newest first.")
    rollouts: bool = Field(True, description="Write every rollout to the run folder.")
    samples_every: Count = Field(
        100,
        description="Every so many steps write a page with the highest and lowest answers; "
        "0: never.",
    )
    samples_shown: Positive = Field(20, description="Of each.")


class Config(Section):
    """Everything that decides what a run does."""

    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    model: Model = Model()
    adapter: Adapter = Adapter()
    task: Task = Task()
    reward: Reward = Reward()
    length_penalty: LengthPenalty = LengthPenalty()
    objective: Objective = Objective()
    reference: Reference = Reference()
    rollout: Rollout = Rollout()
    scoring: Scoring = Scoring()
    engine: Engine = Engine()
    filter: Filter = Filter()
    overlap: Overlap = Overlap()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    sft: Sft = Sft()
    evaluate: Evaluate = Evaluate()
    save: Save = Save()

    @property
    def records_passes(self) -> bool:
        """Whether training passes may be CUDA graphs: those of a resumed run would be others."""
        return self.train.graphs == "auto" and not self.model.deterministic

    @model_validator(mode="after")
    def _enough_rows(self) -> Config:
        rows = self.rollout.prompts_per_step * self.rollout.group_size
        if rows > MOST_COMPLETIONS:
            raise ValueError(
                f"rollout.prompts_per_step = {self.rollout.prompts_per_step} times "
                f"rollout.group_size = {self.rollout.group_size} are {rows} completions a step; "
                f"at most {MOST_COMPLETIONS} fit"
            )
        if self.train.mini_batches > rows:
            raise ValueError(
                f"train.mini_batches = {self.train.mini_batches} exceeds the {rows} completions "
                "of a step"
            )
        return self
