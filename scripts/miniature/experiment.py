"""The jobs of the experiment and their order: world, cold starts, arms, and the evaluation of each.

Every job is a separate command with a resumable run directory, so the same command resumes a stopped experiment.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from model_port.layout import CHECKPOINTS_DIR, RECORD_FILE, RESULTS_FILE
from model_port.progress import Meter
from paravt_jax.config import Config, EvalConfig, SftConfig, load_config
from paravt_jax.run.log import load_jsonl
from rollout.supervisor import supervised
from scripts.miniature.traces import Mixture, rows_of
from scripts.miniature.world import NUM_DISTRACTORS, make_world, questions, rl_row, write_rows

CONFIGS = Path(__file__).parents[2] / "configs" / "miniature"
ARMS = ("grpo", "anchoring", "gating", "para_grpo", "no_tool_reward", "no_penalty", "weak_prior")
READINGS = ("grpo_tool_reward", "sequence_credit")  # where the paper can be read in two ways: the other one
VARIANTS = {  # of PARA-GRPO: the settings that make each
    "loss_grpo": ("loss.name=grpo",),
    "loss_dapo": ("loss.name=dapo",),
    "loss_dr_grpo": ("loss.name=dr_grpo", "advantage.normalise=none"),
    "loss_gspo": ("loss.name=gspo",),
    "loss_cispo": ("loss.name=cispo",),
    "credit_span": ("advantage.credit=span",),
    "credit_sequence": ("advantage.credit=sequence",),
    "normalise_batch": ("advantage.normalise=batch",),
    "normalise_loo": ("advantage.normalise=loo",),
    "terms_apart": ("advantage.terms=apart",),
    "right_scaled": ("reward.tool_right=scaled",),
    "right_threshold": ("reward.tool_right=threshold",),
    "right_needed": ("reward.tool_right=needed",),
    "recommended": ("reward.tool_right=needed", "reward.tool_call_weight=0", "advantage.terms=apart"),
    "two_updates": ("train.updates_per_step=2",),
    "resampled": ("train.max_resamples=2",),
    "soft_length": ("train.truncated=soft",),
}
COLD_STARTS = ("sft", "sft_weak")
TOOL_PRIOR = Mixture()
WEAK_PRIOR = Mixture(tools=False, bare=False, noise_frac=0.0)  # no tools, no format noise
FRAME_BUDGETS = (4, 16, 64)  # for evaluation
UNFORCED = ("grpo", "grpo_tool_reward", "gating")  # arms without anchoring
FORCED = "/forced"  # suffix of a cold start's evaluation with the forced prefix
NOT_FORCED = "rollout.forced_prefix="
POLL_S = 0.5
PROGRESS_S = 5.0  # between checks of the runs' logs


@dataclass(frozen=True)
class Size:
    """Sizes of the experiment. The settings override the config files."""

    num_videos: int
    num_held_out: int
    max_windows: int = 2  # per question
    num_distractors: int = NUM_DISTRACTORS
    traces: Mixture = TOOL_PRIOR  # for the cold start
    trace_budgets: tuple[int, ...] = (4, 8, 16, 32, 64, 64)  # few frames teach calls, many teach overviews
    sft: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    eval: tuple[str, ...] = (f"eval.frame_budgets=[{','.join(map(str, FRAME_BUDGETS))}]",)


FULL = Size(1024, 64, eval=(*Size.eval, "eval.dispatches=[parallel,sequential,none]"))
QUICK = Size(
    256,
    16,
    max_windows=1,
    traces=Mixture(unclosed_frac=0.4, wrong_frac=0.0),  # noise that a short training can remove
    trace_budgets=(4, 4, 8, 16),  # short rows, so more traces per step
    sft=("sft.num_steps=220", "checkpoint.every_steps=50"),
    train=(
        "train.num_steps=30",
        "checkpoint.every_steps=5",
        "video.frame_budgets=[4,8,16]",
        "video.overview_frames=16",
    ),
    eval=("eval.frame_budgets=[4,16]", "eval.max_prompts=48"),
)


@dataclass(frozen=True)
class Job:
    """One command. `directory` is its run directory; `done` is a file that exists once it has finished."""

    name: str
    directory: Path
    command: tuple[str, ...]
    num_steps: int
    progress: str  # glob in the directory: a line or a file per finished step
    done: Path
    needs: Path | None = None  # the job waits for this file


@dataclass(frozen=True)
class Experiment:
    """The requested cold starts, arms and evaluations, with their settings and directories."""

    directory: Path
    arms: Sequence[str]
    seeds: Sequence[int]
    size: Size = FULL
    train: Sequence[str] = ()  # settings of every arm; override its file and the size
    sft: Sequence[str] = ()
    eval: Sequence[str] = ()

    def __post_init__(self) -> None:
        all_arms = (*ARMS, *READINGS, *VARIANTS, *COLD_STARTS)
        unknown = [arm for arm in self.arms if arm not in all_arms]
        if unknown:
            raise ValueError(f"--arms {','.join(unknown)} is unknown, expected some of {', '.join(all_arms)}")

    @property
    def cold_starts(self) -> list[str]:
        needed = {"sft_weak" if arm in ("weak_prior", "sft_weak") else "sft" for arm in self.arms}
        return [name for name in COLD_STARTS if name in needed]

    @property
    def trained_arms(self) -> list[str]:
        return [arm for arm in self.arms if arm not in COLD_STARTS]

    def jobs(self) -> list[Job]:
        """The cold starts and their evaluations, then the arms seed by seed, then their evaluations."""
        runs = [(arm, seed) for seed in self.seeds for arm in self.trained_arms]
        return [
            *map(self._cold_start, self.cold_starts),
            *(self._evaluation(f"{name}{how}") for name in self.cold_starts for how in ("", FORCED)),
            *(self._arm(arm, seed) for arm, seed in runs),
            *(self._evaluation(f"{arm}/seed{seed}") for arm, seed in runs),
        ]

    def make_data(self) -> None:
        """Writes videos, questions and traces; existing files stay."""
        world = self.directory / "world"
        scenes = make_world(world, 0, self.size.num_videos, self.size.num_distractors)
        train, held_out = scenes[: -self.size.num_held_out], scenes[-self.size.num_held_out :]
        for part, scenes_of_part, seed in (("train", train, 0), ("validation", held_out, 1)):
            max_windows, budgets = self.size.max_windows, self.size.trace_budgets
            for name in self.cold_starts:
                mixture = WEAK_PRIOR if name == "sft_weak" else self.size.traces
                rows = rows_of(scenes_of_part, budgets, mixture, seed, max_windows)
                write_rows(world / f"{name}_{part}.jsonl", rows)
            prompts = [question for scene in scenes_of_part for question in questions(scene, max_windows)]
            write_rows(world / f"rl_{part}.jsonl", list(map(rl_row, prompts)))
        from scripts.miniature.model import make_model  # imports jax, which only the runs need

        make_model(self.directory / "tiny.hf")

    def _cold_start(self, name: str) -> Job:
        directory, world = self.directory / name, self.directory / "world"
        settings = [
            f"run_dir={directory}",
            f"model.path={self.directory / 'tiny.hf'}",
            f"data.train={world / f'{name}_train.jsonl'}",
            f"data.validation={world / f'{name}_validation.jsonl'}",
            *self.size.sft,
            *self.sft,
        ]
        config = CONFIGS / "sft.yaml"
        num_steps = load_config(config, *settings, schema=SftConfig).sft.num_steps
        return _training(name, directory, "paravt_jax.sft", config, settings, num_steps)

    def _arm(self, arm: str, seed: int) -> Job:
        directory, world = self.directory / arm / f"seed{seed}", self.directory / "world"
        cold_start = self._cold_start("sft_weak" if arm == "weak_prior" else "sft")
        settings = [
            f"run_dir={directory}",
            f"seed={seed}",
            f"model.path={cold_start.done.parent}",
            f"data.train={world / 'rl_train.jsonl'}",
            f"data.validation={world / 'rl_validation.jsonl'}",
            *VARIANTS.get(arm, ()),
            *self.size.train,
            *self.train,
        ]
        config = CONFIGS / f"{'para_grpo' if arm == 'weak_prior' or arm in VARIANTS else arm}.yaml"
        train = load_config(config, *settings, schema=Config).train
        job = _training(f"{arm}/seed{seed}", directory, "paravt_jax.train", config, settings, train.num_steps)
        last = _checkpoint(directory, train.num_steps * train.updates_per_step)  # the directory is the version
        return replace(job, done=last, needs=cold_start.done)

    def _evaluation(self, name: str) -> Job:
        """Evaluates a cold start, or an arm with its seed. The prefix is forced if it was in training."""
        base, _, seed = name.partition("/")
        if base in COLD_STARTS:
            model, forced = self._cold_start(base), name.endswith(FORCED)
        else:
            model, forced = self._arm(base, int(seed.removeprefix("seed"))), base not in UNFORCED
        directory = self.directory / "eval" / name
        settings = [
            f"run_dir={directory}",
            f"model.path={model.done.parent}",
            f"data.validation={self.directory / 'world' / 'rl_validation.jsonl'}",
            *([] if forced else [NOT_FORCED]),
            *self.size.eval,
            *self.eval,
        ]
        config = CONFIGS / "eval.yaml"
        num_cells = len(load_config(config, *settings, schema=EvalConfig).eval.cells)
        command = _command("paravt_jax.eval", config, settings)
        return Job(f"eval {name}", directory, command, num_cells, "cell_*.json", directory / RESULTS_FILE, model.done)


def _training(name: str, directory: Path, module: str, config: Path, settings: list[str], num_steps: int) -> Job:
    done = _checkpoint(directory, num_steps)
    return Job(name, directory, _command(module, config, settings), num_steps, "metrics.jsonl", done)


def _checkpoint(directory: Path, version: int) -> Path:
    return directory / CHECKPOINTS_DIR / str(version) / RECORD_FILE


def _command(module: str, config: Path, settings: list[str]) -> tuple[str, ...]:
    return sys.executable, "-m", module, "--config", str(config), *settings


class JobRunner:
    """Runs jobs in parallel, with their output in DIRECTORY/log.txt.

    On Linux the jobs end with the experiment, even if it is killed.
    """

    def __init__(self, num_jobs: int):
        self._num_jobs = num_jobs
        self._running: dict[Job, tuple[subprocess.Popen[bytes], float]] = {}

    def run(self, jobs: Iterable[Job]) -> None:
        """Runs the jobs in order, each after the file it needs exists. Raises RuntimeError if one fails."""
        undone = [job for job in jobs if not job.done.exists()]
        waiting, checked_s = list(undone), -math.inf
        num_skipped = sum(map(_steps_done, undone))
        with Meter("starting", sum(job.num_steps for job in undone) - num_skipped, "step") as meter:
            try:
                while waiting or self._running:
                    self._collect(meter.say)
                    ready = [job for job in waiting if job.needs is None or job.needs.exists()]
                    for job in ready[: self._num_jobs - len(self._running)]:
                        waiting.remove(job)
                        self._start(job)
                    if time.monotonic() - checked_s > PROGRESS_S:
                        checked_s = time.monotonic()
                        running = ", ".join(job.name for job in self._running)
                        meter.at(sum(map(_steps_done, undone)) - num_skipped, running)
                    time.sleep(POLL_S)
            except (KeyboardInterrupt, SystemExit):
                meter.say("stopping: the runs save their checkpoints; the same command resumes them")
                raise
            finally:
                self._stop()

    def _start(self, job: Job) -> None:
        job.directory.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // self._num_jobs)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with (job.directory / "log.txt").open("ab") as log:
            command = supervised(job.command) if sys.platform == "linux" else job.command
            child = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._running[job] = child, time.monotonic()

    def _collect(self, say: Callable[[str], None]) -> None:
        for job, (child, start_s) in [*self._running.items()]:
            code = child.poll()
            if code is None:
                continue
            del self._running[job]
            if code or not job.done.exists():
                log = job.directory / "log.txt"
                last = log.read_text(errors="replace").strip().splitlines()[-1:]
                raise RuntimeError(f"{job.name} exited with code {code}: {' '.join(last)} (see {log})")
            say(f"{job.name}: done in {time.monotonic() - start_s:.0f} s")

    def _stop(self) -> None:
        """Sends SIGTERM to the running jobs, so that they save and exit, and waits for them."""
        for child, _ in self._running.values():
            child.send_signal(signal.SIGTERM)
        for child, _ in self._running.values():
            child.wait()


def _steps_done(job: Job) -> int:
    if job.progress.startswith("cell"):
        return sum(1 for _ in job.directory.glob(job.progress))
    path = job.directory / job.progress
    if not path.exists():
        return 0
    return max((int(row["step"]) for row in load_jsonl(path)), default=0)
