"""One run: every setting with its default, and what cannot be together.

    load_config("configs/smoke_cpu.yaml", "train.num_steps=10")

Defaults, then the file, then `a.b=c`. A key that does not exist, a value of the wrong type, a setting that another one
makes dead or contradicts: all are errors here, before any model is loaded. Sections whose numbers belong to a module
are that module's own dataclass, which checks itself.
"""

import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MappingNode, MarkedYAMLError, YAMLError, compose

from model_port.config import LoraConfig
from model_port.output_dir import check_local
from paravt_jax.keys import flat, keys_of, mappings_of, unknown_key
from paravt_jax.learner.settings import ANCHORS, AdvantageConfig, Anchor, LossConfig, MismatchConfig, OptimConfig
from paravt_jax.rewards.chat_client import check_no_password
from paravt_jax.rewards.judge import JudgeConfig
from paravt_jax.rewards.settings import RewardConfig
from rollout.episode import Dispatch, EpisodeConfig
from rollout.prompts import Prompts
from rollout.video.reader import Decoder

Schema = TypeVar("Schema", bound=Any)
Truncated = Literal["learn", "leave_out", "soft"]
TINY = "tiny"  # as model.path: a tiny random model, made in the run's directory
SYNTHETIC = "synthetic"  # as data.train: videos and questions made in the run's directory
WRITTEN = "_written"  # attribute of loaded settings: the same as they were written


