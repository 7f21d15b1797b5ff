"""What every run that trains does before its first step and after its last, whatever it learns from."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paravt_jax.config import Config, SftConfig, to_record
from paravt_jax.data.visits import Item, Visits
from paravt_jax.learner.learner import Learner
from paravt_jax.run.checkpoint import Checkpoints
from paravt_jax.run.log import RunLog
from paravt_jax.run.plots import make_plots
from paravt_jax.run.policy import Policy
from paravt_jax.run.process import in_thread, lock, say, stop_on_signals, write_settings


@dataclass(frozen=True, eq=False)
class RunPlace:
    """A run's directory, held by this process alone until `stack` closes."""

    config: Config | SftConfig
    num_steps: int
    directory: Path
    stopping: asyncio.Event  # somebody asked the run to end
    stack: AsyncExitStack

    @classmethod
    def enter(cls, config: Config | SftConfig, num_steps: int, stack: AsyncExitStack) -> "RunPlace":
        directory, stopping = Path(config.run_dir).absolute(), asyncio.Event()
        directory.mkdir(parents=True, exist_ok=True)
        stack.callback(lock(directory))
        stack.callback(stop_on_signals(stopping, config.checkpoint.grace_s))
        return cls(config, num_steps, directory, stopping, stack)

    async def restore(self, learner: Learner, policy: Policy) -> tuple[Checkpoints, dict[str, Any] | None]:
        """The learner as it is in the newest whole checkpoint, and the progress of then, if there is one."""
        checkpoints = Checkpoints(self.directory / "checkpoints", policy.hf_files, self.config.checkpoint, say)
        self.stack.callback(checkpoints.close)
        return checkpoints, await in_thread(lambda: checkpoints.restore(learner))

    def check_visits(self, visits: Visits[Item], fingerprint: str) -> None:
        """`fingerprint` is that of the visits with which the run began, or empty."""
        if fingerprint not in ("", visits.fingerprint):
            raise ValueError(
                f"data.train={self.config.data.train} or seed={self.config.seed} are not what the run in "
                f"{self.directory} began with, so its place in the data means nothing; set them back, or choose "
                f"another run_dir"
            )

    def open_log(self, step: int, remarks: Sequence[str]) -> RunLog:
        """Writes the settings as well: from here on the run is what they say."""
        write_settings(self.config, self.directory)
        log = RunLog(
            self.directory,
            self.config.log,
            num_steps=self.num_steps,
            first_step=step,
            settings=to_record(self.config),
        )
        self.stack.callback(log.close)
        for remark in remarks:
            log.say(remark)
        if step:
            log.say(f"going on after step {step} of {self.num_steps} in {self.directory}")
        return log

    async def finish(self, log: RunLog, checkpoints: Checkpoints, step: int, version: int) -> None:
        """After the last save was begun: waits for it, draws, and says where everything is."""
        await in_thread(checkpoints.wait)
        if await in_thread(lambda: make_plots(self.directory)):
            log.say(f"plots: {self.directory / 'plots'}")
        if version not in checkpoints.steps:
            raise RuntimeError("the last checkpoint could not be written, see above; mend that and start again")
        goes_on = "" if step == self.num_steps else "; the same command goes on from there"
        log.say(f"{step} of {self.num_steps} steps are done, {checkpoints.latest}{goes_on}")
