"""Every setting of a run with its default and checks.

If only one module uses a section, that module declares its dataclass.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import product, starmap
from typing import Any, Literal, NamedTuple

from model_port.config import LoraConfig
from model_port.output_dir import check_local
from paravt_jax.learner.settings import AdvantageConfig, LossConfig, MismatchConfig, OptimConfig
from paravt_jax.rewards.judge import JudgeConfig
from paravt_jax.rewards.settings import RewardConfig
from rollout.engine.discovery import check_no_password
from rollout.engine.protocol import MIN_TEMPERATURE
from rollout.episode_config import Dispatch, EpisodeConfig
from rollout.prompts import Prompts
from rollout.setting import setting
from rollout.user_code import is_location

Truncated = Literal["learn", "leave_out", "soft"]
TINY = "tiny"  # value of model.path: creates a tiny random model in the run's directory
SYNTHETIC = "synthetic"  # value of data.train: creates videos and questions in the run's directory


@dataclass(frozen=True)
class PolicyConfig:
    path: str = setting(
        "Qwen/Qwen3-VL-8B-Instruct",
        "the model to start from: a Hugging Face directory or hub id, a converted checkpoint, a PEFT "
        "adapter, or tiny for a random one",
    )
    dtype: Literal["float32", "bfloat16"] = setting(
        "bfloat16",
        "dtype of activations and frozen weights; trained weights are float32. A CPU always computes in float32",
    )
    attention: Literal["auto", "xla", "blocked", "scanned", "kernel"] = setting(
        "auto",
        "attention implementation; auto picks the fastest that works on the device. Set another only to compare; "
        "xla is the plain reference",
    )
    remat: Literal["auto", "none", "full", "dots", "attention", "offload"] = setting(
        "auto",
        "activations to recompute in the backward pass. auto: on GPUs, as few as fit in memory according to --plan; "
        "elsewhere, full; none: the fastest; full: the least memory except offload, which also keeps the layers' "
        "inputs in host memory",
    )


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis. A 1 x 1 x 1 mesh uses a single device."""

    data: int = setting(
        1, "data-parallel replicas, each with all parameters; raise it for more rows per step if memory allows"
    )
    fsdp: int = setting(
        1, "devices that split the parameters, each with its own rows; raise it if the run does not fit"
    )
    tensor: int = setting(1, "devices that split each layer for the same rows; raise it if fsdp alone does not fit")

    def __post_init__(self) -> None:
        _at_least_1("mesh", self, "data", "fsdp", "tensor")

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def num_row_parts(self) -> int:
        """Number of shards along a batch's row axis."""
        return self.data * self.fsdp


ADDRESS_AND_PORT = re.compile(r"(?:[^\s/:@\[\]]+|\[[^\s/@\[\]]+\]):([0-9]{1,5})")
AUTO = "auto"  # value of hosts.coordinator: detect from Slurm, a TPU pod or Kubernetes


@dataclass(frozen=True)
class HostsConfig:
    """Hosts that train together, one process each. All must see run_dir and have the same settings except index."""

    coordinator: str = setting(
        "", "ADDRESS:PORT of host 0; auto: detected from Slurm, a TPU pod or Kubernetes; empty: one host"
    )
    num: int = setting(1, "number of hosts, one process each")
    index: int = setting(0, "index of this host, from 0; the only setting that differs between hosts")

    def __post_init__(self) -> None:
        _at_least_1("hosts", self, "num")
        if not 0 <= self.index < self.num:
            raise ValueError(f"hosts.index={self.index} must be from 0 to hosts.num-1={self.num - 1}")
        if self.coordinator in ("", AUTO):
            if self.num > 1:
                raise ValueError(
                    f"hosts.num={self.num} has no effect with hosts.coordinator={self.coordinator!r}; set it to the "
                    f"ADDRESS:PORT of host 0, or set hosts.coordinator=auto without hosts.num, which it detects"
                )
        elif not (match := ADDRESS_AND_PORT.fullmatch(self.coordinator)) or not 0 < int(match[1]) < 2**16:
            raise ValueError(
                f"hosts.coordinator={self.coordinator} is not ADDRESS:PORT, for example 10.0.0.1:8476 or [fd00::1]:8476"
            )


