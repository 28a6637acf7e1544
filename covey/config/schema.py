"""The configuration schema, with a class for each section and a field for each setting.

Each of the sections `task`, `reward`, `length_penalty` and `objective` names a function and
contains the function's options. Before a run starts, Covey checks the options of each function
against the function's signature.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MOST = 10**9
"""Upper bound for numbers of steps, prompts and tokens; a larger number is probably a typo."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(gt=0, le=1)]
Names = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
"""A list of names; a single name may be given without brackets."""
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,4})?)$")]


OTHER_RUN = "start a new run with the checkpoint as model.path"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Facts about a setting or a section, beside its type: messages, docs and commands use them."""

    trl: str = ""
    """Its name in TRL."""
    verl: str = ""
    """Its name in verl, without the prefix `actor_rollout_ref`."""
    resume: str = ""
    """Why a resumed run may not change it; empty if it may."""
    smoke_most: float | None = None
    """Its upper limit in runs with --smoke."""
    zero_is_many: bool = False
    """Whether 0 means "all" or "as many as needed", so that --smoke replaces 0 by the limit."""
    smoke: Any = None
    """Its value in runs with --smoke; None leaves it."""


class Section(BaseModel):
    """A section of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Named(Section):
    """A section that selects a function by `name` and contains the function's options."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """The values of the declared fields, without the options of the selected function."""
        return {key: getattr(self, key) for key in type(self).model_fields}

    @property
    def options(self) -> dict[str, Any]:
        """The options of the selected function: all keys that are not declared fields."""
        return dict(self.model_extra or {})


Seconds = Annotated[float, Field(gt=0)]


class Vllm(Section):
    """Settings in [engine.vllm], for `engine.kind = "vllm"`."""

    servers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of vLLM servers to start on this machine."""
    urls: Annotated[
        list[Annotated[str, Field(min_length=1)]], About(trl="vllm_server_base_url")
    ] = []
    """Addresses of running vLLM servers, such as http://127.0.0.1:8000, to use instead of starting
    servers."""
    colocated: bool = False
    """Run vLLM in the trainer's process and on the trainer's GPU, instead of in a server; vLLM
    sleeps during training."""
    memory: Annotated[float, Field(gt=0)] = 0.5
    """Fraction of a GPU's memory that a vLLM server uses; on a CPU, the size of the server's KV
    cache in GiB."""
    tensor_parallel: Positive = 1
    """Number of GPUs per vLLM server."""
    first_gpu: Count = 1
    """Index of the first GPU that vLLM servers use; the trainer uses GPUs with smaller indices."""
    transfer: Literal["file", "nccl"] = "file"
    """How weights are sent to vLLM servers, either `file` (through a file in shared memory or in
    `engine.vllm.folder`) or `nccl` (from GPU to GPU)."""
    folder: str = ""
    """With `transfer = "file"`, the folder that the trainer and the vLLM servers share; empty means
    shared memory."""
    host: str = "127.0.0.1"
    """With `transfer = "nccl"`, the address at which vLLM servers reach this machine."""
    timeout: Seconds = 600.0
    """Seconds to wait for the reply to a request before the vLLM server counts as dead."""
    patience: Seconds = 600.0
    """Seconds to wait for a vLLM server to start or to restart."""
    restarts: Count = 3
    """Maximum number of restarts of a vLLM server in a row; one more failure ends the run. The
    count of restarts starts again when the server returns a completion. Covey restarts only servers
    that it has started. If a server in `engine.vllm.urls` fails, Covey waits until the user
    restarts this server."""
    arguments: list[str] = []
    """Additional arguments for the command that starts vLLM."""


class Cluster(Section):
    """[cluster].

    Settings of Ray actors on this machine or on other machines.
    """

    address: str = ""
    """Address of a Ray cluster; `local` starts Ray on this machine, `auto` finds a running cluster,
    and an empty address means no Ray."""
    trainers: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of trainer ranks that Ray starts; 0 means to train in this process or in torchrun's
    ranks."""
    trainer_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs per trainer rank that Ray starts."""
    engines: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Number of engine actors per trainer rank, each with a copy of the model; 0 means that the
    trainer ranks generate."""
    max_engines: Count = 0
    """Maximum number of engine actors per trainer rank; 0 means `cluster.engines`. Engine actors in
    excess of `cluster.engines` start when the cluster has free resources."""
    engine_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs per engine."""
    engine_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs per engine."""
    trainer_gpus: Count = 0
    """Number of this machine's GPUs that are reserved for the trainer, or the number of GPUs per
    trainer rank if `cluster.trainers` is set."""
    scoring_actors: Count = 0
    """Number of scoring actors, each with `scoring.workers` processes; 0 means that scoring runs on
    the trainer's machine."""
    reference_actor: bool = False
    """Run a frozen reference policy in its own Ray actor, with as many CPUs and GPUs as an engine
    actor."""
    restarts: Count = 3
    """Number of Ray actor failures in a row that the run survives; one more failure ends the run.
    The count of failures starts again when any actor of the same kind returns a result."""
    patience: Seconds = 300.0
    """Seconds to wait until the cluster has free resources for an actor."""

    @property
    def engine_actors(self) -> int:
        """Number of engine actors per trainer rank, which is 0 without Ray."""
        return self.engines if self.address else 0

    @property
    def any_actors(self) -> bool:
        """Whether a trainer rank uses Ray actors."""
        return bool(self.address and (self.engines or self.scoring_actors or self.reference_actor))

    @model_validator(mode="after")
    def _one_gpu_per_rank(self) -> Cluster:
        if self.trainers and self.trainer_gpus > 1:
            raise ValueError(
                f"cluster.trainer_gpus = {self.trainer_gpus} with cluster.trainers = "
                f"{self.trainers}: a rank trains on one GPU; set cluster.trainer_gpus = 1, and "
                "cluster.trainers to the number of GPUs that train"
            )
        return self


