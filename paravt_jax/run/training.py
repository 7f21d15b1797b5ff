"""The parts of a run that RL and SFT share: steps, log, checkpoints, resuming and the end of a run.

A run's directory identifies it: a run with the same directory resumes from its newest checkpoint. Random draws are
keyed by seed and number, so a checkpoint needs only the learner's state and a few numbers, called the progress.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

import jax

from model_port.adapters import AdapterInfo
from model_port.bucket import Bucket, is_address
from model_port.json_files import flattened
from model_port.layout import CHECKPOINTS_DIR
from model_port.terminal import say
from paravt_jax.config import CheckpointConfig, LogConfig, ValidationConfig
from paravt_jax.config.keys import change_text
from paravt_jax.learner.learner import Learner
from paravt_jax.run.bucket_checkpoint import BucketCheckpoints
from paravt_jax.run.checkpoint import Checkpoints
from paravt_jax.run.checkpoint_files import steps_in
from paravt_jax.run.compiles import Compiles
from paravt_jax.run.directory import (
    OWN_CODE,
    WEIGHTS,
    LogCopies,
    changed_settings,
    check_kind,
    load_settings,
    locked,
    locked_by_host_0,
    locked_for_bucket,
    versions,
    write_settings,
)
from paravt_jax.run.episode_parts import EpisodeParts
from paravt_jax.run.fingerprints import code_sums, own_sums, weights_sum
from paravt_jax.run.hosts import Hosts
from paravt_jax.run.lease import Lease
from paravt_jax.run.log import PLOTS_DIR, QuietLog, RunLog, import_wandb, last_step
from paravt_jax.run.policy import Policy
from paravt_jax.run.process import Stopping, peak_gib, stop_on_signals
from paravt_jax.run.stderr_log import log_file, tee_stderr
from paravt_jax.run.threads import in_thread, unless_stopped

Result = TypeVar("Result")
Progress = dict[str, Any]
OWN_SETTING = "hosts.index"  # the only setting that may differ between hosts
INCOMPARABLE = ("seed", "model.path", "model.dtype", "data.train", "data.validation")
TRAINED = ("lora.rank", "optim.train_vision")  # settings that decide which parameters a checkpoint has


@dataclass(frozen=True, eq=False)
class RunDirectory:
    """A run's directory, locked from before anything loads until everything is closed."""

    path: Path
    stopping: Stopping  # set when the run must stop
    num_logged: int  # steps logged before this start
    settings: Mapping[str, Any]
    changes: Mapping[str, tuple[Any, Any]]  # settings that changed since the last start
    allow_changes: bool
    hosts: Hosts
    bucket: Bucket | None = None  # for checkpoints and copies of logs; None: they are local
    lease: Lease | None = None  # host 0's lease on the bucket
    old_weights: str = ""  # checksum of the weights in model.path at the last start; empty if there was none

    @classmethod
    def acquire(
        cls, run_dir: str, stack: AsyncExitStack, settings: Mapping[str, Any], allow_changes: bool, hosts: Hosts
    ) -> "RunDirectory":
        """Locks the directory and handles signals until `stack` closes.

        Raises if hosts differ in settings or code or see different directories, and if a checkpoint has other trained
        parameters. Unless `allow_changes`, also raises if settings changed that would make a resumed run incomparable.
        """
        if hosts.leads and (project := settings["log"]["wandb_project"]):
            import_wandb(project)  # before models load
        by_key = flattened(dict(settings))
        shared = {key: value for key, value in by_key.items() if key != OWN_SETTING}
        hosts.check_same(
            lambda: {**shared, **flattened(versions()), **code_sums(by_key)},
            "start all hosts with the same settings and the same code",
        )
        bucket, lease = Bucket.of(run_dir) if is_address(run_dir) else None, None
        if bucket is not None:
            path, lease = stack.enter_context(locked_for_bucket(bucket, hosts))
        else:
            path = stack.enter_context(locked(run_dir) if hosts.num == 1 else locked_by_host_0(run_dir, hosts))
        check_kind(settings, path)
        stack.enter_context(tee_stderr(path / log_file(hosts.index)))
        stopping = Stopping()
        before_exit = (lambda: None) if lease is None else lease.release_before_exit
        stack.callback(stop_on_signals(stopping, before_exit))
        num_logged = last_step(path)
        saved = steps_in((bucket or path) / CHECKPOINTS_DIR)
        has_steps = num_logged or saved  # the log may be lost
        old_weights = load_settings(path).get(WEIGHTS, "") if has_steps else ""
        changes = changed_settings(settings, path, own_sums(settings)) if has_steps else {}

        def changed(keys: Sequence[str]) -> str:
            differ = ((key, *values) for key, values in changes.items() if key in keys)
            return "; ".join(f"{key}={new}, but was {'empty' if old == '' else old}" for key, old, new in differ)

        if saved and (differ := changed(TRAINED)):
            raise ValueError(
                f"{differ} in the checkpoints of {path}, which have other parameters: set it back, or choose another "
                f"run_dir"
            )
        if not allow_changes and (differ := changed(INCOMPARABLE)):
            raise ValueError(
                f"{differ} in the earlier steps of {path}: set it back, choose another run_dir, or add "
                f"--allow-changes to resume with the change"
            )
        return cls(path, stopping, num_logged, settings, changes, allow_changes, hosts, bucket, lease, old_weights)

    def check_weights(self, policy: Policy) -> None:
        """Raises if the weights in model.path have changed since the last start, because the KL would refer to them."""
        if self.old_weights and not self.allow_changes and weights_sum(policy.source) != self.old_weights:
            raise ValueError(
                f"the weights of model.path={self.settings['model']['path']} have changed since the earlier steps of "
                f"{self.path}: restore them, choose another run_dir, or add --allow-changes to resume with the change"
            )

    def checkpoints(self, copies: "LogCopies | None", *options: Any) -> Checkpoints:
        """Makes the run's checkpoints. `copies` uploads logs before a checkpoint in a bucket is committed."""
        if self.bucket is None:
            return Checkpoints(self.path / CHECKPOINTS_DIR, *options)

        def before_commit() -> None:
            assert copies is not None and self.lease is not None
            self.lease.renew()  # otherwise a run that was paused for long would replace its successor's logs
            copies.copy()
            self.lease.renew()

        return BucketCheckpoints(self.bucket / CHECKPOINTS_DIR, *options, before_commit=before_commit)

    async def unless_stopped(self, work: Awaitable[Result]) -> Result | None:
        """Returns the result of `work`, or None on all hosts if a host must stop."""
        result = await unless_stopped(self.stopping, work)
        signal_number = max(await self.hosts.gather_async("stop", self.stopping.signal))
        if signal_number:
            self.stopping.stop(signal_number)
        return None if signal_number else result


