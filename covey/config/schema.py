"""The configuration schema: one class per section, one documented line per setting.

The sections `task`, `reward`, `length_penalty` and `objective` name a function and contain its
options. The options are checked against the function's signature when a run is assembled.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from covey.config.cluster_sections import Cluster, Parallel
from covey.config.critic import Critic, Preferences
from covey.config.data_sections import Curriculum, Replay
from covey.config.engine import Engine
from covey.config.environment import Environment
from covey.config.reward_change import RewardChange
from covey.config.section import Count, Device, Names, Positive, Section, Share
from covey.config.section import Named as Named
from covey.config.teacher import Teacher
from covey.config.train import Train

MOST_COMPLETIONS = 10**7
"""Maximum number of completions in a step; all stay in memory until the step ends."""


class Model(Section):
    """[model]"""

    path: Annotated[str, Field(min_length=1)] = "embedded"
    """The model: a folder, a Hugging Face Hub name, a GGUF file, 'smollm2' or 'embedded'."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto: bfloat16 on a GPU, float32 on a CPU."""
    device: Device = "auto"
    """Device of the model: cpu, cuda, cuda:1, or auto."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, less memory."""
    offload_activations: bool = False
    """With gradient_checkpointing on a GPU, keep the inputs of layers in main memory; useful for
    long sequences."""
    deterministic: bool = False
    """Make results on a GPU bitwise reproducible, which is slower. Results on a CPU are always
    reproducible."""
    template: str = "auto"
    """How prompts are rendered: chat, plain, or a text with {question} and optionally {system}.
    With auto, prompts use the tokenizer's chat template, or plain if the tokenizer has no chat
    template."""
    chat_options: dict[str, bool | int | float | str] = Field(default={})
    """Arguments of the chat template, as in {enable_thinking = false}."""
    prefill: str = ""
    """Text that every completion starts with. The prefill belongs to the prompt, so it is not
    trained."""
    prefill_in_text: bool = True
    """Include the prefill text in the completions that are scored and recorded."""


class Adapter(Section):
    """[adapter]"""

    rank: Annotated[int, Field(ge=0, le=2**16)] = 0
    """Train a LoRA adapter of this rank instead of the weights; 0: no adapter."""
    alpha: Positive = 32
    """The adapter is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter's inputs in training passes; generation uses no dropout."""
    load_in_4bit: bool = False
    """Keep the frozen weights in 4 bits (NF4); needs bitsandbytes."""
    targets: Names = Field(default=["all-linear"])
    """Linear layers to adapt, such as q_proj; 'all-linear': all linear layers except the head."""
    also_train: Names = Field(default=[])
    """Modules to train in full, such as lm_head."""


class Task(Named):
    """[task]"""

    name: str = "arithmetic"
    """Name of a task, or MODULE:FUNCTION for your own task."""


class Reward(Named):
    """[reward]"""

    name: str = "think_answer"
    """Name of a reward from `covey rewards list`, or MODULE:FUNCTION for your own reward."""


class EvaluationReward(Named):
    """[evaluate.reward]"""

    name: str = ""
    """Name of the reward for evaluations; empty: the training reward in [reward]."""


class LengthPenalty(Named):
    """[length_penalty]"""

    name: str = "none"
    """Name of a penalty for long completions, which is added to rewards."""


class Objective(Named):
    """[objective]"""

    name: str = "grpo"
    """Name of an algorithm, MODULE:FUNCTION, or 'composed' for an objective made of pieces.
    The default is 'composed' if the section names a piece, and 'grpo' otherwise."""

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
            raise ValueError(f"{what}; the pieces of {name!r} are fixed")
        return {"name": name, **data}


class Reference(Section):
    """[reference]. Settings that the chosen kind of reference does not use are rejected."""

    kind: Literal["frozen", "offloaded", "adapter_off", "moving", "renewed", "server"] = "frozen"
    """Kind of the reference policy for the KL penalty: a copy of the initial weights (frozen), a
    copy in main memory (offloaded), the model without its adapter (adapter_off), weights that
    follow the policy (moving, renewed), or a server. The reference is loaded only if there is a KL
    penalty."""
    alpha: Share = 0.6
    """Weight of the policy in an update of a moving reference: reference = alpha * policy +
    (1 - alpha) * reference."""
    every: Positive = 100
    """Optimizer steps between updates of a moving or renewed reference."""
    url: str = ""
    """Address of the reference server, such as http://127.0.0.1:8500."""
    token_env: str = ""
    """Name of the environment variable with the bearer token of the reference server."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Timeout of a request to the reference server, in seconds."""
    patience: Annotated[float, Field(ge=0)] = 300.0
    """Seconds to retry while the reference server cannot be reached."""
    fingerprint: str = ""
    """Required digest of the reference server's weights; empty: the digest of its first reply."""