class Parallel(Section):
    """[parallel]. Settings of runs with several ranks, which torchrun starts."""

    strategy: Annotated[Literal["ddp", "fsdp"], About(trl="fsdp", verl="actor.strategy")] = "ddp"
    """How the model is distributed over the ranks. With `ddp`, every rank has the whole model. With
    `fsdp` (FSDP2), parameters, gradients and optimizer state are sharded over the ranks."""
    shard_ranks: Count = 0
    """With `strategy = "fsdp"`, the number of ranks that share one copy of the model, such as the
    ranks of one machine; 0 means all ranks."""
    timeout: Annotated[float, Field(gt=0, le=10**6)] = 600.0
    """Seconds that a rank waits for other ranks, at the start and in a step."""


class StopAfter(Section):
    """Settings in [train.stop_after]: the limit at which a run ends, in one of four units."""

    steps: Count = 0
    """Training steps."""
    tokens: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Sampled tokens."""
    updates: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Optimizer steps."""
    epochs: Annotated[float, Field(ge=0, le=10**6)] = 0.0
    """Number of passes over the training prompts, from which Covey computes `train.steps`."""

    @model_validator(mode="after")
    def _one(self) -> StopAfter:
        if sum(value > 0 for value in (self.steps, self.tokens, self.updates, self.epochs)) > 1:
            raise ValueError("train.stop_after takes only one of steps, tokens, updates and epochs")
        return self


