"""State of an SFT run and the operations of a step; the counterpart of rl/run.py.

Every host renders and packs all traces, because only packing decides which traces fit, and then uses its own rows.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial

import jax
import numpy as np

from model_port.config import read_config
from model_port.progress import in_units
from model_port.terminal import say
from paravt_jax.config import SYNTHETIC, DataConfig, SftConfig, ValidationConfig, computed_on, to_record
from paravt_jax.data.sample_order import SampleOrder, spread
from paravt_jax.data.synthetic import held_out_name, row_sources
from paravt_jax.data.traces import Trace, load_traces
from paravt_jax.imitation.batches import Position, TraceBatch, TraceBatches
from paravt_jax.imitation.render import TraceRenderer
from paravt_jax.imitation.samples import sample_record
from paravt_jax.learner.batch_shape import shapes_of_batch
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.packing import TrainBatch, num_packed, rows_of_host, used_frac
from paravt_jax.learner.settings import LossConfig
from paravt_jax.plan.remat import chosen_for
from paravt_jax.plan.run import PlannedSft
from paravt_jax.run.directory import check_not_in_a_run
from paravt_jax.run.fingerprints import check_sources
from paravt_jax.run.host_times import DeviceProbe, OwnTime, by_host
from paravt_jax.run.hosts import ALONE, Hosts
from paravt_jax.run.policy import policy_of
from paravt_jax.run.start import find_devices
from paravt_jax.run.threads import in_thread
from paravt_jax.run.training import Progress, RunDirectory, Training
from paravt_jax.sampling.engines import frame_reader
from rollout.toolbox import forget_user_code


@dataclass(eq=False)
class SftRun:
    """A running SFT training. Use `async with open_sft_run(config) as run`."""

    training: Training
    planned: PlannedSft
    hosts: Hosts
    probe: DeviceProbe
    batches: TraceBatches
    held_out: Sequence[Trace]
    held_out_path: str
    validation: ValidationConfig
    num_traces: int  # traces per epoch
    position: Position
    own_time: OwnTime = field(default_factory=OwnTime)  # time of this host's own work on the last batch

    def __repr__(self) -> str:
        return f"SftRun({self.training!r})"

    async def next_batch(self) -> TraceBatch | None:
        """Returns the next step's traces; None after the last step, or if the run has to stop."""
        if not self.training.begin_step("data"):
            return None
        return await self.training.directory.unless_stopped(self._timed_batch())

    async def _timed_batch(self) -> TraceBatch:
        with self.own_time.working():
            return await self.batches.next_batch()

    async def imitate(self, batch: TraceBatch) -> dict[str, float]:
        training = self.training
        data_s = time.monotonic() - training.began_step_s
        traces = {
            "the number of traces": batch.num_traces,
            "the number of loss tokens": batch.num_loss_tokens,
            "the number of the next trace": batch.after.next_visit,
        }
        self._check_same(traces, batch.problems)
        for problem in batch.problems:
            training.log.say(f"skipped: {problem}")
        training.log.phase("update")
        start_s = time.monotonic()
        own = [self._host_rows(packed) for packed in batch.batches]
        await training.compiled()
        metrics = await in_thread(lambda: training.learner.imitate(own, float(batch.num_loss_tokens)))
        training.step += 1
        self.position = batch.after
        metrics |= {"time/data_s": data_s, "time/update_s": time.monotonic() - start_s}
        return metrics | await self._host_times()

    def _check_same(self, traces: Mapping[str, int], problems: Sequence[str]) -> None:
        """Raises on every host if hosts have different traces. Each shows its own problems, which only host 0 logs."""
        advice = "the log of each host lists the traces that it skipped; all hosts must be able to read the same videos"
        try:
            self.hosts.check_same(lambda: traces, advice)
        except ValueError:
            for problem in problems:
                say(f"skipped: {problem}")
            raise

    async def _host_times(self) -> dict[str, float]:
        """Gathers the times that hosts spent on their own work, if there are several hosts."""
        if self.hosts.num == 1:
            return {}
        devices_s = await in_thread(lambda: self.probe.seconds(self.training.learner.state))
        return by_host(await self.hosts.gather_async("times", {"data": self.own_time.seconds, "devices": devices_s}))

    def record(self, batch: TraceBatch, metrics: dict[str, float]) -> None:
        num_trained = num_packed(batch.batches)
        metrics |= {
            "data/num_traces": float(batch.num_traces),
            "data/num_left_out": float(batch.num_left_out),
            "data/epoch": batch.after.next_visit / self.num_traces,
            "perf/dummy_frac": 1.0 - used_frac(batch.batches),
            "perf/num_batches": float(len(batch.batches)),
            "perf/num_trained_tokens": float(num_trained),
            **self.training.step_metrics(batch.num_tokens),
            **self.planned.update_rates(num_trained, metrics["time/update_s"], jax.devices()[0].device_kind),
        }
        step = self.training.step
        self.training.log.step(step, metrics, [sample_record(batch.sample, step)])

    async def validate_if_due(self) -> None:
        """Validates the policy if a validation is due. The resumed run repeats an interrupted validation."""
        training = self.training
        if not self.held_out or not training.validation_due(self.validation):
            return
        training.log.phase("validation")
        total, num_tokens, problems = 0.0, 0, list[str]()
        rendered = self.batches.batches_of(self.held_out, problems)
        while True:
            batches = await training.directory.unless_stopped(anext(rendered, []))
            if batches is None:
                training.validation_stopped = True
                return
            num_loss_tokens = sum(int(np.count_nonzero(batch.loss_mask)) for batch in batches)
            traces = {"the number of skipped traces": len(problems), "the number of loss tokens": num_loss_tokens}
            self._check_same(traces, problems)
            if not batches:
                break
            for batch in map(self._host_rows, batches):
                logp = await in_thread(partial(training.learner.log_probs, batch))
                total -= float(logp[batch.loss_mask].sum(dtype=np.float64))
                num_tokens += int(np.count_nonzero(batch.loss_mask))
        for problem in [] if training.log.validated else problems:  # logged once, not after every validation
            training.log.say(f"left out of validation: {problem}")
        of_hosts = self.hosts.gather("validation", (total, num_tokens))
        total, num_tokens = (sum(column) for column in zip(*of_hosts, strict=True))
        if not num_tokens:
            self.hosts.all_failed = True
            raise RuntimeError(f"no trace of data.validation={self.held_out_path} can be rendered")
        metrics = {
            "validation/loss": total / num_tokens,
            "validation/num_left_out": float(len(problems)),
            "policy_version": float(training.version),
        }
        training.log.validation(training.step, metrics)

    async def save_if_due(self) -> None:
        await self.training.save_if_due(self.progress)

    def _host_rows(self, batch: TrainBatch) -> TrainBatch:
        return rows_of_host(batch, self.hosts.index, self.hosts.num)

    def progress(self) -> Progress:
        """The checkpoint's state besides the learner."""
        return asdict(self.position)