class Rollout(Section):
    """[rollout]"""

    prompts_per_step: Annotated[int, Field(ge=1, le=10**6)] = 16
    """Prompts in a training step."""
    group_size: Annotated[int, Field(ge=1, le=10**5)] = 8
    """Completions sampled per prompt. A group size of 1 works only with objectives that compare no
    completions, such as opd."""
    max_tokens: Annotated[int, Field(ge=1, le=10**7)] = 64
    """Maximum number of tokens in a completion."""
    max_prompt_tokens: Count = 0
    """Maximum number of tokens in a prompt; 0: the model's context minus max_tokens."""
    long_prompts: Literal["error", "skip", "truncate"] = "error"
    """What to do with prompts that are too long: stop before training (error), leave these prompts
    out (skip), or cut off their first tokens (truncate)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""
    top_k: Count = 0
    """Sample from the k likeliest tokens; 0: from all tokens."""
    top_p: Share = 1.0
    """Sample from the likeliest tokens whose total probability reaches this value."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens whose probability is below this fraction of the likeliest token's probability."""
    mask_replay: bool = False
    """Compute training log-probs over the tokens that top_k, top_p and min_p kept, so that training
    and sampling use the same distribution."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Texts or special tokens, such as <|im_end|>, that end a completion."""


class Scoring(Section):
    """[scoring]"""

    workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """Worker processes for slow rewards; 0: one per core. Quick rewards need no worker process."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Time limit for scoring one completion, in seconds. A completion whose scoring takes longer
    counts as unscored."""
    gigabytes: Annotated[float, Field(ge=0.25, le=1e6)] = 8.0
    """Memory limit of a worker process."""
    max_unscored: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Stop the run if more than this fraction of a step's completions cannot be scored."""
    none_rewards: Literal["error", "skip"] = "error"
    """What to do if a reward function returns None. With error, the completion counts as unscored.
    With skip, only the other reward functions count, as in TRL, and a completion without any reward
    is not trained on."""


class Filter(Section):
    """[filter]"""

    dynamic_sampling: bool = False
    """Train only on groups that are neither all correct nor all wrong."""
    max_rounds: Positive = 4
    """Maximum number of sampling rounds in which dynamic_sampling fills a step."""
    drop_flat: bool = False
    """Train only on groups whose rewards are not all equal; dropped groups are not replaced."""
    mask_truncated: bool = False
    """Do not train on truncated completions; group statistics still include them."""
    skip_zero_gradient: bool = False
    """Skip completions with advantage 0. Gradients do not change, but token metrics leave out the
    skipped completions."""


class Overlap(Section):
    """[overlap]"""

    staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of training steps by which generation may be ahead of training; 0: each step
    generates, then trains."""
    mode: Literal["ahead", "copy"] = "ahead"
    """How generation runs ahead of training. ahead: one call generates for staleness + 1 steps,
    with the trainer's weights; copy: an engine with a copy of the weights generates while the
    trainer trains."""
    in_flight: bool = False
    """With overlap.mode = "copy", load new weights while completions are generated, which makes
    results depend on timing."""
    max_staleness: Count = 0
    """Drop groups sampled more than this many optimizer steps ago; 0: keep all."""


class Optimizer(Section):
    """[optimizer]"""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate of AdamW."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon, which is added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or decreasing to 0 (linear, cosine)."""
    warmup_steps: Count = 0
    """Optimizer steps of linear learning-rate warm-up."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of all optimizer steps used for warm-up, instead of warmup_steps."""
    state: Literal["float32", "compact"] = "float32"
    """Precision of the optimizer state. float32: float32 moments, and float32 master weights for
    bfloat16 models; compact: bfloat16 moments with stochastic rounding. The compact state has only
    the lower 16 bits of each master weight, because the model's weight has the upper 16 bits."""

    @model_validator(mode="after")
    def _one_warmup(self) -> Optimizer:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give optimizer.warmup_steps or optimizer.warmup_ratio, not both")
        return self