class Train(Section):
    """[train]"""

    steps: Annotated[
        Positive, About(trl="max_steps", verl="trainer.total_training_steps", smoke_most=2)
    ] = 100
    """Training steps."""
    stop_after: Annotated[
        StopAfter, About(trl="num_train_epochs", verl="trainer.total_epochs", smoke={})
    ] = StopAfter()
    """The limit at which the run ends, which is `{tokens = n}` for n sampled tokens, `{updates =
    n}` for n optimizer steps, or `{epochs = n}` for n passes over the training prompts. `{steps =
    n}` has the same effect as `train.steps = n`. The learning rate and the evaluations depend on
    the fraction of the limit that the run has used. For example, a run that has used half of its
    limit has the learning rate of step `steps / 2`."""
    mini_batches: Annotated[
        Positive, About(trl="steps_per_generation", verl="actor.ppo_mini_batch_size", smoke_most=2)
    ] = 1
    """Number of mini-batches in one epoch of a training step; each mini-batch takes one optimizer
    step."""
    epochs: Annotated[
        Positive, About(trl="num_iterations", verl="actor.ppo_epochs", smoke_most=2)
    ] = 1
    """Number of passes over the completions of a training step."""
    micro_batch_tokens: Annotated[
        Positive,
        About(
            trl="per_device_train_batch_size",
            verl="actor.ppo_max_token_len_per_gpu",
            smoke_most=2048,
        ),
    ] = 16_384
    """Maximum number of padded tokens in one micro-batch (a forward and backward pass)."""
    logits_megabytes: Annotated[float, Field(gt=0), About(smoke_most=64.0)] = 256.0
    """Maximum memory for logits in MiB; the trainer computes the logits of a few tokens at a
    time."""
    old_logp: Literal["auto", "recompute", "sampler"] = "auto"
    """Source of `old_logp`, the log-probs in the denominator of the ratio. With `recompute`, the
    trainer computes `old_logp` in a forward pass before the first optimizer step. With `sampler`,
    `old_logp` comes from the engine. With `auto`, `old_logp` comes from the engine if the engine's
    log-probs are exact (float32, no truncation) or if the ratio has to correct for staleness, and
    otherwise from the trainer. If a training step has one optimizer step, the trainer needs no
    extra forward pass to compute `old_logp` with `auto`."""
    graphs: Literal["auto", "off"] = "auto"
    """On a GPU, use CUDA graphs for forward and backward passes if the model supports CUDA graphs.
    CUDA graphs make the training of small models faster, but activations stay in memory between
    steps."""

    stop_on: Names = Field(default_factory=list)
    """Names of the health problems that end the run, such as `nan` or `collapse`; docs/health.md
    lists the names."""
    patience: Annotated[Count, About(trl="early_stopping_patience")] = 0
    """End the run after this number of successive measurements without a new best value of the
    metric `save.best`; 0 means never."""

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
        """Return the settings; if `stop_after.epochs` is set, compute `steps` from it.

        All prompts of a step come from the same epoch. An epoch omits its last prompts if they do
        not fill a step.
        """
        if not self.stop_after.epochs:
            return self
        steps = max(1, round(self.stop_after.epochs * (prompts // per_step)))
        return self.model_copy(update={"steps": steps})

    @property
    def budget(self) -> Literal["steps", "tokens", "updates"]:
        """The unit of the limit that ends the run; "steps" if [train.stop_after] sets no limit."""
        stop = self.stop_after
        return "tokens" if stop.tokens else "updates" if stop.updates else "steps"

    @property
    def amount(self) -> int:
        """The limit that ends the run, in the unit that `budget` names."""
        return self.steps if self.budget == "steps" else getattr(self.stop_after, self.budget)

    @property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps per training step."""
        return self.mini_batches * self.epochs

    @property
    def total_optimizer_steps(self) -> int:
        """The planned number of optimizer steps of a run, which a token limit does not change."""
        return self.amount if self.budget == "updates" else self.steps * self.optimizer_steps


CONTEXT = {
    "success": "A correct answer to this question:\n\n{text}",
    "feedback": "Feedback on an earlier, wrong answer to this question:\n\n{text}",
}


class Teacher(Section):
    """[teacher].

    An objective that needs a teacher gets the teacher from `path`, `url` or `policy`.
    """

    path: str = ""
    """The teacher model, in the form of `model.path`, or a LoRA adapter folder. The teacher must
    have the policy's tokenizer."""
    offload: bool = False
    """Keep the teacher's weights in main memory between training steps. Offloading works only with
    `teacher.path` or with `teacher.policy = "frozen"`."""
    url: str = ""
    """Address of the teacher's server, which `covey reference serve` starts, such as
    http://127.0.0.1:8500."""
    token_env: str = ""
    """Name of the environment variable with the bearer token of the teacher's server."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Timeout of a request to the teacher's server, in seconds."""
    patience: Annotated[float, Field(ge=0)] = 300.0
    """Seconds to keep retrying while the teacher's server cannot be reached."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature of a teacher that `teacher.path` or `teacher.url` names, used instead of
    `rollout.temperature`."""
    policy: Literal["", "current", "frozen", "moving"] = ""
    """For `sdpo`, the policy itself is the teacher, and gets privileged text in its prompt, such as
    a correct completion. The teacher's weights are the weights of the current policy (`current`),
    the initial weights (`frozen`), or a moving average of the policy's weights (`moving`)."""
    alpha: Share = 0.05
    """Weight of the policy in the update `teacher = alpha * policy + (1 - alpha) * teacher` of a
    teacher with `policy = "moving"`."""
    every: Positive = 1
    """Optimizer steps between updates of a teacher with `policy = "moving"`."""
    context: dict[str, str] = Field(default=CONTEXT)
    """With `teacher.policy`, a template for each kind of privileged text in the teacher's prompt,
    where `{text}` stands for the privileged text. The kinds of privileged text are `success` (a
    correct completion of the same group), `feedback` (the reward's feedback on the trained
    completion), `target` (the reference answer) and any column of the data."""
    template: str = "{prompt}\n\n{context}\n\nNow answer the question yourself."
    """With `teacher.policy`, the template of the last message in the teacher's prompt, with the
    placeholders `{prompt}` and `{context}`."""


class Environment(Named):
    """[environment]. Keys that are not fields of this class are options of the environment."""

    name: str = "none"
    """The environment that rollouts interact with: a name, `MODULE:CLASS`, or `none`."""
    max_turns: Positive = 8
    """Maximum number of the policy's turns in an episode."""
    max_calls: Count = 16
    """Maximum number of tool calls in an episode."""
    max_tokens: Positive = 2048
    """Maximum number of tokens in a conversation, including the prompt; at most the model's context
    length."""
    call_format: Literal[
        "auto", "hermes", "qwen3_coder", "llama3", "mistral", "glm4", "glm45", "deepseek",
        "gpt_oss", "tags",
    ] = "auto"  # fmt: skip
    """Format of the policy's tool calls; docs/environments.md shows each format. With `auto`, Covey
    uses the format that the chat template describes, or `hermes` if the template does not support
    tools. A run with tools is refused if the template describes another format."""
    parallel_calls: bool = True
    """Whether a turn may have several tool calls, instead of ending after the first call."""
    workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """Number of worker processes for environments; 0 means one per core. Environments with `quick =
    True` need no worker processes."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Time limit of one environment step, in seconds; a step that exceeds the limit ends the
    rollout with an error."""
    gigabytes: Annotated[float, Field(ge=0.25, le=1e6)] = 8.0
    """Memory limit of a worker process, in GiB."""


class Engine(Section):
    """[engine]"""

    kind: Annotated[
        Literal["native", "process", "vllm"], About(trl="use_vllm", verl="rollout.name")
    ] = "native"
    """The engine, which is `native` (in the trainer's process, with the trainer's weights),
    `process` (the native engine in another process, with a copy of the weights), or `vllm` (vLLM
    servers)."""
    vllm: Vllm = Vllm()
    """Settings of `engine.kind = "vllm"`."""
    device: Device = "auto"
    """Device of the engine if `engine.kind = "process"`; `auto` means the trainer's device."""
    dtype: Literal["model", "float8"] = "model"
    """Dtype of the matrix products in the native engine's layers. With `float8`, the engine rounds
    weights and activations to 8 bits, so models of several billion parameters generate faster on
    Ada, Hopper and newer GPUs. A float8 engine needs `objective.correction`, whose default for this
    engine is `token_truncate`, or an algorithm with a correction of its own."""
    kv_dtype: Literal["model", "float8"] = "model"
    """Dtype of the KV cache in the native engine. A float8 KV cache takes half the memory of a
    16-bit KV cache, and makes attention to long completions faster. A float8 KV cache has the same
    requirements as `engine.dtype = "float8"`."""
    max_concurrent: Annotated[int, Field(ge=1, le=10**6), About(smoke_most=16)] = 256
    """Maximum number of completions generated at the same time."""
    cache_gigabytes: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Size of the KV cache for completions on a GPU, in GiB. With `cache_gigabytes = 0`, the
    KV cache is large enough for all concurrent completions at their maximum length, or smaller if
    the GPU has less free memory. If completions need more memory than the KV cache has, the native
    engine pauses the completions with the fewest tokens and continues them later."""

    @property
    def rounds(self) -> str:
        """The name of the setting that makes the engine use float8; empty without float8."""
        return next((name for name in ("dtype", "kv_dtype") if getattr(self, name) == "float8"), "")


class Curriculum(Section):
    """Settings in [curriculum]: how a step's prompts depend on the results of earlier steps."""

    sampling: Literal["uniform", "hard", "uncertain"] = "uniform"
    """How the sampling weight of a prompt depends on its running pass rate p. For a prompt with the
    pass rate p, the sampling weight is 1 (`uniform`), 1 - p (`hard`), or p (1 - p) (`uncertain`). A
    prompt without results has the pass rate p = 0.5."""
    memory: Share = 0.2
    """Weight of the newest group in the running average of a prompt's pass rate."""
    floor: Share = 0.01
    """Lower bound on the sampling weight of a prompt, or of a task in a mixed task, so that no
    prompt is ignored."""
    drop_above: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Stop drawing a prompt when its pass rate over all its completions reaches this value, such as
    0.9; 0 means never."""
    mixture: Literal["fixed", "progress"] = "fixed"
    """How a step's prompts are divided among the tasks of a mixed task. With `fixed`, each task's
    share is proportional to the task's weight. With `progress`, the recent change of a task's pass
    rate determines the task's share."""

    @property
    def active(self) -> bool:
        """Whether the prompts of a step depend on earlier results."""
        return self.sampling != "uniform" or self.drop_above > 0 or self.mixture != "fixed"


class Replay(Section):
    """[replay]"""

    groups: Count = 0
    """Number of groups from earlier steps that a training step also trains on; 0 means none."""
    size: Positive = 64
    """Number of groups to keep for replay. Covey keeps the newest groups that have both correct and
    incorrect completions."""
    max_age: Positive = 16
    """Maximum age of a replayed group, in optimizer steps since the group was sampled."""


class Critic(Section):
    """Settings in [critic]: the model that predicts rewards, for objectives with a critic."""

    path: str = ""
    """Initial model of the critic, in the form of `model.path`; empty means the policy's initial
    model. The critic must have the policy's tokenizer."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """Constant learning rate of the critic's AdamW, whose other options come from [optimizer]."""
    warmup_steps: Count = 0
    """Number of training steps at the start of the run that train only the critic, not the
    policy."""
    initial_value: float = 0.0
    """The critic's initial prediction for every token, such as the initial mean reward."""


class Preferences(Section):
    """Settings in [preferences], for objectives that compare pairs of completions."""

    file: str = ""
    """JSON Lines file of preference pairs with the fields `prompt`, `chosen` and `rejected`. If a
    file is given, the run trains on the file's pairs instead of on sampled completions."""
    max_tokens: Count = 0
    """Leave out pairs in which a completion has more tokens than this number; 0 means
    `rollout.max_tokens`."""


MOST_COMPLETIONS = 10**7
"""Maximum number of completions in a step. All completions stay in memory until the step ends."""


class Model(Section):
    """[model]"""

    path: Annotated[
        str,
        Field(min_length=1),
        About(
            trl="model_name_or_path",
            verl="model.path",
            resume="a resumed run uses the weights of its checkpoint",
        ),
    ] = "embedded"
    """The model: a folder, a Hugging Face Hub name, a GGUF file, `smollm2` or `embedded`."""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        About(
            trl="bf16",
            verl="actor.fsdp_config.model_dtype",
            resume=f"the steps of the checkpoint were computed in another dtype; {OTHER_RUN}",
        ),
    ] = "auto"
    """Compute dtype; `auto` means bfloat16 on a GPU and float32 on a CPU."""
    device: Device = "auto"
    """Device of the model, such as `cpu`, `cuda`, `cuda:1`, or `auto`."""
    gradient_checkpointing: Annotated[
        bool, About(trl="gradient_checkpointing", verl="model.enable_gradient_checkpointing")
    ] = False
    """Recompute activations in the backward pass, which needs less memory but more time."""
    offload_activations: Annotated[bool, About(verl="model.enable_activation_offload")] = False
    """With `gradient_checkpointing` on a GPU, move the stored layer inputs to main memory, which is
    useful for long sequences."""
    deterministic: Annotated[bool, About(trl="full_determinism")] = False
    """Make results on a GPU bitwise reproducible, which makes the run slower. On a CPU, results are
    always reproducible."""
    template: str = "auto"
    """How prompts are rendered, either `chat`, `plain`, or a text with `{question}` and optionally
    `{system}`; `auto` means the tokenizer's chat template, or `plain` if the tokenizer has none."""
    chat_options: Annotated[
        dict[str, bool | int | float | str],
        About(trl="chat_template_kwargs", verl="data.apply_chat_template_kwargs"),
    ] = Field(default={})
    """Arguments of the chat template, such as `{enable_thinking = false}`."""
    prefill: str = ""
    """Text with which every completion starts; this text belongs to the prompt and is not
    trained."""
    prefill_in_text: bool = True
    """Include the prefill text in the completions that are scored and recorded."""


class Adapter(Section):
    """[adapter]"""

    rank: Annotated[int, Field(ge=0, le=2**16), About(trl="lora_r", verl="model.lora_rank")] = 0
    """Train a LoRA adapter of this rank instead of the weights; 0 means no adapter."""
    alpha: Annotated[Positive, About(trl="lora_alpha", verl="model.lora_alpha")] = 32
    """LoRA alpha; the adapter's output is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1), About(trl="lora_dropout")] = 0.0
    """Dropout on the adapter's inputs in training passes; generation uses no dropout."""
    load_in_4bit: bool = False
    """Keep the frozen weights in 4 bits (NF4), which needs bitsandbytes."""
    targets: Annotated[Names, About(trl="lora_target_modules", verl="model.target_modules")] = (
        Field(default=["all-linear"])
    )
    """Linear layers to adapt, such as `q_proj`; `all-linear` means all linear layers except the
    head."""
    also_train: Names = Field(default=[])
    """Modules to train in full beside the adapter, such as `lm_head`."""


class Task(Named):
    """[task]"""

    name: Annotated[str, About(trl="dataset_name", verl="data.train_files")] = "arithmetic"
    """Name of a task, or `MODULE:FUNCTION` for your own task."""


class Reward(Named):
    """[reward]"""

    name: Annotated[str, About(trl="reward_funcs", verl="reward.custom_reward_function")] = (
        "think_answer"
    )
    """Name of a reward from `covey rewards list`, or `MODULE:FUNCTION` for your own reward."""


class EvaluationReward(Named):
    """[evaluate.reward]"""

    name: str = ""
    """Name of the reward for evaluations; empty means the training reward in [reward]."""


class LengthPenalty(Named):
    """[length_penalty]"""

    name: str = "none"
    """Name of a penalty for long completions, which is added to rewards."""


class Objective(Named):
    """[objective]"""

    name: Annotated[
        str,
        About(
            trl="loss_type",
            verl="algorithm.adv_estimator",
            resume=f"a run trains with one algorithm; {OTHER_RUN}",
        ),
    ] = "grpo"
    """Name of an algorithm, `MODULE:FUNCTION` for your own algorithm, or `composed` for your own
    combination of `advantage`, `ratio`, `surrogate` and `weights`. The default name is `grpo`, or
    `composed` if the section sets `advantage`, `ratio`, `surrogate` or `weights`."""

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
    """Settings in [reference].

    Covey rejects settings that the chosen kind of reference does not use.
    """

    kind: Annotated[
        Literal["frozen", "offloaded", "adapter_off", "moving", "renewed", "server"],
        About(trl="sync_ref_model"),
    ] = "frozen"
    """Kind of the reference policy for the KL penalty. A frozen reference is a copy of the initial
    weights. An offloaded reference is a copy of the initial weights in main memory. With
    `adapter_off`, the reference is the model without its adapter. With `server`, the reference is
    the model of a reference server. A moving reference is a moving average of the policy's weights.
    A renewed reference is a copy of the policy that is updated every `reference.every` optimizer
    steps. The reference is loaded only if the objective has a KL penalty."""
    alpha: Annotated[Share, About(trl="ref_model_mixup_alpha")] = 0.6
    """Weight of the policy in the update `reference = alpha * policy + (1 - alpha) * reference` of
    a moving reference."""
    every: Annotated[Positive, About(trl="ref_model_sync_steps")] = 100
    """Optimizer steps between updates of a moving or renewed reference."""
    url: str = ""
    """Address of the reference server, such as http://127.0.0.1:8500."""
    token_env: str = ""
    """Name of the environment variable with the bearer token of the reference server."""
    timeout: Annotated[float, Field(gt=0)] = 120.0
    """Timeout of a request to the reference server, in seconds."""
    patience: Annotated[float, Field(ge=0)] = 300.0
    """Seconds to keep retrying while the reference server cannot be reached."""
    fingerprint: str = ""
    """Digest that the reference server's weights must have; empty means the digest in the server's
    first reply."""


class Rollout(Section):
    """[rollout]"""

    prompts_per_step: Annotated[
        int,
        Field(ge=1, le=10**6),
        About(
            trl="generation_batch_size",
            verl="data.train_batch_size",
            resume="steps would draw other prompts, and repeat or lose some prompts; "
            "change rollout.group_size instead",
            smoke_most=2,
        ),
    ] = 16
    """Number of prompts in a training step."""
    group_size: Annotated[
        int,
        Field(ge=1, le=10**5),
        About(trl="num_generations", verl="rollout.n", smoke_most=4),
    ] = 8
    """Completions sampled per prompt; 1 works only with objectives that do not compare completions,
    such as `opd`."""
    max_tokens: Annotated[
        int,
        Field(ge=1, le=10**7),
        About(trl="max_completion_length", verl="data.max_response_length", smoke_most=32),
    ] = 64
    """Maximum number of tokens in a completion."""
    max_prompt_tokens: Annotated[
        Count,
        About(
            trl="max_prompt_length",
            verl="data.max_prompt_length",
            resume=f"steps would draw from other prompts; {OTHER_RUN}",
        ),
    ] = 0
    """Maximum number of tokens in a prompt; 0 means the model's context length minus
    `rollout.max_tokens`."""
    long_prompts: Annotated[
        Literal["error", "skip", "truncate"],
        About(resume=f"steps would draw from other prompts; {OTHER_RUN}"),
    ] = "error"
    """What to do with prompts that are too long: stop before training (`error`), leave these
    prompts out (`skip`), or cut off their first tokens (`truncate`)."""
    temperature: Annotated[
        float, Field(gt=0), About(trl="temperature", verl="rollout.temperature")
    ] = 1.0
    """Sampling temperature."""
    top_k: Annotated[Count, About(trl="top_k", verl="rollout.top_k")] = 0
    """Sample from the k likeliest tokens; 0 means all tokens."""
    top_p: Annotated[Share, About(trl="top_p", verl="rollout.top_p")] = 1.0
    """Sample from the smallest set of likeliest tokens whose total probability reaches this
    value."""
    min_p: Annotated[float, Field(ge=0, lt=1), About(trl="min_p")] = 0.0
    """Drop tokens whose probability is below this fraction of the likeliest token's probability."""
    mask_replay: bool = False
    """Compute training log-probs over the tokens that `top_k`, `top_p` and `min_p` kept, so that
    training and sampling use the same distribution."""
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], About(trl="generation_kwargs")] = (
        Field(default=[])
    )
    """Texts or special tokens, such as `<|im_end|>`, that end a completion."""


