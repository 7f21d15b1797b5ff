"""Runs the experiment in order, in one process: cold starts, arms, evaluations.

The runs share compiled programs and decoded frames. Every run has a resumable directory, so the same command resumes a
stopped experiment.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from model_port import progress
from model_port.layout import CHECKPOINTS_DIR, RECORD_FILE, RESULTS_FILE
from model_port.progress import Meter
from model_port.tiny import DEFAULT_FAMILY
from paravt_jax.config import Config, EvalConfig, SftConfig, load_config
from paravt_jax.eval import run_eval
from paravt_jax.run.log import load_jsonl
from paravt_jax.run.process import claim_resources
from paravt_jax.sft import sft
from paravt_jax.train import train
from scripts.miniature.arms import COLD_STARTS, CONFIGS, FORCED, NAMES, NO_PREFIX, forces_prefix, settings_of
from scripts.miniature.dials import Prior, World

COST_FILE = "cost.json"  # CPU and wall seconds of a run, one line for each process
MINIATURE = CONFIGS / "miniature"
SCHEMAS = {"sft": SftConfig, "train": Config, "eval": EvalConfig}
RUNS: dict[str, Callable[[Any], Any]] = {"sft": sft, "train": train, "eval": run_eval}


@dataclass(frozen=True)
class Job:
    """A run. `progress` is a glob of lines or files per step; `done` is a file that exists once it has finished."""

    name: str
    directory: Path
    kind: Literal["sft", "train", "eval"]
    config: Path
    settings: tuple[str, ...]
    num_steps: int
    progress: str
    done: Path

    def run(self) -> None:
        """Runs or resumes it in this process, with its output in DIRECTORY/output.txt."""
        self.directory.mkdir(parents=True, exist_ok=True)
        config = _loaded(self.kind, self.config, self.settings)
        began_s = time.monotonic(), _cpu_s()
        with (self.directory / "output.txt").open("a") as log, redirect_stderr(log), redirect_stdout(log):
            ended = asyncio.run(RUNS[self.kind](config))
        with (self.directory / COST_FILE).open("a") as file:
            wall_s, cpu_s = time.monotonic() - began_s[0], _cpu_s() - began_s[1]
            file.write(json.dumps({"wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1)}) + "\n")
        if self.kind != "eval" and ended.training.exit_code:
            raise SystemExit(ended.training.exit_code)
        if not self.done.exists():
            raise RuntimeError(f"{self.name} did not finish, see {self.directory / 'output.txt'}")


@dataclass(frozen=True)
class Experiment:
    """The requested cold starts, arms and evaluations in one world, with their settings and directories."""

    directory: Path
    arms: Sequence[str]
    seeds: Sequence[int]
    world: World
    world_seed: int = 0
    videos: Path | None = None  # directory of the videos, which experiments may share; None: DIRECTORY/world
    starts: Mapping[str, Path] = field(default_factory=dict)  # checkpoints that cold starts continue, else a new model
    family: str = DEFAULT_FAMILY  # family of a new model
    train: Sequence[str] = ()  # settings of every arm; override the arm's own, which override the world's
    sft: Sequence[str] = ()
    eval: Sequence[str] = ()

    def __post_init__(self) -> None:
        unknown = [arm for arm in self.arms if arm not in NAMES]
        if unknown:
            raise ValueError(f"--arms {','.join(unknown)} is unknown, expected some of {', '.join(NAMES)}")

    @property
    def cold_starts(self) -> list[str]:
        needed = {"sft_weak" if arm in ("weak_prior", "sft_weak") else "sft" for arm in self.arms}
        return [name for name in COLD_STARTS if name in needed]

    @property
    def trained_arms(self) -> list[str]:
        return [arm for arm in self.arms if arm not in COLD_STARTS]

    def jobs(self) -> list[Job]:
        """Lists the cold starts and their evaluations, then the arms seed by seed, then their evaluations."""
        runs = [(arm, seed) for seed in self.seeds for arm in self.trained_arms]
        return [
            *map(self.cold_start, self.cold_starts),
            *(self._evaluation(name, forced) for name in self.cold_starts for forced in (False, True)),
            *(self._arm(arm, seed) for arm, seed in runs),
            *(job for arm, seed in runs for job in self._evaluations(arm, seed)),
        ]

    def make_data(self) -> None:
        """Writes videos, questions, traces and the new model; existing files stay."""
        rows = self.directory / "world"
        priors: dict[str, Prior] = {name: _prior(name) for name in self.cold_starts}
        self.world.make(self.videos or rows, rows, self.world_seed, priors)
        if self.cold_starts and not self.starts:
            from scripts.miniature.model import make_model  # imports jax, which only the runs need

            make_model(self.directory / "tiny.hf", self.world_seed, self.family)

    def cold_start(self, name: str) -> Job:
        start, continued = self.directory / "tiny.hf", []
        if name in self.starts:
            start, continued = self.starts[name].parent, self.world.continued
        settings = [f"model.path={start}", *self.world.sft, *continued, *self.sft]
        return self._training("sft", name, MINIATURE / "sft.yaml", self.world_seed, name, settings)

    def _arm(self, arm: str, seed: int) -> Job:
        start = self.cold_start(_cold_start_of(arm)).done.parent
        settings = [f"model.path={start}", "data.validation=", *self.world.train, *settings_of(arm), *self.train]
        return self._training("train", f"{arm}/seed{seed}", MINIATURE / "para_grpo.yaml", seed, "rl", settings)

    def _training(
        self, kind: Literal["sft", "train"], name: str, config: Path, seed: int, rows: str, settings: list[str]
    ) -> Job:
        settings = [f"run_dir={self.directory / name}", f"seed={seed}", *self._data(rows, "train"), *settings]
        loaded = _loaded(kind, config, tuple(settings))
        num_steps = loaded.sft.num_steps if kind == "sft" else loaded.train.num_steps
        version = num_steps if kind == "sft" else num_steps * loaded.train.updates_per_step
        done = self.directory / name / CHECKPOINTS_DIR / str(version) / RECORD_FILE  # the directory name is the version
        return Job(name, self.directory / name, kind, config, tuple(settings), num_steps, "metrics.jsonl", done)

    def _evaluations(self, arm: str, seed: int) -> Iterator[Job]:
        """Lists evaluations with the arm's training prefix, and also with the other prefix if the world sets so."""
        own = forces_prefix(arm)
        yield self._evaluation(arm, own, seed)
        if self.world.both_prefixes:
            yield self._evaluation(arm, not own, seed, "eval.dispatches=[parallel]")

    def _evaluation(self, name: str, forced: bool, seed: int | None = None, *settings: str) -> Job:
        """Returns the evaluation of a cold start, or of an arm with its seed."""
        model = self.cold_start(name) if seed is None else self._arm(name, seed)
        name = f"{model.name}{FORCED if forced else ''}"
        directory = self.directory / "eval" / name
        settings = (
            f"run_dir={directory}",
            f"model.path={model.done.parent}",
            *self._data("rl", ""),
            *(() if forced else (NO_PREFIX,)),
            *self.world.eval,
            *self.eval,
            *settings,
        )
        config = MINIATURE / "eval.yaml"
        num_cells = len(_loaded("eval", config, settings).eval.cells)
        return Job(
            f"eval {name}", directory, "eval", config, settings, num_cells, "cell_*.json", directory / RESULTS_FILE
        )

    def _data(self, rows: str, train: str) -> list[str]:
        world = self.directory / "world"
        videos = self.videos or world
        settings = [f"data.video_root={videos}", f"video.disk_cache={videos / 'frames'}"]
        files = [f"data.validation={world / f'{rows}_validation.jsonl'}"]
        return [*settings, *files, *([f"data.train={world / f'{rows}_{train}.jsonl'}"] if train else [])]