@dataclass(eq=False)
class Training:
    """The state of a training run, either RL or SFT."""

    directory: RunDirectory
    learner: Learner
    log: RunLog
    checkpoints: Checkpoints
    num_steps: int
    save_every_steps: int
    first_progress: Progress  # progress of the newest checkpoint; for a new run, its initial progress
    step: int  # number of finished steps
    parts: EpisodeParts  # episodes of other hosts
    copies: LogCopies | None = None  # copies to a bucket, on host 0
    adapter: AdapterInfo | None = None  # metadata of the trained adapter; None: all weights train
    compiles: Compiles = field(default_factory=Compiles)
    ahead: asyncio.Task[None] | None = None  # compiles the update ahead of the first one
    began_step_s: float = 0.0
    validation_stopped: bool = False  # a signal stopped a validation, which the resumed run repeats
    exit_code: int = 0  # the command's exit code: 0 if the run is done, 128 + n if signal n stopped it

    @classmethod
    async def resume(
        cls,
        directory: RunDirectory,
        policy: Policy,
        learner: Learner,
        stack: AsyncExitStack,
        *,
        num_steps: int,
        beginning: Progress,
        fingerprint: str,
        fingerprint_with_lost: Callable[[], str],
        checkpoint: CheckpointConfig,
        log: LogConfig,
        remarks: Sequence[str],
    ) -> "Training":
        """Resumes from the newest complete checkpoint, or starts from `beginning`, {"step": 0} and other progress.

        `fingerprint` identifies the data order. If files of rows were lost since the run started, it keeps its position
        in the order of `fingerprint_with_lost`, which includes these rows. Writes the settings to the run's directory.
        """
        adapter = await in_thread(lambda: policy.adapter_info(learner.model))
        hosts = directory.hosts
        copies = LogCopies(directory.path, directory.bucket) if hosts.leads and directory.bucket is not None else None
        checkpoints = directory.checkpoints(copies, policy.hf_files, checkpoint, say, adapter, hosts)
        stack.callback(checkpoints.close)
        beginning = beginning | {"visits": fingerprint}
        progress = await in_thread(lambda: checkpoints.restore(learner))
        if progress is None and directory.num_logged > 2 * checkpoint.every_steps:  # after its first checkpoint
            raise RuntimeError(
                f"{directory.path} has a log of {directory.num_logged} steps but no checkpoint; restore one, "
                f"move the directory away to start over, or choose another run_dir"
            )
        progress = progress or beginning
        changes = [change_text(key, *values) for key, values in directory.changes.items()]
        if progress["visits"] != fingerprint and progress["visits"] == fingerprint_with_lost():
            changes.append("rows with lost files keep their place in the data, and their samples fail")
        elif progress["visits"] != fingerprint:
            if not directory.allow_changes:
                data, seed = directory.settings["data"]["train"], directory.settings["seed"]
                raise ValueError(
                    f"data.train={data} or seed={seed} changed since the run in {directory.path} started, or files of "
                    f"its rows are missing, so its position in the data is invalid; set them back, choose another "
                    f"run_dir, or restart the data with --allow-changes"
                )
            changes.append("the data changed and start from the beginning")
            progress = beginning | {"step": progress["step"]}
        step, compiles = int(progress["step"]), Compiles()
        settings = dict(directory.settings)
        if hosts.leads and step < num_steps:
            sums = {OWN_CODE: own_sums(settings), WEIGHTS: weights_sum(policy.source)}
            write_settings(settings, directory.path, step, **sums, device_kind=jax.devices()[0].device_kind)
        own_log = None
        if hosts.leads:
            own_log = RunLog(
                directory.path, log, num_steps=num_steps, first_step=step, settings=settings, compiling=compiles.running
            )
        validated, *_ = await hosts.gather_async("log", [] if own_log is None else sorted(own_log.validated))
        run_log = own_log or QuietLog(validated)
        stack.push(lambda kind, *_: run_log.close(failed=kind is not None))
        for remark in (*remarks, _resumed(step, num_steps, directory.path, changes)):
            if remark:
                run_log.say(remark)
        parts = EpisodeParts(directory.bucket or directory.path, hosts)
        if hosts.leads:
            parts.clear()
        return cls(
            directory,
            learner,
            run_log,
            checkpoints,
            num_steps,
            checkpoint.every_steps,
            progress,
            step,
            parts,
            copies,
            adapter,
            compiles,
        )

    def __repr__(self) -> str:
        """Omits settings and parts, which would fill pages as the value of a notebook's cell."""
        return f"Training(step={self.step}, num_steps={self.num_steps}, path={str(self.directory.path)!r})"

    @property
    def version(self) -> int:
        """The policy version: the number of optimizer steps in the learner's weights."""
        return int(self.learner.state.step)

    def compile_ahead(self, work: Coroutine[Any, Any, None], stack: AsyncExitStack) -> None:
        """Starts to compile the update's programs in a thread, while the run prepares the first update."""
        task = self.ahead = asyncio.create_task(work)

        async def finish() -> None:
            task.cancel()  # waits for the program that is being compiled
            await asyncio.gather(task, return_exceptions=True)  # errors were already raised by an update

        stack.push_async_callback(finish)

    async def compiled(self) -> None:
        """Waits until the update's programs are compiled. Raises the error of the compilation."""
        if self.ahead is not None:
            await self.ahead

    def begin_step(self, phase: str) -> bool:
        """Starts a step; returns False if all steps are done."""
        self.began_step_s = time.monotonic()
        self.directory.stopping.saves = True
        if self.step >= self.num_steps:
            return False
        self.log.phase(phase)
        return True

    def step_metrics(self, num_tokens: int) -> dict[str, float]:
        """Ends the current step and returns its metrics."""
        step_s, peak = time.monotonic() - self.began_step_s, peak_gib(jax.local_devices())
        return {
            "policy_version": float(self.version),
            "time/step_s": step_s,
            "perf/tokens_per_s": num_tokens / step_s,
            **self.compiles.pop_metrics(),
            **({} if peak is None else {"perf/peak_gib": peak}),
        }

    def due(self, every_steps: int) -> bool:
        return self.step % every_steps == 0 or self.step >= self.num_steps

    def validation_due(self, validation: ValidationConfig) -> bool:
        """Whether to validate: before the first step, every `every_steps`, after the last step; never twice."""
        return self.due(validation.every_steps) and self.step not in self.log.validated

    async def save_if_due(self, progress: Callable[[], Progress]) -> None:
        await in_thread(self.checkpoints.commit_if_written)
        if self.due(self.save_every_steps):
            await self.save(progress())

    async def save(self, progress: Progress) -> None:
        """Saves a checkpoint. Returns when the state is copied; writing continues in the background."""
        self.log.phase("checkpoint")
        record = {"step": self.step, "visits": self.first_progress["visits"], **progress}
        if self.directory.lease is not None and self.directory.lease.lost:
            raise RuntimeError(self.directory.lease.lost)
        await in_thread(lambda: self.checkpoints.save(self.learner, record))

    async def finish(self, progress: Progress) -> None:
        """Saves the last checkpoint, draws plots, and logs the paths of all results.

        Before the end of the first step it saves nothing: the next start could have another model.
        """
        stopped_by = self.directory.stopping.signal
        done = self.step >= self.num_steps and not self.validation_stopped
        self.exit_code = 128 + stopped_by if stopped_by and not done else 0
        if self.step:
            await self.save(progress)
            await in_thread(self.checkpoints.wait)
        self.directory.stopping.cancel_grace()
        self.log.end()
        if self.directory.hosts.leads:
            await in_thread(self._draw_plots)
        if self.copies is not None:
            await in_thread(self.copies.copy)
        if self.directory.hosts.leads and self.step and self.version not in self.checkpoints.steps:
            raise RuntimeError("the last checkpoint could not be written, see above; fix that and start again")
        saved = f", {self.checkpoints.latest}" if self.step else ""
        without = " without the last validation" if self.step >= self.num_steps and not done else ""
        resume = "" if done else "; the same command resumes the run"
        self.log.say(f"{self.step} of {max(self.step, self.num_steps)} steps are done{without}{saved}{resume}")

    def _draw_plots(self) -> None:
        """Draws the plots. If the disk is full, the run is still finished: only its checkpoint counts."""
        directory = self.directory.path
        try:
            if make_plots(directory):
                self.log.say(f"plots: {directory / PLOTS_DIR}")
        except OSError as problem:
            self.log.say(
                f"no plots: {problem}; draw them later with python -m paravt_jax.run.plots {quote(str(directory))}"
            )


def make_plots(run_dir: Path) -> list[Path]:
    from paravt_jax.run import plots  # imported late: loads matplotlib

    return plots.make_plots(run_dir)


def _resumed(step: int, num_steps: int, path: Path, changes: Sequence[str]) -> str:
    if step >= num_steps:
        ignored = f"; the settings stay as they were, without {'; '.join(changes)}" if changes else ""
        return f"no step is left of {num_steps} in {path}{ignored}"
    resuming = [f"resuming after step {step} of {num_steps} in {path}"] if step else []
    return "; ".join([*resuming, *changes])