class Scoring(Section):
    """[scoring]"""

    workers: Annotated[int, Field(ge=0, le=4096), About(smoke_most=1, zero_is_many=True)] = 0
    """Number of worker processes for slow rewards; 0 means one per core. Quick rewards need no
    worker processes."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Time limit for scoring one completion, in seconds. A completion whose scoring exceeds this
    time limit counts as unscored."""
    gigabytes: Annotated[float, Field(ge=0.25, le=1e6)] = 8.0
    """Memory limit of a worker process, in GiB."""
    max_unscored: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Stop the run if more than this fraction of a step's completions cannot be scored."""
    none_rewards: Literal["error", "skip"] = "error"
    """What to do if a reward function returns None for a completion. With `error`, the completion
    counts as unscored. With `skip`, the other reward functions determine the reward, as in TRL. If
    all reward functions return None for a completion, the run does not train on this completion."""


class Filter(Section):
    """[filter]"""

    dynamic_sampling: Annotated[bool, About(verl="algorithm.filter_groups.enable", smoke=False)] = (
        False
    )
    """Train only on groups that contain both correct and wrong completions."""
    max_rounds: Annotated[Positive, About(verl="algorithm.filter_groups.max_num_gen_batches")] = 4
    """Maximum number of rounds in which `dynamic_sampling` samples groups to fill a training
    step."""
    drop_flat: Annotated[bool, About(smoke=False)] = False
    """Train only on groups whose rewards are not all equal; dropped groups are not replaced."""
    mask_truncated: Annotated[bool, About(trl="mask_truncated_completions")] = False
    """Do not train on truncated completions, although group statistics still include them."""
    skip_zero_gradient: bool = False
    """Skip completions with advantage 0. Skipped completions would not change the gradient, but
    they are missing in token metrics."""

    @property
    def rounds(self) -> int:
        """Maximum number of sampling rounds in a training step."""
        return self.max_rounds if self.dynamic_sampling else 1