@asynccontextmanager
async def open_sft_run(
    config: SftConfig, *, allow_changes: bool = False, hosts: Hosts = ALONE
) -> AsyncIterator[SftRun]:
    """Opens a run and resumes it from its newest checkpoint. Cheap checks come first.

    `allow_changes` permits another model, seed or data than the run started with.
    """
    forget_user_code()
    devices = await in_thread(find_devices)
    config = computed_on(config, devices[0].platform)
    async with AsyncExitStack() as stack:
        check_not_in_a_run(config.run_dir)
        directory = RunDirectory.acquire(config.run_dir, stack, to_record(config), allow_changes, hosts)
        sources = hosts.host_0_first(
            lambda: row_sources(config.data, directory.path / SYNTHETIC, config.seed, "_traces")
        )
        read = cache(partial(_traces, config.data))  # so that warnings about a file are logged once
        train, held_out = (read(*source) for source in sources)
        held_out = spread(held_out, config.validation.max_prompts)
        data = f"{in_units([len(train)], 'trace')}, {len(held_out):,} {held_out_name(config.data.validation)}"
        policy = await policy_of(config, directory.path, hosts, data)
        await in_thread(lambda: directory.check_weights(policy))
        check_sources(hosts, train, held_out, policy)
        planned = PlannedSft.of(config, read_config(policy.hf_files))
        compute, line = chosen_for(policy.compute, planned, devices)
        policy = replace(policy, compute=compute)
        remarks = [policy.attention(config.pack.row_tokens), line]
        learner = Learner(
            await in_thread(policy.load),
            config.optim,
            LossConfig(kl_coef=0.0),
            temperature=1.0,
            num_steps=config.sft.num_steps,
            mesh=policy.mesh,
        )
        order = SampleOrder(train, config.seed)
        order_with_lost = cache(lambda: SampleOrder(_traces(config.data, *sources[0], with_lost=True), config.seed))
        training = await Training.resume(
            directory,
            policy,
            learner,
            stack,
            num_steps=config.sft.num_steps,
            beginning={"step": 0, **asdict(Position())},
            fingerprint=order.fingerprint,
            fingerprint_with_lost=lambda: order_with_lost().fingerprint,
            checkpoint=config.checkpoint,
            log=config.log,
            remarks=remarks,
        )
        frames = await stack.enter_async_context(frame_reader(config.video, policy.contract))
        saved = training.first_progress
        if saved["visits"] != order.fingerprint:
            order = order_with_lost()
        position = Position(**{name: saved.get(name, least) for name, least in asdict(Position()).items()})
        batches = TraceBatches(
            TraceRenderer(frames, policy.chat, policy.contract, config.rollout),
            order,
            position,
            learner.model.config,
            policy.contract,
            pack=config.pack,
            video=config.video,
            imitation=config.sft,
            num_row_parts=planned.num_parts,
            most_frame_rows=planned.max_frames // planned.num_parts,
            seed=config.seed,
        )
        stack.push_async_callback(batches.close)
        if training.step < training.num_steps:
            training.compile_ahead(_compile_update(learner, batches), stack)
        run = SftRun(
            training=training,
            planned=planned,
            hosts=hosts,
            probe=DeviceProbe(hosts),
            batches=batches,
            held_out=held_out,
            held_out_path=config.data.validation,
            validation=config.validation,
            num_traces=order.num_items,
            position=position,
        )
        yield run
        await training.finish(run.progress())


async def _compile_update(learner: Learner, batches: TraceBatches) -> None:
    """Compiles the update for the first batch's sizes. Larger batches compile their own programs later."""
    compiler = learner.imitation_compiler()  # made before an update donates the state
    first = await batches.peek_batch()
    await in_thread(lambda: compiler.compile(shapes_of_batch(first.batches[0], learner.mesh)))


def _traces(data: DataConfig, path: str, video_root: str, with_lost: bool = False) -> Sequence[Trace]:
    if not path:
        return ()
    return load_traces(
        path,
        video_root=video_root,
        max_bad_frac=data.max_bad_frac,
        allow_outside=data.allow_outside,
        with_lost=with_lost,
    ).traces