@dataclass(frozen=True)
class DataConfig:
    train: str = setting(
        SYNTHETIC,
        "training prompts, for sft traces: a parquet or JSON-lines file, a directory with parquet files, a dataset on "
        "the hub as OWNER/NAME[/SUB/DIR][@REVISION], or synthetic",
    )
    validation: str = setting("", "held-out prompts or traces, in the same forms as data.train; empty: no validation")
    video_root: str = setting("", "base directory of relative video paths; empty: the prompt file's directory")
    allow_outside: bool = setting(
        False, "accept rows with files outside data.video_root, also through links; set it if you trust the rows"
    )
    max_bad_frac: float = setting(
        0.01, "largest fraction of unusable rows to skip with a warning; above it, the run does not start"
    )

    def __post_init__(self) -> None:
        _local("data", self, "video_root")
        if not 0 <= self.max_bad_frac <= 1:
            raise ValueError(f"data.max_bad_frac={self.max_bad_frac} must be between 0 and 1")
        if self.allow_outside and not self.video_root:
            raise ValueError("data.allow_outside=true has no effect without data.video_root; set both or neither")


MIN_PIXELS = 784  # smallest area of a frame, in pixels; published
MAX_FRAMES, MAX_PIXELS = 4096, 2**26  # upper limits, also for values from data rows and model files


@dataclass(frozen=True)
class VideoConfig:
    frame_budgets: list[int] = setting(
        [4, 8, 16, 32, 64],
        "gating: each prompt's number of frames is drawn from these; published. Empty: always overview_frames",
    )
    overview_frames: int = setting(
        64, "frames per prompt without gating, and in validation of train; eval has eval.frame_budgets instead"
    )
    max_pixels: int = setting(
        50_176, "largest area of a frame, in pixels; the published value. Lower it to save context and memory"
    )
    num_workers: int = setting(0, "decoder processes; 0: one per core, up to 8. Lower it if others need the CPU")
    disk_cache: str = setting(
        "", "directory that keeps decoded frames for later runs; set it if decoding is slow. Empty: none"
    )

    def __post_init__(self) -> None:
        _local("video", self, "disk_cache")
        if self.frame_budgets and min(self.frame_budgets) < 1:
            raise ValueError(f"video.frame_budgets={self.frame_budgets} must be numbers of frames, each at least 1")
        _at_least_1("video", self, "overview_frames")
        _at_least_0("video", self, "num_workers")
        for name, value, limit in (
            ("frame_budgets", max(self.frame_budgets, default=0), MAX_FRAMES),
            ("overview_frames", self.overview_frames, MAX_FRAMES),
            ("max_pixels", self.max_pixels, MAX_PIXELS),
        ):
            if value > limit:
                raise ValueError(f"video.{name}={value} must be at most {limit}")
        if self.max_pixels < MIN_PIXELS:
            raise ValueError(f"video.max_pixels={self.max_pixels} must be at least {MIN_PIXELS}, the smallest frame")

    @property
    def most_frames(self) -> int:
        """The most frames of an overview, in training or validation."""
        return max([self.overview_frames, *self.frame_budgets])