class Overlap(Section):
    """[overlap]"""

    staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of training steps by which generation may be ahead of training; 0 means that each step
    first generates and then trains."""
    mode: Literal["ahead", "copy"] = "ahead"
    """How generation runs ahead of training. With `ahead`, one engine call generates the rollouts
    of `staleness + 1` steps with the trainer's weights. With `copy`, an engine with a copy of the
    weights generates during training."""
    in_flight: bool = False
    """With `overlap.mode = "copy"`, load new weights during the generation of completions, which
    makes results depend on timing."""
    max_staleness: Count = 0
    """Drop groups that are more than this many optimizer steps old when Covey trains on them; 0
    means to keep all groups."""


class Optimizer(Section):
    """[optimizer]"""

    learning_rate: Annotated[
        float, Field(ge=0), About(trl="learning_rate", verl="actor.optim.lr")
    ] = 1e-6
    """Peak learning rate of AdamW."""
    beta1: Annotated[
        float, Field(ge=0, lt=1), About(trl="adam_beta1", verl="actor.optim.betas")
    ] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[
        float, Field(ge=0, lt=1), About(trl="adam_beta2", verl="actor.optim.betas")
    ] = 0.999
    """Decay of AdamW's second moment."""
    eps: Annotated[float, Field(gt=0), About(trl="adam_epsilon")] = 1e-8
    """AdamW's epsilon, which is added to the square root of the second moment."""
    weight_decay: Annotated[
        float, Field(ge=0), About(trl="weight_decay", verl="actor.optim.weight_decay")
    ] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[
        float, Field(gt=0), About(trl="max_grad_norm", verl="actor.grad_clip")
    ] = 1.0
    """Maximum norm of the gradient; a larger gradient is scaled down to this norm."""
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        About(trl="lr_scheduler_type", verl="actor.optim.lr_scheduler_type"),
    ] = "constant"
    """Learning rate after the warm-up: constant, or decreasing to 0 (linear, cosine)."""
    warmup_steps: Annotated[
        Count, About(trl="warmup_steps", verl="actor.optim.lr_warmup_steps", smoke_most=1)
    ] = 0
    """Number of optimizer steps of linear learning-rate warm-up."""
    warmup_ratio: Annotated[
        float,
        Field(ge=0, lt=1),
        About(trl="warmup_ratio", verl="actor.optim.lr_warmup_steps_ratio"),
    ] = 0.0
    """Fraction of all optimizer steps in which the learning rate warms up, as an alternative to
    `warmup_steps`."""
    state: Annotated[
        Literal["float32", "compact"],
        About(resume=f"the checkpoint has the other kind of optimizer state; {OTHER_RUN}"),
    ] = "float32"
    """Precision of the optimizer state. With `float32`, the moments are float32, and bfloat16
    models have float32 master weights. With `compact`, the moments are bfloat16 with stochastic
    rounding. A compact optimizer state has only the lower 16 bits of each master weight, because
    the bfloat16 model weight holds the upper 16 bits."""

    @model_validator(mode="after")
    def _one_warmup(self) -> Optimizer:
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give optimizer.warmup_steps or optimizer.warmup_ratio, not both")
        return self


