"""Opens an RL run: cheap checks, then model, checkpoint, engine, and the parity gate before the first step."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

from model_port.bucket import is_address
from model_port.config import read_config
from model_port.processing import VisionContract
from model_port.progress import in_units
from paravt_jax.config import (
    AUTO,
    SYNTHETIC,
    Config,
    DataConfig,
    EngineConfig,
    HostsConfig,
    TrainConfig,
    computed_on,
    to_record,
)
from paravt_jax.data.prompts import Prompt, check_row_messages, load_prompts, remarks_on
from paravt_jax.data.sample_order import Cursor, SampleOrder, spread
from paravt_jax.data.synthetic import held_out_name, row_sources
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.objectives import variant_of
from paravt_jax.plan.remat import chosen_for
from paravt_jax.plan.run import PlannedRl
from paravt_jax.rewards.judge import Judge
from paravt_jax.rewards.plugin import GroupPlugin, Plugin, load_plugin
from paravt_jax.rl.batches import PolicyUpdate
from paravt_jax.rl.episodes import RolloutWorker
from paravt_jax.rl.replay import LoggedSteps, Replay, no_reply
from paravt_jax.rl.run import Run
from paravt_jax.rl.scheduler import RolloutScheduler
from paravt_jax.run.directory import check_not_in_a_run, run_id
from paravt_jax.run.fingerprints import check_sources
from paravt_jax.run.gpu_assignment import Gpus, place_servers
from paravt_jax.run.host_times import DeviceProbe
from paravt_jax.run.hosts import ALONE, Hosts
from paravt_jax.run.policy import Policy, policy_of
from paravt_jax.run.start import find_devices
from paravt_jax.run.threads import in_thread
from paravt_jax.run.training import RunDirectory, Training
from paravt_jax.sampling.engines import frame_reader, open_engine, own_engine, report_unreachable
from paravt_jax.sampling.local_copy import LocalCopy
from paravt_jax.sampling.score import LearnerScorer
from rollout.chat import Chat
from rollout.check import check
from rollout.engine.protocol import EngineError
from rollout.engine.scripted import ScriptedEngine
from rollout.engine.sglang import SGLangEngine
from rollout.episode import Agent
from rollout.parity import Parity, table
from rollout.toolbox import forget_user_code
from rollout.video.reader import FrameReader

REPLAY_OF_FILE = "replay_of"  # file in a replay's directory with the path of the replayed run
SERVERS_AT_ONCE = 16  # concurrent requests to servers in the parity gate; the learner scores one dialogue at a time


@asynccontextmanager
async def open_run(
    config: Config,
    *,
    replay: Path | None = None,
    allow_changes: bool = False,
    take_over: bool = False,
    hosts: Hosts = ALONE,
) -> AsyncIterator[Run]:
    """Opens a run and resumes it from its newest checkpoint. Cheap checks come first.

    A `replay` run's log replaces rollouts and engine. `allow_changes` permits another model, seed or data than at the
    run's start. `take_over` permits servers that another run publishes to.
    """
    forget_user_code()
    variant_of(config.loss)  # fail early if the user's own files do not load
    own_engine(config.engine)
    plugin = load_plugin(config.reward)
    if replay is not None and is_address(config.run_dir):
        raise ValueError(f"run_dir={config.run_dir}: a replay writes to a local directory; choose another run_dir")
    if hosts.num > 1:
        _check_for_hosts(config.hosts, config.train, config.engine, replay)
    gpus = place_servers(config.engine, config.mesh.num_devices // hosts.num) if replay is None else ()
    devices = await in_thread(find_devices)
    config = computed_on(config, devices[0].platform)
    async with AsyncExitStack() as stack:
        log = None if replay is None else LoggedSteps.of(replay, config.run_dir, needs_verdicts=config.judge.is_set)
        if replay is None:
            check_not_in_a_run(config.run_dir)
        directory = RunDirectory.acquire(config.run_dir, stack, to_record(config), allow_changes, hosts)
        hosts.host_0_first(lambda: _check_same_kind(directory, log))
        train, held_out, remarks = hosts.host_0_first(
            lambda: _prompts(config.data, directory.path, config.seed, config.validation.max_prompts, plugin)
        )
        for source, prompts in ((config.data.train, train), (config.data.validation, held_out)):
            _check_num_images(prompts, source, config.video.most_frames)
            if config.rollout.prompts.row_messages:
                check_row_messages(prompts, source)
        data = f"{in_units([len(train)], 'prompt')}, {len(held_out):,} {held_out_name(config.data.validation)}"
        if replay is None:
            await report_unreachable(config.engine)
        policy = await policy_of(config, directory.path, hosts, data)
        await in_thread(lambda: directory.check_weights(policy))
        check_sources(hosts, train, held_out, policy)
        planned = PlannedRl.of(config, read_config(policy.hf_files))
        compute, line = chosen_for(policy.compute, planned, devices)
        policy = replace(policy, compute=compute)
        remarks += [policy.attention(config.pack.row_tokens), line]
        order = SampleOrder(train, config.seed)

        @cache
        def order_with_lost() -> SampleOrder[Prompt]:
            source, _ = row_sources(config.data, directory.path / SYNTHETIC, config.seed)
            return SampleOrder(_load(config.data, *source, plugin, with_lost=True), config.seed)

        training = await _resume(config, directory, policy, order, order_with_lost, log, remarks, stack)
        if training.first_progress["visits"] != order.fingerprint:
            order = order_with_lost()
        frames = await stack.enter_async_context(
            frame_reader(config.video, policy.contract, config.rollout.detail_factor)
        )
        policy_update = update_of(training.learner, policy.chat, policy.contract, config, hosts)

        def compile_ahead() -> None:
            if training.step < training.num_steps:
                training.compile_ahead(in_thread(policy_update.compile_ahead()), stack)

        if not config.engine.connects:
            compile_ahead()
        rollouts = await _rollouts(config, training, policy, frames, plugin, order, log, gpus, take_over, stack)
        if config.engine.connects:  # only now, because a server's error would have to wait until compilation ends
            compile_ahead()
        worker = rollouts.worker
        run = Run(
            training=training,
            policy=policy,
            policy_update=policy_update,
            planned=planned,
            engine=worker.agent.engine,
            engine_settings=config.engine,
            rollouts=rollouts,
            mismatch=config.mismatch,
            validation=config.validation,
            validation_frames=config.video.overview_frames,
            greedy=replace(worker, agent=worker.agent.with_settings(temperature=0.0)),
            held_out=() if log else held_out,
            frames=frames,
            hosts=hosts,
            probe=DeviceProbe(hosts),
        )
        if log is None and config.engine.kind != "jax":
            await hosts.gather_async("engine", None)  # a server does not answer other hosts while it loads
            await run.publish()  # servers may have been started with other weights
        if isinstance(run.engine, SGLangEngine):
            await _check_parity(run.engine, run)
        yield run
        if log is not None:
            training.log.say(log.compared(directory.path))
        await training.finish(run.progress())


def update_of(
    learner: Learner, chat: Chat, contract: VisionContract, config: Config, hosts: Hosts = ALONE
) -> PolicyUpdate:
    return PolicyUpdate(
        learner,
        chat,
        contract,
        train=config.train,
        rollout=config.rollout,
        pack=config.pack,
        max_pixels=config.video.max_pixels * config.rollout.detail_factor,
        max_frames=config.step_frames,
        over_tokens=config.advantage.normalise == "tokens",
        seed=config.seed,
        hosts=hosts,
    )


async def _resume(
    config: Config,
    directory: RunDirectory,
    policy: Policy,
    order: SampleOrder[Prompt],
    order_with_lost: Callable[[], SampleOrder[Prompt]],
    log: LoggedSteps | None,
    remarks: list[str],
    stack: AsyncExitStack,
) -> Training:
    """Opens the learner and resumes it. A replay ends with its log."""
    num_steps = config.train.num_steps
    if log is not None:
        log.lend_checkpoint(directory.path)
        remarks = [*remarks, *log.remarks(to_record(config))]
    learner = Learner(
        await in_thread(policy.load),
        config.optim,
        config.loss,
        temperature=config.rollout.temperature,
        num_steps=num_steps * config.train.updates_per_step,
        mesh=policy.mesh,
    )
    training = await Training.resume(
        directory,
        policy,
        learner,
        stack,
        num_steps=num_steps if log is None else min(num_steps, log.last),
        beginning={"step": 0, "cursor": Cursor().to_record()},
        fingerprint=order.fingerprint,
        fingerprint_with_lost=lambda: order_with_lost().fingerprint,
        checkpoint=config.checkpoint,
        log=config.log,
        remarks=remarks,
    )
    # Earlier steps may have had another number of updates, which would shift the schedule of the learning rate.
    num_left = max(0, num_steps - training.step) * config.train.updates_per_step
    learner.num_steps = training.version + num_left
    return training


async def _rollouts(
    config: Config,
    training: Training,
    policy: Policy,
    frames: FrameReader,
    plugin: Plugin | GroupPlugin | None,
    order: SampleOrder[Prompt],
    log: LoggedSteps | None,
    gpus: Sequence[Gpus],
    take_over: bool,
    stack: AsyncExitStack,
) -> RolloutScheduler | Replay:
    """Opens the source of groups: rollouts with an engine, or a log."""
    cursor = Cursor.from_record(training.first_progress["cursor"])
    if log is not None:
        agent = Agent(ScriptedEngine(no_reply), frames, policy.chat, config.rollout)
        worker = RolloutWorker(agent, config.reward, None, config.seed, plugin, config.train.truncated)
        return Replay(log, worker, order, cursor, config.train, config.advantage)
    judge = await stack.enter_async_context(Judge(config.judge)) if config.judge.is_set else None
    own, on_servers = config.engine.kind == "jax", config.engine.kind == "sglang"
    engine = await open_engine(
        config.engine,
        policy,
        config.rollout,
        training.learner.model if own else None,
        training.version,
        training.log.phase,
        trainable_vision=config.optim.train_vision,
        gpus=gpus,
        num_hosts=training.directory.hosts.num,
        run=await in_thread(lambda: run_id(training.directory.path, training.directory.hosts)) if on_servers else "",
        take_over=take_over,
        beside_update=config.train.max_staleness > 0,
    )
    stack.push_async_callback(engine.close)
    agent = Agent(engine, frames, policy.chat, config.rollout)
    worker = RolloutWorker(agent, config.reward, judge, config.seed, plugin, config.train.truncated)
    rollouts = RolloutScheduler(
        worker,
        order,
        cursor,
        config.train,
        config.video,
        config.advantage,
        on_progress=training.log.phase,
        hosts=training.directory.hosts,
    )
    stack.push_async_callback(rollouts.close)
    if training.step < training.num_steps:
        rollouts.decode_ahead()
    return rollouts


def _check_for_hosts(hosts: HostsConfig, train: TrainConfig, engine: EngineConfig, replay: Path | None) -> None:
    """Rejects settings that need a single host."""
    if replay is not None:
        raise ValueError("--replay runs on one host; leave hosts.coordinator empty")
    if train.oversample:
        raise ValueError(
            f"train.oversample={train.oversample} aborts the slowest groups, and no host knows all groups; set it to 0 "
            f"with several hosts"
        )
    if engine.is_own:
        raise ValueError(f"engine.kind={engine.kind}: an engine of your own runs on one host; use jax or sglang")
    if engine.kind == "jax" and train.max_staleness:
        raise ValueError(
            f"train.max_staleness={train.max_staleness} with engine.kind=jax would run sampling and updates in a "
            f"different order on each host; set it to 0, or engine.kind=sglang"
        )
    if hosts.coordinator == AUTO and engine.kind == "sglang" and not engine.connects:
        raise ValueError(
            f"hosts.coordinator={AUTO} starts jax before the servers of this run get their GPUs; set "
            f"hosts.coordinator=ADDRESS:PORT, hosts.num and hosts.index, or engine.urls of running servers"
        )


def _check_num_images(prompts: Sequence[Prompt], source: str, most_frames: int) -> None:
    """Rejects rows with more images than memory is planned for."""
    most = max(prompts, key=lambda prompt: len(prompt.images), default=None)
    if most is not None and len(most.images) > most_frames:
        raise ValueError(
            f"{source}: the row {most.id} has {len(most.images)} images, more than the {most_frames} frames of an "
            f"overview; raise video.overview_frames"
        )


def _check_same_kind(directory: RunDirectory, log: LoggedSteps | None) -> None:
    """Rejects a directory whose steps come from another kind of run: a normal run, or a replay of another run."""
    path, source = directory.path / REPLAY_OF_FILE, "" if log is None else str(log.run_dir)
    old_source = path.read_text() if path.exists() else ""
    if directory.num_logged and old_source != source:
        old, new = (f"a replay of {run_dir}" if run_dir else "a normal run" for run_dir in (old_source, source))
        raise ValueError(f"{directory.path} has steps of {old}, which {new} cannot continue; choose another run_dir")
    if old_source != source:
        path.write_text(source)


async def _check_parity(engine: SGLangEngine, run: Run) -> None:
    """Rejects servers with log-probs that differ from the learner's. Host 0 checks shared servers.

    A server that is down is skipped; before it gets requests, it must agree with the servers compared here.
    """
    run.training.log.phase("parity gate")
    model = run.training.learner.model
    copy = LocalCopy(model, run.policy.mesh)
    scorer = LearnerScorer(await in_thread(lambda: copy.of(model)), run.policy.contract, copy.mesh)
    checks = run.hosts.leads or not run.engine_settings.connects
    problem = await _parity_problem(engine, scorer, run) if checks else ""
    if problem := next(filter(None, await run.hosts.gather_async("parity", problem)), ""):
        run.hosts.all_failed = True
        raise RuntimeError(problem)


async def _parity_problem(engine: SGLangEngine, scorer: LearnerScorer, run: Run) -> str:
    """Returns the reason to reject this host's servers, or an empty string."""
    log, down, slots = run.training.log, [], asyncio.Semaphore(SERVERS_AT_ONCE)

    async def compare(url: str) -> list[Parity]:
        try:
            await engine.wait_for(url)  # else a server that is late would be compared with old weights
            async with slots:
                return await check([url], scorer, run.policy.chat, on_progress=log.phase)
        except EngineError as problem:
            down.append(f"{url} was not compared with the learner: {problem}")
            log.say(down[-1])
            return []

    parities = list(chain.from_iterable(await asyncio.gather(*map(compare, engine.urls))))
    if not parities:
        return f"no server could be compared with the learner, so the run did not start: {'; '.join(down)}"
    log.say(table(parities))
    problems = [f"{parity.url}: {problem}" for parity in parities for problem in parity.problems]
    return f"engine and learner disagree, so the run did not start: {'; '.join(problems)}" if problems else ""


def _prompts(
    data: DataConfig, directory: Path, seed: int, max_held_out: int, plugin: Plugin | GroupPlugin | None
) -> tuple[Sequence[Prompt], Sequence[Prompt], list[str]]:
    """Loads training prompts and held-out prompts, and returns them with log messages about rows."""
    remarks: list[str] = []

    @cache  # so that warnings and remarks of a file are logged once
    def load(path: str, video_root: str) -> Sequence[Prompt]:
        if not path:
            return ()
        prompts = _load(data, path, video_root, plugin)
        remarks.extend(remarks_on(path, prompts))
        return prompts

    train, held_out = (load(*source) for source in row_sources(data, directory / SYNTHETIC, seed))
    return train, spread(held_out, max_held_out), remarks


def _load(
    data: DataConfig, path: str, video_root: str, plugin: Plugin | GroupPlugin | None, with_lost: bool = False
) -> Sequence[Prompt]:
    return load_prompts(
        path,
        video_root=video_root,
        max_bad_frac=data.max_bad_frac,
        allow_outside=data.allow_outside,
        columns=plugin.columns if plugin else None,
        with_lost=with_lost,
    ).prompts