@dataclass(frozen=True)
class EngineConfig:
    """The sampler: the learner itself, SGLang servers, or, to evaluate any model, an endpoint."""

    kind: str = setting(
        "jax",
        "jax: the learner samples in its own process; sglang: SGLang servers sample; openai: a model behind "
        "OpenAI-compatible endpoints, for evaluation; or path/to/file.py:function for your own (docs/extend.md)",
    )
    urls: list[str] = setting(
        [],
        "sglang: URLs of running servers, or one file with a URL per line, which is reread during the run; empty: "
        "start num_servers on this machine. openai: base URLs, which usually end in /v1, all with the same model",
    )
    model: str = setting("", "openai: the model's name at the endpoint; with serve_with, empty means model.path")
    api_key_env: str = setting("", "openai: name of the environment variable with the API key; empty: no key")
    serve_with: Literal["", "vllm", "sglang"] = setting(
        "", "openai: start num_servers of this program on this machine, which serve model.path; empty: use urls"
    )
    num_servers: int = setting(1, "number of servers to start on this machine; raise it if rollouts are the bottleneck")
    gpus: list[int] = setting(
        [],
        "GPUs for the started servers, split evenly, for example [4, 5, 6, 7]; the learner uses the others. openai: "
        "empty means one GPU per server. Without a GPU, servers start on the CPU",
    )
    weights_dir: str = setting(
        "",
        "sglang: directory for weights that all servers can read, such as a shared disk. Empty: this host's memory; "
        "servers on other machines that rollout.serve started get them over the network",
    )
    max_rows: int = setting(16, "jax: batch size of the sampler, over all hosts")
    cache_tokens: int = setting(
        131_072,
        "jax: size of the KV cache in tokens, over all requests and hosts; raise it to sample more requests together",
    )

    def __post_init__(self) -> None:
        _at_least_1("engine", self, "num_servers", "max_rows", "cache_tokens")
        _local("engine", self, "urls_file", "weights_dir")
        if self.kind not in ("jax", "sglang", "openai") and not self.is_own:
            raise ValueError(
                f"engine.kind={self.kind} is unknown; expected jax, sglang, openai or path/to/file.py:function"
            )
        if self.kind == "jax" and self.urls:
            raise ValueError(
                f"engine.urls={self.urls} has no effect with engine.kind=jax; set engine.urls=[], or engine.kind=sglang"
            )
        for url in self.urls:
            remedy = ", and put a key in the environment variable that engine.api_key_env names"
            check_no_password("engine.urls", url, remedy)
            if re.fullmatch(r"[\w.-]+:\d+", url):
                raise ValueError(f"engine.urls has {url}, which is not a URL; write http://{url}")
        self._check_endpoint()
        if self.weights_dir and self.kind in ("jax", "openai"):
            raise ValueError(f"engine.weights_dir={self.weights_dir} has no effect without engine.kind=sglang")
        if self.gpus:
            self._check_gpus()

    @property
    def is_own(self) -> bool:
        """Whether `kind` is the user's function."""
        return is_location(self.kind)

    @property
    def connects(self) -> bool:
        """Whether the run connects to servers that it did not start."""
        return bool(self.urls)

    @property
    def starts_servers(self) -> bool:
        return self.kind in ("sglang", "openai") and not self.connects

    @property
    def urls_file(self) -> str:
        """The file that lists the servers, one URL per line; empty if `urls` has the URLs themselves."""
        return self.urls[0] if len(self.urls) == 1 and "://" not in self.urls[0] else ""

    def sampler_sizes(self, max_context_tokens: int, num_hosts: int) -> dict[str, int]:
        """The embedded sampler's sizes on one host. A request with the longest context always fits."""
        rows = max(1, self.max_rows // num_hosts)
        cache_tokens = max(max_context_tokens, min(self.cache_tokens // num_hosts, rows * max_context_tokens))
        return {"max_rows": rows, "max_context_tokens": max_context_tokens, "cache_tokens": cache_tokens}

    def _check_endpoint(self) -> None:
        if self.kind != "openai":
            for name in ("model", "api_key_env", "serve_with"):
                if getattr(self, name):
                    raise ValueError(f"engine.{name}={getattr(self, name)} has no effect without engine.kind=openai")
            return
        if bool(self.urls) == bool(self.serve_with) or (self.urls and not self.model):
            raise ValueError(
                "engine.kind=openai, which is for evaluation only, needs either engine.urls and engine.model, or "
                "engine.serve_with=vllm or sglang to start servers of model.path"
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://")) or "?" in url:
                raise ValueError(
                    f"engine.urls has {url.partition('?')[0]}, expected a base URL such as http://127.0.0.1:8000/v1, "
                    f"without a query; a key goes into the environment variable that engine.api_key_env names"
                )

    def _check_gpus(self) -> None:
        if self.kind == "jax" or self.connects:
            raise ValueError(
                f"engine.gpus={self.gpus} is for servers that the run starts: it needs engine.kind=sglang or "
                f"openai, without engine.urls"
            )
        if min(self.gpus) < 0 or len(set(self.gpus)) < len(self.gpus):
            raise ValueError(
                f"engine.gpus={self.gpus} must be different GPU numbers, starting at 0: servers cannot share a GPU"
            )
        if len(self.gpus) % self.num_servers:
            raise ValueError(
                f"engine.gpus={self.gpus} does not split evenly over engine.num_servers={self.num_servers}; list a "
                f"multiple of it"
            )


SHORT_ROW_TOKENS = 4096


@dataclass(frozen=True)
class PackConfig:
    row_tokens: int = setting(
        32_768,
        "tokens per packed row. RL: at least rollout.max_context_tokens, and rows are shorter if that saves work; SFT "
        "leaves out longer traces",
    )
    num_rows: int = setting(
        1, "rows per micro-batch, a multiple of mesh.data x mesh.fsdp; lower it if the update does not fit"
    )

    def __post_init__(self) -> None:
        _at_least_1("pack", self, "row_tokens", "num_rows")

    @property
    def one_shape(self) -> bool:
        """Whether all RL batches have the same shape: for short rows, padding costs less than compiling more shapes."""
        return self.row_tokens <= SHORT_ROW_TOKENS


@dataclass(frozen=True)
class TrainConfig:
    """Data and updates of a training step."""

    num_steps: int = setting(
        500, "training steps; each collects episodes, updates the policy and publishes its weights"
    )
    prompts_per_step: int = setting(7, "prompts per step; the published value")
    group_size: int = setting(8, "episodes per prompt; the published value")
    updates_per_step: int = setting(1, "optimizer steps per training step, each on its own part of the groups")
    max_staleness: int = setting(
        0,
        "maximum age of a trained token in policy versions; higher than 0: rollouts and updates overlap. 0: they "
        "alternate, and tokens age only by the step's earlier updates",
    )
    max_resamples: int = setting(
        2,
        "rounds of new prompts to replace groups without a signal, those that advantage.filter_zero_variance leaves "
        "out and those without a reward (DAPO); 0: train on fewer groups",
    )
    oversample: int = setting(
        0,
        "extra groups to start, so that the slowest can be aborted; their prompts return in the next step. Single-host "
        "only",
    )
    max_missing_frac: float = setting(
        0.5,
        "largest fraction of a step's episodes that may fail (engine, video, judge); above it, the run stops",
    )
    subagent_loss: bool = setting(False, "also train on sub-agents' tokens, with their episode's advantage")
    truncated: Truncated = setting(
        "learn",
        "episodes at a token limit. learn: train on them; leave_out: use them only in their group's statistics; soft: "
        "subtract 1 from their reward, and less from an episode with a turn near rollout.max_new_tokens",
    )

    def __post_init__(self) -> None:
        _at_least_1("train", self, "num_steps", "prompts_per_step", "updates_per_step")
        if self.group_size < 2:
            raise ValueError(
                f"train.group_size={self.group_size} must be at least 2: advantages compare the episodes of a group"
            )
        _at_least_0("train", self, "max_staleness", "max_resamples", "oversample")
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"train.updates_per_step={self.updates_per_step} would leave updates without a group: there are only "
                f"train.prompts_per_step={self.prompts_per_step}; lower it"
            )
        if self.oversample > self.prompts_per_step:
            raise ValueError(
                f"train.oversample={self.oversample} is more than train.prompts_per_step={self.prompts_per_step}: the "
                f"next step could not repeat so many aborted prompts; lower it"
            )
        if self.max_staleness and not self.steps_ahead:
            raise ValueError(
                f"train.max_staleness={self.max_staleness} is too low for train.updates_per_step="
                f"{self.updates_per_step}: rollouts one step ahead become {2 * self.updates_per_step - 1} versions "
                f"old; set it to that, or to 0"
            )
        if not 0 <= self.max_missing_frac < 1:
            raise ValueError(f"train.max_missing_frac={self.max_missing_frac} must be 0 or more and below 1")

    @property
    def steps_ahead(self) -> int:
        """How many steps early a step's rollouts may start, so that its last update's tokens are not too stale."""
        return max(0, (self.max_staleness + 1) // self.updates_per_step - 1)


@dataclass(frozen=True)
class ValidationConfig:
    every_steps: int = setting(
        50, "steps between validations; the first is before step 1, the last after the last step"
    )
    max_prompts: int = setting(256, "number of prompts or traces to use, spread evenly over the file")

    def __post_init__(self) -> None:
        _at_least_1("validation", self, "every_steps", "max_prompts")


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = setting(20, "steps between checkpoints; the last step is always saved")
    keep: int = setting(3, "number of checkpoints to keep, the newest ones")

    def __post_init__(self) -> None:
        _at_least_1("checkpoint", self, "every_steps", "keep")


@dataclass(frozen=True)
class LogConfig:
    wandb_project: str = setting("", "Weights & Biases project to log to; empty: none")


@dataclass(frozen=True)
class RunConfig:
    """The settings that every run has."""

    run_dir: str = setting("runs/default", "output directory; a run resumes if it exists")
    seed: int = setting(0, "random seed for data order, frame budgets and sampling, except SGLang's")
    model: PolicyConfig = field(default_factory=PolicyConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: DataConfig = field(default_factory=DataConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    rollout: EpisodeConfig = field(default_factory=EpisodeConfig)

    def __post_init__(self) -> None:
        if not self.run_dir:
            raise ValueError("run_dir is empty; name a directory, for example runs/first")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be 0 or more")


TRAINING_RUN_DIR = (
    "output directory; a run resumes if it exists. With gs://BUCKET/PATH, checkpoints and copies of the logs go to the "
    "bucket, other files to runs/"
)


@dataclass(frozen=True)
class TrainingConfig(RunConfig):
    """The settings that RL and SFT share."""

    run_dir: str = setting("runs/default", TRAINING_RUN_DIR)
    lora: LoraConfig = field(default_factory=LoraConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if problems := list(self._contradictions()):
            raise ValueError("; ".join(problems))

    def _contradictions(self) -> Iterable[str]:
        if self.pack.num_rows % self.mesh.num_row_parts:
            yield (
                f"pack.num_rows={self.pack.num_rows} must be a multiple of mesh.data x mesh.fsdp = "
                f"{self.mesh.num_row_parts}"
            )
        if self.lora.rank and self.optim.train_vision:
            yield (
                f"lora.rank={self.lora.rank} trains adapters of the language layers only, which conflicts with "
                f"optim.train_vision=true; change one of them"
            )


@dataclass(frozen=True)
class Config(TrainingConfig):
    """Settings of a PARA-GRPO run."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        self.rollout.check_samples()
        super().__post_init__()

    @property
    def step_frames(self) -> int:
        """The most frames that the dialogues of a step can have."""
        train, rollout = self.train, self.rollout
        call_frames = rollout.max_calls * rollout.subagent_max_frames * train.subagent_loss
        frames = self.video.most_frames + train.group_size * (call_frames + rollout.shown_pictures)
        return train.prompts_per_step * frames

    def _contradictions(self) -> Iterable[str]:
        yield from super()._contradictions()
        yield from _lone_judge(self.reward, self.judge)
        for name in ("anchor_weight", "format_weight"):
            if self.advantage.credit != "token" and not getattr(self.reward, name):
                credit = self.advantage.credit
                yield f"advantage.credit={credit} has no effect with reward.{name}=0; set it to token"
        if self.loss.name == "dr_grpo" and self.advantage.normalise in ("std", "batch", "tokens"):
            yield (
                f"loss.name=dr_grpo does not divide by the std of rewards, but advantage.normalise="
                f"{self.advantage.normalise} does; set advantage.normalise=none, or loss.name=para_grpo"
            )
        if self.loss.kl != "k3" and not self.loss.kl_coef:
            yield f"loss.kl={self.loss.kl} has no effect with loss.kl_coef=0; raise the coefficient, or set loss.kl=k3"
        if self.engine.kind == "openai":
            yield (
                "engine.kind=openai is for evaluation only: an endpoint returns text, and training needs token ids and "
                "log-probs; set engine.kind=jax or sglang"
            )
        if self.pack.row_tokens < self.rollout.max_context_tokens:
            yield (
                f"pack.row_tokens={self.pack.row_tokens} cannot hold an episode of rollout.max_context_tokens="
                f"{self.rollout.max_context_tokens}"
            )
        if self.train.subagent_loss and not self.rollout.has_subagents:
            yield "train.subagent_loss=true has no effect with rollout.crop_returns=frames, which has no sub-agents"
        if not self.rollout.temperature > 0:
            temperature = self.rollout.temperature
            yield f"rollout.temperature={temperature} must be above 0: equal episodes of a group have no signal"
        if self.rollout.dispatch == "none" and self.reward.tool != "none":
            yield f"reward.tool={self.reward.tool} has no effect with rollout.dispatch=none; set it to none"


def _lone_judge(reward: RewardConfig, judge: JudgeConfig) -> Iterable[str]:
    if (reward.oe_mode == "llm") != judge.is_set:
        yield "reward.oe_mode=llm needs judge.url and judge.model, and vice versa; set all or none"


@dataclass(frozen=True)
class ImitationConfig:
    num_steps: int = setting(500, "optimizer steps; 500 in the model card, 1500 in the released recipe")
    rows_per_step: int = setting(
        8, "packed rows per step, a multiple of pack.num_rows; more rows give smoother updates"
    )

    def __post_init__(self) -> None:
        _at_least_1("sft", self, "num_steps", "rows_per_step")


@dataclass(frozen=True)
class SftConfig(TrainingConfig):
    """The SFT cold start. `rollout` sets how videos, tools and turns are rendered; use the same in the later RL run."""

    run_dir: str = setting("runs/sft", TRAINING_RUN_DIR)
    # The published values.
    video: VideoConfig = field(default_factory=lambda: VideoConfig(frame_budgets=[]))
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=2e-5, schedule="cosine"))
    pack: PackConfig = field(default_factory=lambda: PackConfig(row_tokens=8192))
    sft: ImitationConfig = field(default_factory=ImitationConfig)

    def _contradictions(self) -> Iterable[str]:
        yield from super()._contradictions()
        if self.sft.rows_per_step % self.pack.num_rows:
            yield f"sft.rows_per_step={self.sft.rows_per_step} must be a multiple of pack.num_rows={self.pack.num_rows}"


@dataclass(frozen=True)
class EvalDataConfig(DataConfig):
    split: str = setting(
        "",
        "a public split (docs/evaluation.md), or path/to/file.py:NAME for your own (docs/extend.md); data.validation "
        "is then your copy of its repository, or its name on the hub, or empty to download the rows; the copy is the "
        "default data.video_root",
    )


SINGLE_TURN_MODES = ("reasoning", "direct")
RELEASE_MODES = (
    *SINGLE_TURN_MODES,
    "agentic_general",
    "agentic_minimal",
    "agentic_videozoomer",
    "agentic_sage",
    "agentic_longvt",
)
MODES = {"paravt": ("agentic", *SINGLE_TURN_MODES), "release": ("agentic", *RELEASE_MODES)}  # by protocol
DIRECT = "Give the answer between <answer> and </answer>."


class EvalCell(NamedTuple):
    """The settings that differ between cells of an evaluation."""

    dispatch: Dispatch
    frame_budget: int
    temperature: float | None = None  # None: rollout.temperature


@dataclass(frozen=True)
class EvaluationConfig:
    """The protocol of an evaluation and its cells."""

    protocol: Literal["paravt", "release"] = setting(
        "paravt",
        "paravt: prompts, frames and agent loop as in training; release: everything as in the released evaluation, for "
        "comparison with the published tables (docs/evaluation.md)",
    )
    mode: str = setting(
        "agentic",
        "agentic: as in training; reasoning, direct: no tools, with and without thinking. protocol=release: direct, "
        "reasoning, agentic_general, agentic_minimal, agentic_videozoomer, agentic_sage, agentic_longvt, or agentic, "
        "which ParaVT uses: agentic_minimal for Charades-STA, agentic_general for the other splits",
    )
    channel: Literal["auto", "image_url", "video_url"] = setting(
        "auto",
        "protocol=release. image_url: frames as images; video_url: the video file's path, which the server must be "
        "able to read; auto: video_url for Charades-STA, image_url for the other splits",
    )
    release_texts: str = setting(
        "", "protocol=release: file with the release's texts, written by python -m paravt_jax.prompts import-release"
    )
    published_row: str = setting("", "row of the published tables to show next to the result, such as Video-R1-7B")
    frame_budgets: list[int] = setting([64], "numbers of overview frames; each is evaluated separately")
    dispatches: list[Dispatch] = setting(
        ["parallel"], "how calls are dispatched, as in rollout.dispatch; each is evaluated separately"
    )
    temperatures: list[float] = setting(
        [], "sampling temperatures, such as [0, 0.3, 0.7, 1]; each is evaluated separately. Empty: rollout.temperature"
    )
    max_prompts: int = setting(1_000_000, "number of prompts to use, from the start of data.validation")
    num_samples: int = setting(1, "episodes per prompt; above 1, results include pass@k")

    def __post_init__(self) -> None:
        _at_least_1("eval", self, "max_prompts", "num_samples")
        if not self.frame_budgets or min(self.frame_budgets) < 1:
            raise ValueError(f"eval.frame_budgets={self.frame_budgets} must be numbers of frames, each at least 1")
        if not self.dispatches:
            raise ValueError("eval.dispatches is empty, expected some of parallel, sequential, none")
        if not all(value == 0 or MIN_TEMPERATURE <= value < math.inf for value in self.temperatures):
            raise ValueError(
                f"eval.temperatures={self.temperatures} must be finite numbers, 0 (greedy) or at least "
                f"{MIN_TEMPERATURE:g}"
            )
        self._check_modes()
        if self.protocol == "paravt" and self.mode in SINGLE_TURN_MODES and self.dispatches != ["none"]:
            raise ValueError(
                f"eval.mode={self.mode} has no tools, which conflicts with eval.dispatches={self.dispatches}; set "
                f"eval.dispatches=[none]"
            )

    def _check_modes(self) -> None:
        if self.mode == "agentic_release":
            raise ValueError(
                "eval.mode=agentic_release was removed: eval.protocol=release eval.mode=agentic_general evaluates as "
                "the release does; for its prompts in this project's protocol, set eval.mode=agentic, "
                "rollout.prompts_file=FILE and rollout.forced_prefix="
            )
        if self.mode not in MODES[self.protocol]:
            raise ValueError(
                f"eval.mode={self.mode} is not a mode of eval.protocol={self.protocol}; expected "
                f"{', '.join(MODES[self.protocol])}"
            )
        if self.protocol == "paravt":
            for name, default in (("channel", "auto"), ("release_texts", "")):
                if getattr(self, name) != default:
                    raise ValueError(f"eval.{name}={getattr(self, name)} has no effect without eval.protocol=release")

    def mode_of(self, split: str) -> str:
        if self.protocol == "paravt" or self.mode != "agentic":
            return self.mode
        return "agentic_minimal" if split == "charades" else "agentic_general"

    def channel_of(self, split: str) -> Literal["image_url", "video_url"]:
        if self.channel != "auto":
            return self.channel
        return "video_url" if split == "charades" else "image_url"

    @property
    def cells(self) -> list[EvalCell]:
        temperatures = self.temperatures or [None]
        return list(starmap(EvalCell, product(self.dispatches, self.frame_budgets, temperatures)))

    def episode(self, rollout: EpisodeConfig, cell: EvalCell) -> EpisodeConfig:
        """The episode settings of this cell."""
        if self.mode == "direct":
            rollout = replace(rollout, forced_prefix="")
        if self.mode == "direct" and rollout.prompts.without_tool == Prompts.without_tool:
            rollout = replace(rollout, prompts=replace(rollout.prompts, without_tool=DIRECT))
        temperature = rollout.temperature if cell.temperature is None else cell.temperature
        return replace(rollout, dispatch=cell.dispatch, temperature=temperature)


@dataclass(frozen=True)
class EvalConfig(RunConfig):
    """Settings of an evaluation."""

    run_dir: str = setting("runs/eval", "output directory; an evaluation resumes if it exists")
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    rollout: EpisodeConfig = field(default_factory=lambda: EpisodeConfig(temperature=0.0))
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    eval: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rollout.check_samples()
        for problem in _lone_judge(self.reward, self.judge):
            raise ValueError(problem)
        if not self.data.validation and not self.data.split:
            raise ValueError("data.validation is empty; set it to prompts, or set data.split to a public split")
        if self.eval.protocol == "release":
            self._check_release()
        episodes = [self.eval.episode(self.rollout, cell) for cell in self.eval.cells]  # raises if settings conflict
        if self.eval.num_samples > 1 and any(episode.temperature == 0 for episode in episodes):
            key = "eval.temperatures" if self.eval.temperatures else "rollout.temperature"
            raise ValueError(
                f"eval.num_samples={self.eval.num_samples} would repeat the same answer at {key}=0; raise the "
                f"temperature, or set eval.num_samples=1"
            )

    def _check_release(self) -> None:
        """Rejects changes to settings that the release protocol fixes, because they would have no effect."""
        if self.engine.kind != "openai":
            raise ValueError(
                f"eval.protocol=release sends messages to an OpenAI-compatible endpoint, which engine.kind="
                f"{self.engine.kind} is not; set engine.kind=openai"
            )
        if not self.eval.release_texts:
            raise ValueError(
                "eval.protocol=release needs the release's texts: python -m paravt_jax.prompts import-release ParaVT "
                "--dst release.yaml, then eval.release_texts=release.yaml"
            )
        fixed = {"eval": EvaluationConfig(), "rollout": EpisodeConfig(temperature=0.0), "video": VideoConfig()}
        names = {
            "eval": ("frame_budgets", "dispatches", "temperatures", "num_samples"),
            "rollout": [field.name for field in fields(EpisodeConfig) if field.name != "turn_deadline_s"],
            "video": ("max_pixels",),
        }
        changed = [
            f"{section}.{name}={getattr(getattr(self, section), name)}"
            for section in fixed
            for name in names[section]
            if getattr(getattr(self, section), name) != getattr(fixed[section], name)
        ]
        if changed:
            raise ValueError(f"{', '.join(changed)}: eval.protocol=release fixes this; leave it out")


def _local(section: str, config: Any, *names: str) -> None:
    for name in names:
        try:
            check_local(getattr(config, name))
        except ValueError as problem:
            raise ValueError(f"{section}.{name}: {problem}") from None


def _at_least_1(section: str, config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{section}.{name}={getattr(config, name)} must be at least 1")


def _at_least_0(section: str, config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 0:
            raise ValueError(f"{section}.{name}={getattr(config, name)} must be 0 or more")