class Sft(Section):
    """[sft]"""

    steps: Annotated[Count, About(smoke_most=2, zero_is_many=True)] = 0
    """Number of SFT optimizer steps; 0 means the number of steps in `sft.epochs` epochs."""
    epochs: Positive = 1
    """Number of passes over all solutions if `sft.steps` is 0."""
    solutions: Annotated[
        Positive,
        About(
            resume="steps would draw other solutions, and repeat or lose some solutions",
            smoke_most=4,
        ),
    ] = 32
    """Number of solutions per optimizer step."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Learning rate after the warm-up: constant, or decreasing to 0 (linear, cosine)."""
    warmup_steps: Annotated[Count, About(smoke_most=1)] = 0
    """Number of optimizer steps of linear learning-rate warm-up."""
    max_tokens: Annotated[Count, About(smoke=256)] = 0
    """Leave out solutions with more tokens than this number; 0 means `rollout.max_tokens`."""
    template: Annotated[str, About(resume=f"steps would draw other solutions; {OTHER_RUN}")] = (
        "<think>{worked}</think><answer>{answer}</answer>"
    )
    """Template for the text of a solution, with the fields `{worked}`, `{solution}` and
    `{answer}`."""
    file: Annotated[str, About(resume=f"steps would draw other solutions; {OTHER_RUN}")] = ""
    """JSON Lines file of prompts and completions, to use instead of the task's solutions."""
    evaluate_every: Annotated[Count, About(smoke=2)] = 50
    """Steps between evaluations; 0 means no evaluations at all. With `sft.evaluate_every` above 0,
    Covey also evaluates before the first and after the last step."""