@cache
def _loaded(kind: str, config: Path, settings: tuple[str, ...]) -> Any:
    return load_config(config, *settings, schema=SCHEMAS[kind])


def _cold_start_of(arm: str) -> str:
    return "sft_weak" if arm == "weak_prior" else "sft"


def _prior(cold_start: str) -> Prior:
    return "weak" if cold_start == "sft_weak" else "tool"


def _cpu_s() -> float:
    """Returns CPU seconds of this process and its finished children, which decode the videos."""
    return sum(os.times()[:4])


def share_programs() -> None:
    """Prepares this process as the runs' own commands do, so that runs share compiled programs."""
    from paravt_jax.run.compiles import set_up_compilation  # imports jax, which a report does not need

    claim_resources()
    set_up_compilation()


def run_jobs(jobs: Iterable[Job]) -> None:
    """Runs the jobs in order in this process, with a progress line every half minute."""
    undone = [job for job in jobs if not job.done.exists()]
    for job in _with_progress(undone, sys.stderr):
        job.run()


def _with_progress(jobs: Sequence[Job], stream: Any) -> Iterator[Job]:
    """Yields the jobs; a thread prints the progress, because the runs' own output goes to their logs."""
    num_before = sum(map(_steps_done, jobs))
    meter, done = Meter("runs", sum(job.num_steps for job in jobs) - num_before, "step"), threading.Event()

    def report() -> None:
        while not done.wait(progress.EVERY_S):
            meter.at(sum(map(_steps_done, jobs)) - num_before)
            print(meter.line(), file=stream, flush=True)

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        for number, job in enumerate(jobs, 1):
            meter.task, began_s = f"{number} of {len(jobs)} runs, {job.name}", time.monotonic()
            yield job
            print(f"{job.name}: done in {time.monotonic() - began_s:.0f} s", file=stream, flush=True)
    finally:
        done.set()
        thread.join()


def _steps_done(job: Job) -> int:
    if job.progress.startswith("cell"):
        return sum(1 for _ in job.directory.glob(job.progress))
    path = job.directory / job.progress
    if not path.exists():
        return 0
    return max((int(row["step"]) for row in load_jsonl(path)), default=0)