@dataclass(frozen=True)
class PolicyConfig:
    # A Hugging Face directory or hub id, a converted checkpoint, an adapter in PEFT's format, or `tiny`.
    path: str = "Qwen/Qwen3-VL-8B-Instruct"
    # Of activations and frozen weights; masters are float32. A CPU computes in float32, whatever is set here.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    attention: Literal["auto", "xla", "blocked", "scanned", "kernel"] = "auto"  # xla: the plain one, to compare with
    remat: Literal["none", "full", "dots", "attention", "offload"] = "full"  # what of a layer is computed again


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis. A mesh of one is a single device, whatever the machine has."""

    data: int = 1  # each has all parameters, and rows of its own
    fsdp: int = 1  # each has a part of every parameter, and rows of its own
    tensor: int = 1  # each has a part of every layer, and computes it for the same rows

    def __post_init__(self) -> None:
        _at_least_1("mesh", self, "data", "fsdp", "tensor")

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def num_row_parts(self) -> int:
        """How many parts the rows of a batch are split into."""
        return self.data * self.fsdp


AUTO = "auto"  # as hosts.coordinator: what Slurm, a TPU pod or Kubernetes says


@dataclass(frozen=True)
class HostsConfig:
    """The hosts that train together, one process each: same settings but for index, and all see run_dir."""

    coordinator: str = ""  # ADDRESS:PORT of host 0; auto: as Slurm, a TPU pod or Kubernetes say; empty: one host
    num: int = 1  # how many there are
    index: int = 0  # of this host, counted from 0

    def __post_init__(self) -> None:
        _at_least_1("hosts", self, "num")
        if not 0 <= self.index < self.num:
            raise ValueError(f"hosts.index={self.index} is none of hosts.num={self.num}, counted from 0")
        if self.coordinator in ("", AUTO):
            if self.num > 1:
                raise ValueError(
                    f"hosts.num={self.num} does nothing with hosts.coordinator={self.coordinator!r}; give the "
                    f"ADDRESS:PORT of host 0, or leave the number to what auto finds"
                )
        elif not self.coordinator.rpartition(":")[0] or not self.coordinator.rpartition(":")[2].isdecimal():
            raise ValueError(f"hosts.coordinator={self.coordinator} is no ADDRESS:PORT, such as 10.0.0.1:8476")


@dataclass(frozen=True)
class DataConfig:
    # A parquet or JSON-lines file of prompts, a directory with parquet files below it, a data set on the hub as
    # OWNER/NAME[/SUB/DIR][@REVISION], or `synthetic`.
    train: str = SYNTHETIC
    validation: str = ""  # held-out prompts, of the same kinds; empty: no validation
    video_root: str = ""  # what relative video paths begin from; empty: the prompt file's directory
    allow_outside: bool = False  # rows may name files outside of video_root, also by a link; off: such rows are bad
    max_bad_frac: float = 0.01  # of rows that cannot be used; more refuse to start, fewer are reported and left out

    def __post_init__(self) -> None:
        _local("data", self, "video_root")
        if not 0 <= self.max_bad_frac <= 1:
            raise ValueError(f"data.max_bad_frac={self.max_bad_frac} must be between 0 and 1")
        if self.allow_outside and not self.video_root:
            raise ValueError("data.allow_outside=true does nothing without data.video_root; set that too, or neither")


MAX_FRAMES, MAX_PIXELS = 4096, 2**26  # as rows of data may have, since a model's own file states them too


@dataclass(frozen=True)
class VideoConfig:
    gating: bool = True  # draw the frame budget per prompt visit; off: overview_frames
    frame_budgets: list[int] = field(default_factory=lambda: [4, 8, 16, 32, 64])  # to draw from; published
    stratified: bool = False  # every step covers the budgets evenly
    overview_frames: int = 64  # without gating, and in validation
    min_pixels: int = 784  # area of a frame, published with the recipe
    max_pixels: int = 50_176  # likewise
    decoder: Decoder = "pyav"  # decord: the original's, for files in which it is exact
    num_workers: int = 0  # processes that decode; 0: by the machine's cores
    memory_gib: float = 2.0  # of decoded frames
    disk_cache: str = ""  # directory for decoded frames, shared by runs; empty: none
    disk_gib: float = 64.0  # of decoded frames there

    def __post_init__(self) -> None:
        _local("video", self, "disk_cache")
        if not self.frame_budgets or min(self.frame_budgets) < 1:
            raise ValueError(f"video.frame_budgets={self.frame_budgets} must be numbers of frames, each at least 1")
        _at_least_1("video", self, "overview_frames", "min_pixels", "max_pixels")
        for name, found, most in (
            ("frame_budgets", max(self.frame_budgets), MAX_FRAMES),
            ("overview_frames", self.overview_frames, MAX_FRAMES),
            ("max_pixels", self.max_pixels, MAX_PIXELS),
        ):
            if found > most:
                raise ValueError(f"video.{name}={found} must be at most {most}")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"video.min_pixels={self.min_pixels} is more than video.max_pixels={self.max_pixels}")
        if self.stratified and not self.gating:
            raise ValueError("video.stratified=true does nothing with video.gating=false; turn one of them over")

    @property
    def most_frames(self) -> int:
        """Of an overview, in training or validation."""
        return max([self.overview_frames, *(self.frame_budgets if self.gating else ())])


@dataclass(frozen=True)
class EngineConfig:
    """What samples: the learner itself, or SGLang servers, which run already or are started here."""

    kind: Literal["jax", "sglang"] = "jax"  # jax: the learner samples in its own process
    urls: list[str] = field(default_factory=list)  # sglang: servers that run already; empty: start num_servers here
    urls_file: str = ""  # sglang: in place of urls, a file with one on each line, which may change while a run goes on
    num_servers: int = 1  # sglang, on this machine
    # sglang on cuda: the numbers of this machine's GPUs that those servers have, in order and as many each, such as
    # [4, 5, 6, 7]; the learner has all others
    gpus: list[int] = field(default_factory=list)
    device: Literal["cpu", "cuda"] = "cuda"  # sglang: where servers of this machine compute
    memory_frac: float = 0.8  # sglang on cuda: of the device memory, for servers that are started here
    route: Literal["disk", "tensors"] = "disk"  # sglang: how new weights get there
    weights_dir: str = ""  # disk: of this run alone, seen by the servers of all hosts; empty: this host's memory
    max_rows: int = 16  # jax: requests that are sampled at the same time

    def __post_init__(self) -> None:
        _at_least_1("engine", self, "num_servers", "max_rows")
        _local("engine", self, "urls_file", "weights_dir")
        if self.kind == "jax" and self.urls:
            raise ValueError(f"engine.urls={self.urls} does nothing with engine.kind=jax; set engine.kind=sglang")
        for url in self.urls:
            check_no_password("engine.urls", url)
        if self.urls_file and (self.urls or self.kind == "jax"):
            raise ValueError(
                f"engine.urls_file={self.urls_file} is in place of engine.urls, with engine.kind=sglang; leave one out"
            )
        if self.weights_dir and (self.kind == "jax" or self.route == "tensors"):
            raise ValueError(
                f"engine.weights_dir={self.weights_dir} does nothing without engine.kind=sglang and engine.route=disk"
            )
        if self.gpus:
            self._check_gpus()

    @property
    def connects(self) -> bool:
        """To servers that somebody else runs."""
        return bool(self.urls or self.urls_file)

    def _check_gpus(self) -> None:
        if self.kind == "jax" or self.connects or self.device == "cpu":
            raise ValueError(
                f"engine.gpus={self.gpus} is for servers that the run starts: it does nothing without "
                f"engine.kind=sglang and engine.device=cuda, nor with engine.urls"
            )
        if min(self.gpus) < 0 or len(set(self.gpus)) < len(self.gpus):
            raise ValueError(f"engine.gpus={self.gpus} must be numbers from 0 on, each once: servers share no GPU")
        if len(self.gpus) % self.num_servers:
            raise ValueError(
                f"engine.gpus={self.gpus} cannot be dealt out to engine.num_servers={self.num_servers}: each has as "
                f"many; name a multiple of it"
            )
        if self.num_servers > 1 and self.route == "tensors":
            raise ValueError(
                f"engine.route=tensors hands over memory of one GPU, which engine.num_servers={self.num_servers} with "
                f"GPUs of their own do not see; set engine.route=disk"
            )


@dataclass(frozen=True)
class PackConfig:
    row_tokens: int = 32_768  # of a row of the update; at least rollout.max_context_tokens
    num_rows: int = 1  # of a batch: what is in memory at the same time; a multiple of mesh.data x mesh.fsdp
    sizes_per_doubling: int = 4  # of the shapes of batches: more waste less, fewer compile fewer programs

    def __post_init__(self) -> None:
        _at_least_1("pack", self, "row_tokens", "num_rows", "sizes_per_doubling")


@dataclass(frozen=True)
class TrainConfig:
    """A step: what is collected for it, how old it may be, and how many updates learn from it."""

    num_steps: int = 500  # of which each collects episodes, updates and publishes
    prompts_per_step: int = 7  # published
    group_size: int = 8  # published: episodes of a prompt
    updates_per_step: int = 1  # optimizer steps, each on its own part of the step's groups
    max_staleness: int = 0  # 0: wait for every step's rollouts; n: no token older than n versions is learnt from
    max_resamples: int = 2  # rounds of new prompts in place of groups that teach nothing (DAPO); 0: train on fewer
    oversample: int = 0  # groups begun beyond those wanted; the last ones are aborted, and their prompts given back
    max_missing_frac: float = 0.5  # of a step's episodes that the engine, videos or the judge failed; more end the run
    anchor_tokens: list[Anchor] = field(default_factory=lambda: list(ANCHORS))
    subagent_loss: bool = False  # sub-agents' tokens get their episode's advantage
    truncated: Truncated = "learn"  # leave_out: cut-off episodes only count in their group; soft: they cost up to 1

    def __post_init__(self) -> None:
        _at_least_1("train", self, "num_steps", "prompts_per_step", "updates_per_step")
        if self.group_size < 2:
            raise ValueError(f"train.group_size={self.group_size} must be at least 2: an advantage is against a group")
        for name in ("max_staleness", "max_resamples", "oversample"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name}={getattr(self, name)} must be 0 or more")
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"train.updates_per_step={self.updates_per_step} would leave updates without anything to learn from: "
                f"a group is in one of them, and there are train.prompts_per_step={self.prompts_per_step}"
            )
        if self.oversample > self.prompts_per_step:
            raise ValueError(
                f"train.oversample={self.oversample} is more than train.prompts_per_step={self.prompts_per_step}: the "
                f"next step has no place for so many prompts that were given back; lower it"
            )
        if self.max_staleness and not self.steps_ahead:
            raise ValueError(
                f"train.max_staleness={self.max_staleness} allows nothing with train.updates_per_step="
                f"{self.updates_per_step}: rollouts one step ahead become {2 * self.updates_per_step - 1} versions "
                f"old; allow so many, or set 0"
            )
        if not 0 <= self.max_missing_frac < 1:
            raise ValueError(f"train.max_missing_frac={self.max_missing_frac} must be 0 or more and below 1")
        if not self.anchor_tokens:
            raise ValueError(f"train.anchor_tokens={self.anchor_tokens} must be some of {', '.join(ANCHORS)}")

    @property
    def steps_ahead(self) -> int:
        """How many steps early a step's rollouts may begin: the last of its updates learns from their oldest tokens."""
        return max(0, (self.max_staleness + 1) // self.updates_per_step - 1)


@dataclass(frozen=True)
class ValidationConfig:
    at_start: bool = True  # before the first step: what training is compared with
    every_steps: int = 50  # and after the last step
    max_prompts: int = 256  # the first ones of the file

    def __post_init__(self) -> None:
        _at_least_1("validation", self, "every_steps", "max_prompts")


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 20  # and after the last step
    keep: int = 3  # the newest ones
    grace_s: float = 120.0  # for a checkpoint after SIGTERM

    def __post_init__(self) -> None:
        _at_least_1("checkpoint", self, "every_steps", "keep")


@dataclass(frozen=True)
class LogConfig:
    tensorboard: bool = True  # RUN_DIR/tensorboard
    wandb_project: str = ""  # Weights & Biases; empty: off


@dataclass(frozen=True)
class Config:
    """A run of PARA-GRPO: its sections, and what cannot be together."""

    # All that a run leaves; started again with the same one, it goes on. gs://BUCKET/PATH: checkpoints and copies of
    # the logs are there, and the run's own files in runs/ below the working directory.
    run_dir: str = "runs/default"
    seed: int = 0  # of all that is drawn at random
    model: PolicyConfig = field(default_factory=PolicyConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    rollout: EpisodeConfig = field(default_factory=EpisodeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: JudgeConfig | None = None  # of open answers, with reward.oe_mode=llm
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        self.rollout.check_samples()
        problems = list(self._contradictions())
        if problems:
            raise ValueError("; ".join(problems))

    def _contradictions(self) -> Iterable[str]:
        yield from _lone_judge(self.reward, self.judge)
        if self.advantage.credit != "token" and not self.reward.anchor_weight:
            credit = self.advantage.credit
            yield f"advantage.credit={credit} does nothing with reward.anchor_weight=0; leave it at token"
        if self.loss.kind == "dr_grpo" and self.advantage.normalise in ("std", "batch"):
            yield (
                f"loss.kind=dr_grpo divides by no std of rewards, advantage.normalise={self.advantage.normalise} does: "
                f"set advantage.normalise=none, or loss.kind=para_grpo"
            )
        if self.loss.kl_in == "reward" and not self.loss.kl_coef:
            yield "loss.kl_in=reward does nothing with loss.kl_coef=0; raise the coefficient, or leave it at loss"
        yield from _unsplit_rows(self.pack, self.mesh)
        yield from _adapted_vision(self.lora, self.optim)
        if self.pack.row_tokens < self.rollout.max_context_tokens:
            yield (
                f"pack.row_tokens={self.pack.row_tokens} cannot hold an episode of rollout.max_context_tokens="
                f"{self.rollout.max_context_tokens}"
            )
        if self.rollout.top_p != 1:
            yield (
                f"rollout.top_p={self.rollout.top_p}: the learner's log-probs are of the whole distribution, so the "
                f"sampler's must be too; set it to 1"
            )
        if not self.rollout.temperature > 0:
            yield f"rollout.temperature={self.rollout.temperature} must be above 0: a group of equal episodes is dead"
        if self.rollout.dispatch == "none" and self.reward.tool_reward:
            yield "rollout.dispatch=none leaves reward.tool_reward=true nothing to reward; set it to false"


def _unsplit_rows(pack: PackConfig, mesh: MeshConfig) -> Iterable[str]:
    if pack.num_rows % mesh.num_row_parts:
        yield f"pack.num_rows={pack.num_rows} must be a multiple of mesh.data x mesh.fsdp = {mesh.num_row_parts}"


def _adapted_vision(lora: LoraConfig, optim: OptimConfig) -> Iterable[str]:
    if lora.rank and optim.train_vision:
        yield (
            f"lora.rank={lora.rank} trains adapters of the language layers and nothing else, which "
            f"optim.train_vision=true contradicts; turn one of them off"
        )


def _lone_judge(reward: RewardConfig, judge: JudgeConfig | None) -> Iterable[str]:
    if (reward.oe_mode == "llm") != (judge is not None):
        yield "reward.oe_mode=llm and judge.url, judge.model belong together; set both or neither"


@dataclass(frozen=True)
class ImitationConfig:
    num_steps: int = 500  # of the model card; the released file says 1500
    rows_per_step: int = 8  # ours: of pack.row_tokens each, filled with whole traces
    steps_ahead: int = 2  # steps whose frames are decoded while the learner is at another

    def __post_init__(self) -> None:
        _at_least_1("sft", self, "num_steps", "rows_per_step", "steps_ahead")


def _imitation_optim() -> OptimConfig:
    return OptimConfig(learning_rate=2e-5, schedule="cosine", warmup_frac=0.05)  # published


def _imitation_pack() -> PackConfig:
    return PackConfig(row_tokens=8192)  # published


def _imitation_video() -> VideoConfig:
    return VideoConfig(gating=False)  # published: 64 frames of every video


@dataclass(frozen=True)
class SftConfig:
    """Of the cold start. `rollout` says how a video, a tool and a turn are shown, and should be that of RL to come."""

    # All that a run leaves; started again with the same one, it goes on. gs://BUCKET/PATH: checkpoints and copies of
    # the logs are there, and the run's own files in runs/ below the working directory.
    run_dir: str = "runs/sft"
    seed: int = 0  # of all that is drawn at random
    model: PolicyConfig = field(default_factory=PolicyConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    video: VideoConfig = field(default_factory=_imitation_video)
    rollout: EpisodeConfig = field(default_factory=EpisodeConfig)
    optim: OptimConfig = field(default_factory=_imitation_optim)
    pack: PackConfig = field(default_factory=_imitation_pack)
    sft: ImitationConfig = field(default_factory=ImitationConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for problem in (*_unsplit_rows(self.pack, self.mesh), *_adapted_vision(self.lora, self.optim)):
            raise ValueError(problem)
        if self.sft.rows_per_step % self.pack.num_rows:
            raise ValueError(
                f"sft.rows_per_step={self.sft.rows_per_step} must be a multiple of pack.num_rows={self.pack.num_rows}"
            )
        if SYNTHETIC in (self.data.train, self.data.validation):
            raise ValueError(f"data.train={SYNTHETIC} has questions but no traces; give a file of traces")


@dataclass(frozen=True)
class EvalDataConfig(DataConfig):
    # A public split, of docs/evaluation.md. Then data.validation is a copy of its repository, or the name of one on the
    # hub; empty: its rows are downloaded.
    split: str = ""


Mode = Literal["agentic", "agentic_release", "reasoning", "direct"]
DIRECT = "Give the answer between <answer> and </answer>."


@dataclass(frozen=True)
class EvaluationConfig:
    # agentic: as in training; agentic_release: in the release's words, nothing forced; without a tool: reasoning, with
    # thinking; direct, without
    mode: Mode = "agentic"
    frame_budgets: list[int] = field(default_factory=lambda: [64])  # of the overview, each on its own
    dispatches: list[Dispatch] = field(default_factory=lambda: ["parallel"])  # how calls are made, each on its own
    max_prompts: int = 1_000_000  # the first ones of data.validation
    num_samples: int = 1  # episodes of a prompt
    max_in_flight: int = 32  # prompts that are played at the same time, their frames in memory

    def __post_init__(self) -> None:
        _at_least_1("eval", self, "max_prompts", "num_samples", "max_in_flight")
        if not self.frame_budgets or min(self.frame_budgets) < 1:
            raise ValueError(f"eval.frame_budgets={self.frame_budgets} must be numbers of frames, each at least 1")
        if not self.dispatches:
            raise ValueError("eval.dispatches is empty, expected some of parallel, sequential, none")
        if self.mode in ("reasoning", "direct") and self.dispatches != ["none"]:
            raise ValueError(
                f"eval.mode={self.mode} offers no tool, eval.dispatches={self.dispatches} does; set "
                f"eval.dispatches=[none]"
            )

    @property
    def cells(self) -> list[tuple[Dispatch, int]]:
        return [(dispatch, budget) for dispatch in self.dispatches for budget in self.frame_budgets]


def _greedy() -> EpisodeConfig:
    return EpisodeConfig(temperature=0.0)


@dataclass(frozen=True)
class EvalConfig:
    run_dir: str = "runs/eval"  # all that a run leaves; started again with the same one, it goes on
    seed: int = 0  # of all that is drawn at random
    model: PolicyConfig = field(default_factory=PolicyConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    video: VideoConfig = field(default_factory=VideoConfig)
    rollout: EpisodeConfig = field(default_factory=_greedy)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: JudgeConfig | None = None  # of open answers, with reward.oe_mode=llm
    eval: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        self.rollout.check_samples()
        for problem in _lone_judge(self.reward, self.judge):
            raise ValueError(problem)
        if not self.data.validation and not self.data.split:
            raise ValueError("data.validation is empty; give the prompts to evaluate on, or a public one as data.split")
        if self.eval.mode == "agentic_release" and not self.rollout.prompts.system_has_tools:
            raise ValueError(
                "eval.mode=agentic_release needs the release's prompts: `python -m paravt_jax.prompts import-release "
                "ParaVT/paravt/eval/driver.py --dst paravt.yaml`, then rollout.prompts_file=paravt.yaml"
            )
        for dispatch in self.eval.dispatches:
            self.episode(dispatch)  # which says what it cannot be with
        if self.rollout.temperature == 0 and self.eval.num_samples > 1:
            raise ValueError(
                f"eval.num_samples={self.eval.num_samples} repeats one answer at rollout.temperature=0; raise one, or "
                f"lower the other"
            )

    def episode(self, dispatch: Dispatch) -> EpisodeConfig:
        """How an episode of this mode goes."""
        rollout = self.rollout
        if self.eval.mode in ("agentic_release", "direct"):
            rollout = replace(rollout, forced_prefix="", prompts_file="")
        if self.eval.mode == "direct" and rollout.prompts.without_tool == Prompts.without_tool:
            rollout = replace(rollout, prompts=replace(rollout.prompts, without_tool=DIRECT))
        return replace(rollout, dispatch=dispatch, prompts_file="")


def load_config(path: str | Path | None, *overrides: str, schema: type[Schema] = Config) -> Schema:
    """Defaults < YAML file, or config.json of a run < `a.b=c`. What is unknown, wrong or impossible raises here.

    A file's `loss.numbers` are those of its kind: another kind on the command line begins with its own.
    """
    for override in overrides:
        if "=" not in override[1:]:
            raise ValueError(f"{override!r} is no setting; write it as train.num_steps=10")
    layers = [] if path is None else [(str(path), _told(str(path), lambda: _read(Path(path))))]
    layers += [(one, _told(one, partial(OmegaConf.from_dotlist, [_with_value(one)]))) for one in overrides]
    problems = [list(_unknown_keys(place, layer, schema)) for place, layer in layers]
    if path is not None and problems[0] and (command := _command_of(layers[0][1])):
        raise ValueError(f"{path} is for {command}: {problems[0][0].removeprefix(f'{path}, ')}")
    if any(problems):
        raise ValueError("; ".join(problem for told in problems for problem in told))
    if path is not None:
        _forget_numbers_of_another_kind(layers)
    config = deepcopy(_defaults(schema))
    for place, layer in layers:
        config = _told(place, partial(OmegaConf.unsafe_merge, config, layer))
    settings: Any = _told("", partial(OmegaConf.to_object, config))
    if schema is Config:
        object.__setattr__(settings, "loss", settings.loss.filled())
    # Beside the settings, for `to_record`: what a ${…} stands for may be a secret.
    object.__setattr__(settings, WRITTEN, OmegaConf.to_container(config, resolve=False))
    return settings


@cache
def _defaults(schema: type) -> Any:
    """A copy of it is made five times as fast as OmegaConf reads the schema."""
    return OmegaConf.structured(schema)


def _read(path: Path) -> Any:
    if path.suffix != ".json":
        return OmegaConf.load(path)
    record = json.loads(path.read_bytes())
    return OmegaConf.create(record["config"] if isinstance(record, dict) and "config" in record else record)


def _told(place: str, work: Callable[[], Any]) -> Any:
    """What `work` gives. What OmegaConf and YAML complain of becomes one line that begins with the place."""
    try:
        return work()
    except OmegaConfBaseException as problem:
        key, said = getattr(problem, "full_key", None) or "", str(problem).splitlines()[0]
        names = [f"{place}{_line_of(place, key)}", "" if key in place or key in said else key]
        raise ValueError(": ".join([*filter(None, names), said])) from None
    except MarkedYAMLError as problem:
        mark = problem.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark and Path(mark.name).is_file() else ""
        said = " ".join(filter(None, [problem.problem, problem.context]))
        raise ValueError(f"{place}{where} is no YAML: {said}") from None
    except (YAMLError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ValueError(f"{place} is no YAML: {' '.join(str(problem).split())}") from None


def _forget_numbers_of_another_kind(layers: list[tuple[str, Any]]) -> None:
    (_, file), *overrides = layers
    kinds = [OmegaConf.select(layer, "loss.kind") for _, layer in overrides]
    before = OmegaConf.select(file, "loss.kind", default=LossConfig.kind)
    if OmegaConf.select(file, "loss.numbers") and any(kind not in (None, before) for kind in kinds):
        file.loss.numbers = {}


def _unknown_keys(place: str, layer: Any, schema: type) -> Iterable[str]:
    if not isinstance(layer, DictConfig):
        raise ValueError(f"{place} is a list, expected settings such as train: {{num_steps: 10}}")
    given = cast(dict[Any, Any], OmegaConf.to_container(layer))
    known, mappings = _known(schema)
    for key in flat(given):
        if key not in known and key.rpartition(".")[0] not in mappings:
            said = unknown_key(key, [*known, *(entry for entries in mappings.values() for entry in entries)])
            yield ("" if place.startswith(f"{key}=") else f"{place}{_line_of(place, key)}: ") + said


def _command_of(layer: Any) -> str:
    """The one command that knows every key of a file; empty where none does, or several."""
    schemas = {"train": Config, "sft": SftConfig, "eval": EvalConfig}
    knowing = [command for command, schema in schemas.items() if not list(_unknown_keys("", layer, schema))]
    return f"python -m paravt_jax.{knowing[0]}" if len(knowing) == 1 else ""


def _line_of(place: str, key: str) -> str:
    """Where a YAML file has a key, to be said after its name; empty for an override."""
    if Path(place).suffix not in (".yaml", ".yml") or not Path(place).is_file():
        return ""
    node, line = compose(Path(place).read_text()), ""
    for name in key.split("."):
        pairs = {at.value: (at, value) for at, value in node.value} if isinstance(node, MappingNode) else {}
        if name not in pairs:
            break
        at, node = pairs[name]
        line = f", line {at.start_mark.line + 1}"
    return line


@cache
def _known(schema: type) -> tuple[list[str], dict[str, list[str]]]:
    return list(keys_of(schema)), mappings_of(schema)


def _with_value(override: str) -> str:
    """`a.b=` is the empty text; OmegaConf would take it for null."""
    return f"{override}''" if override.endswith("=") else override


def to_record(config: Config | SftConfig | EvalConfig) -> dict[str, Any]:
    """Every setting as it is used, for RUN/config.json; what was written as ${…} stays so."""
    record: Any = OmegaConf.to_container(OmegaConf.structured(config))
    return as_written(record, getattr(config, WRITTEN, {}))


def as_written(used: Any, written: Any) -> Any:
    if isinstance(used, dict) and isinstance(written, dict):
        return {key: as_written(value, written.get(key)) for key, value in used.items()}
    if isinstance(used, list) and isinstance(written, list):
        return [as_written(*pair) for pair in zip(used, written, strict=True)]
    return written if isinstance(written, str) and "${" in written else used


def _local(section: str, config: Any, *names: str) -> None:
    for name in names:
        try:
            check_local(getattr(config, name))
        except ValueError as problem:
            raise ValueError(f"{section}.{name}: {problem}") from None


def computed_on(config: Schema, platform: str) -> Schema:
    """The settings as devices of this platform carry them out.

    A CPU computes in float32: XLA emulates bfloat16 there, which is several times slower and takes more memory.
    """
    if platform != "cpu" or config.model.dtype == "float32":
        return config
    used = replace(config, model=replace(config.model, dtype="float32"))
    object.__setattr__(used, WRITTEN, getattr(config, WRITTEN, {}))
    return used


def written_dtype(config: Config | SftConfig | EvalConfig) -> str:
    """`model.dtype` before `computed_on`."""
    return getattr(config, WRITTEN, {}).get("model", {}).get("dtype", config.model.dtype)


def _at_least_1(section: str, config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{section}.{name}={getattr(config, name)} must be at least 1")