class Evaluate(Section):
    """[evaluate]"""

    every: Annotated[Count, About(trl="eval_steps", verl="trainer.test_freq", smoke=2)] = 20
    """Steps between evaluations; 0 means no evaluations at all. With `evaluate.every` above 0,
    Covey also evaluates before the first and after the last step."""
    prompts: Annotated[Count, About(smoke_most=8, zero_is_many=True)] = 0
    """Number of held-out prompts to evaluate; 0 means all held-out prompts."""
    samples: Annotated[
        int,
        Field(ge=0, le=10**5),
        About(trl="num_generations_eval", verl="rollout.val_kwargs.n", smoke_most=1),
    ] = 0
    """Sampled completions per prompt for mean@k and pass@k; 0 means greedy completions only."""
    temperature: Annotated[float, Field(gt=0), About(verl="rollout.val_kwargs.temperature")] = 1.0
    """Temperature of the sampled completions in evaluations."""
    reward: EvaluationReward = EvaluationReward()


class Save(Section):
    """[save]"""

    every: Annotated[Count, About(trl="save_steps", verl="trainer.save_freq", smoke=0)] = 50
    """Steps between checkpoints; 0 means one checkpoint, after the last step."""
    keep: Annotated[
        Positive, About(trl="save_total_limit", verl="trainer.max_actor_ckpt_to_keep")
    ] = 2
    """Number of newest checkpoints to keep."""
    best: Annotated[str, About(trl="metric_for_best_model")] = ""
    """Metric whose best checkpoint is also kept; empty means no best checkpoint. The metric comes
    from evaluations, such as `greedy`, `pass@4` or a part of the reward, or from training steps,
    such as `objective/scores`. If the metric comes from training steps, Covey looks for a new best
    value once every `save.every` steps."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Whether the highest or the lowest value of the metric `save.best` counts as best."""
    rollouts: Annotated[bool, About(trl="log_completions", verl="trainer.rollout_data_dir")] = True
    """Write every rollout to the run folder."""
    samples_every: Count = 100
    """Number of steps that a sample page covers; 0 means no sample pages. A sample page shows the
    completions with the highest and the lowest rewards of the steps that it covers."""
    samples_shown: Positive = 20
    """How many of the completions with the highest rewards, and how many of the completions with
    the lowest rewards, a sample page shows."""