class Sft(Section):
    """[sft]"""

    steps: Count = 0
    """Number of optimizer steps; 0: as many as sft.epochs needs."""
    epochs: Positive = 1
    """Number of passes over all solutions if sft.steps is 0."""
    solutions: Positive = 32
    """Solutions per optimizer step."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning rate after the warm-up: constant, or decreasing to 0 (linear, cosine)."""
    warmup_steps: Count = 0
    """Optimizer steps of linear learning-rate warm-up."""
    max_tokens: Count = 0
    """Leave out solutions with more tokens than this; 0: the limit is rollout.max_tokens."""
    template: str = "<think>{worked}</think><answer>{answer}</answer>"
    """Template for the text of a solution, with the fields {worked}, {solution} and {answer}."""
    file: str = ""
    """JSON Lines file of prompts and completions, to use instead of the task's solutions."""
    evaluate_every: Count = 50
    """Steps between evaluations; 0: no evaluations. The run is also evaluated before the first and
    after the last step."""


class Evaluate(Section):
    """[evaluate]"""

    every: Count = 20
    """Steps between evaluations; 0: no evaluations. The run is also evaluated before the first and
    after the last step."""
    prompts: Count = 0
    """Number of held-out prompts to evaluate; 0: all."""
    samples: Annotated[int, Field(ge=0, le=10**5)] = 0
    """Sampled completions per prompt for mean@k and pass@k; 0: greedy only."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the sampled completions in evaluations."""
    reward: EvaluationReward = EvaluationReward()


class Save(Section):
    """[save]"""

    every: Count = 50
    """Steps between checkpoints; 0: only after the last step."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    best: str = ""
    """Also keep the checkpoint with the best value of this metric. Choose a metric of evaluations,
    such as greedy or pass@4, or a metric of steps, such as objective/scores, which is checked every
    save.every steps."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Whether the highest or the lowest value of the metric save.best is the best."""
    rollouts: bool = True
    """Write every rollout to the run folder."""
    samples_every: Count = 100
    """Steps between pages with the highest-reward and lowest-reward completions; 0: no pages."""
    samples_shown: Positive = 20
    """Number of highest-reward and of lowest-reward completions on a page of samples."""


class Config(Section):
    """All settings of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Seed of prompts, sampling and initial adapter weights."""
    trackers: Names = []
    """Trackers that also get the metrics: tensorboard, wandb, trackio."""
    model: Model = Model()
    adapter: Adapter = Adapter()
    task: Task = Task()
    reward: Reward = Reward()
    reward_change: RewardChange = RewardChange()
    length_penalty: LengthPenalty = LengthPenalty()
    objective: Objective = Objective()
    reference: Reference = Reference()
    teacher: Teacher = Teacher()
    critic: Critic = Critic()
    preferences: Preferences = Preferences()
    rollout: Rollout = Rollout()
    environment: Environment = Environment()
    scoring: Scoring = Scoring()
    engine: Engine = Engine()
    cluster: Cluster = Cluster()
    filter: Filter = Filter()
    curriculum: Curriculum = Curriculum()
    replay: Replay = Replay()
    overlap: Overlap = Overlap()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    parallel: Parallel = Parallel()
    sft: Sft = Sft()
    evaluate: Evaluate = Evaluate()
    save: Save = Save()

    @property
    def stale(self) -> bool:
        """Whether steps may train on rollouts that older weights generated."""
        return self.overlap.staleness > 0 or self.replay.groups > 0

    @property
    def records_passes(self) -> bool:
        """Whether training may use CUDA graphs. A resumed run captures new graphs, so its
        results may differ by rounding.
        """
        return self.train.graphs == "auto" and not self.model.deterministic

    @model_validator(mode="after")
    def _enough_rows(self) -> Config:
        rows = self.rollout.prompts_per_step * self.rollout.group_size
        if rows > MOST_COMPLETIONS:
            raise ValueError(
                f"rollout.prompts_per_step = {self.rollout.prompts_per_step} times "
                f"rollout.group_size = {self.rollout.group_size} are {rows} completions per step; "
                f"the maximum is {MOST_COMPLETIONS}"
            )
        if self.train.mini_batches > rows:
            raise ValueError(
                f"train.mini_batches = {self.train.mini_batches} exceeds the {rows} completions "
                "of a step"
            )
        return self