class Config(Section):
    """All settings of a run."""

    seed: Annotated[
        int,
        Field(ge=0, lt=2**64),
        About(
            trl="seed",
            verl="data.seed",
            resume=f"the seed decides the prompts and random numbers of all steps; {OTHER_RUN}",
        ),
    ] = 0
    """Seed of prompts, sampling and initial adapter weights."""
    trackers: Annotated[Names, About(trl="report_to", verl="trainer.logger")] = []
    """Trackers that receive the metrics in addition to the run folder, such as `tensorboard`,
    `wandb` or `trackio`."""
    model: Annotated[
        Model, About(resume=f"prompts would be rendered or computed in another way; {OTHER_RUN}")
    ] = Model()
    adapter: Annotated[
        Adapter,
        About(resume=f"the checkpoint has the weights of the original adapter; {OTHER_RUN}"),
    ] = Adapter()
    task: Annotated[
        Task,
        About(
            resume=f"steps would draw other prompts, and repeat or lose some prompts; {OTHER_RUN}"
        ),
    ] = Task()
    reward: Annotated[
        Reward,
        About(resume=f"rewards before and after the change could not be compared; {OTHER_RUN}"),
    ] = Reward()
    length_penalty: LengthPenalty = LengthPenalty()
    objective: Objective = Objective()
    reference: Annotated[
        Reference, About(resume=f"the reference is fixed when the run starts; {OTHER_RUN}")
    ] = Reference()
    teacher: Annotated[
        Teacher, About(resume=f"the teacher is fixed when the run starts; {OTHER_RUN}")
    ] = Teacher()
    critic: Critic = Critic()
    preferences: Preferences = Preferences()
    rollout: Rollout = Rollout()
    environment: Annotated[
        Environment,
        About(resume=f"rollouts before and after the change could not be compared; {OTHER_RUN}"),
    ] = Environment()
    scoring: Scoring = Scoring()
    engine: Engine = Engine()
    cluster: Cluster = Cluster()
    filter: Filter = Filter()
    curriculum: Annotated[
        Curriculum,
        About(
            resume="the checkpoint has statistics of the original curriculum; let the run end first"
        ),
    ] = Curriculum()
    replay: Annotated[
        Replay, About(resume="the checkpoint has groups to replay; let the run end first")
    ] = Replay()
    overlap: Annotated[
        Overlap,
        About(
            resume="the checkpoint has rollouts that were generated ahead; let the run end first"
        ),
    ] = Overlap()
    optimizer: Optimizer = Optimizer()
    train: Train = Train()
    parallel: Parallel = Parallel()
    sft: Sft = Sft()
    evaluate: Evaluate = Evaluate()
    save: Save = Save()

    @property
    def stale(self) -> bool:
        """Whether training steps may train on rollouts that an older policy sampled."""
        return self.overlap.staleness > 0 or self.replay.groups > 0

    @property
    def records_passes(self) -> bool:
        """Whether training may use CUDA graphs.

        A resumed run captures CUDA graphs anew, so its results may differ by rounding.
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


def about(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, About]]:
    """Yield the dotted name and the facts of every setting and section that has facts."""
    for name, field in section.model_fields.items():
        for fact in field.metadata:
            if isinstance(fact, About):
                yield f"{prefix}{name}", fact
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from about(inner, f"{prefix}{name}.")
