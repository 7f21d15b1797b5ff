"""Fault injection: the smoke run or a service on two real SGLang servers, with a schedule that follows from a seed.

Servers, decoders, the trainer's hosts and the service are killed, stopped, slowed down, restarted and left without
memory, disk or open files; a server comes back with older weights; two videos are broken, sometimes all are missing;
another run's trainer tries to take the servers. Afterwards the run's log must be complete, in order and consistent with
what the servers sampled and with its own replay; every request to the service must have its own answer or a clear
error; and nothing may be left behind.
"""

import argparse
import asyncio
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from model_port.output_dir import check_local
from model_port.progress import Meter
from paravt_jax.config import load_config
from rollout.engine.weight_root import WEIGHTS_PREFIX
from rollout.owned_directory import orphans
from rollout.supervisor import SHARED_MEMORY, mapped_or_open, processes
from scripts.bench.chaos.checks import episodes_of, problems_of
from scripts.bench.chaos.faults import KINDS, SERVICE, SERVICE_KINDS, TRAINER, Fault, schedule
from scripts.bench.chaos.replay import replay
from scripts.bench.chaos.service import ServiceStage
from scripts.bench.chaos.stage import NUM_SERVERS, Exit, Stage, TrainerStage, num_hosts_of, settings_of
from scripts.bench.hosts import with_devices
from scripts.bench.smoke_run import CONFIG, SETTINGS, check_clone

SEED_HELP = "seed of the schedule (default 0); odd: staleness 1; 2, 5, 8, …: adapters only; 3, 8, 13, …: two hosts"
STEPS_AFTER = 2  # steps after the last fault whose open files are compared
MORE_FILES = 8  # allowed growth of open files from one such step to the next, not counting connections
# Every request of a step may hold a connection, and idle ones stay open for two seconds, which may be longer than a
# step: for each server 3 groups of 4 rollouts with 2 calls, in two steps at once.
MOST_CONNECTIONS = NUM_SERVERS * 3 * 4 * 2 * 2
SAMPLE_S = 0.2
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
LEFT_BY_SERVERS = ("psm_", "sem.", "torch_", "sglang", "sgl_shm_")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=20, help="minutes of fault injection (default 20)")
    parser.add_argument("--seed", type=int, default=0, help=SEED_HELP)
    parser.add_argument("--serve", action="store_true", help="test a service and its clients instead of a trainer")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep the run and its logs in DIR (default: delete them)"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    check_clone()
    if args.minutes <= 0:
        raise ValueError(f"--minutes {args.minutes} must be greater than 0")
    check_local(args.out or "")
    if args.out is not None and args.out.exists():
        raise ValueError(f"{args.out} already exists; move it away, or choose another --out")
    directory = Path(tempfile.mkdtemp(prefix="paravt-chaos-")) if args.out is None else args.out.absolute()
    bench = _service if args.serve else _training
    try:
        return {"seed": args.seed, "minutes": args.minutes} | asyncio.run(
            bench(args.seed, args.minutes * 60, directory)
        )
    finally:
        if args.out is None:
            shutil.rmtree(directory, ignore_errors=True)


def table(result: dict[str, Any]) -> str:
    """A Markdown table with one row, so that the rows of several seeds fit together."""
    columns = {name: value for name, value in result.items() if not isinstance(value, dict | list)}
    columns |= {"faults": sum(result["faults"].values()), "violations": len(result["violations"])}
    names = [name.replace("_", " ") for name in columns]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|", f"| {' | '.join(map(str, columns.values()))} |"]
    for name, counts in result.items():
        if isinstance(counts, dict):
            lines += ["", f"{name.replace('_', ' ')}: {', '.join(f'{key} {n}' for key, n in counts.items()) or 'none'}"]
    return "\n".join([*lines, *(f"\nVIOLATION {violation}" for violation in result["violations"])])


async def _training(seed: int, seconds: float, directory: Path) -> dict[str, Any]:
    num_hosts, settings = num_hosts_of(seed), settings_of(seed)
    if num_hosts > 1:  # the replay runs all hosts' devices in this process; jax has not been initialized yet
        os.environ["XLA_FLAGS"] = with_devices(os.environ.get("XLA_FLAGS", ""), num_hosts)
    stage = TrainerStage(directory, settings, num_hosts)
    faults, violations = await _under_faults(stage, seed, schedule(seed, seconds, KINDS), seconds)
    violations += unexplained(TRAINER, stage.exits, faults)
    config = load_config(CONFIG, *SETTINGS, *stage.settings, f"run_dir={stage.run_dir}")
    violations += problems_of(stage.run_dir, config.train)
    problems, logged = await replay(stage.run_dir, stage.settings, directory / "replay", num_hosts)
    violations += problems
    if unsampled := logged - stage.sampled:
        violations.append(f"no server sampled {unsampled.total()} of the {logged.total()} generations in the log")
    episodes = [episode for step in episodes_of(stage.run_dir).values() for episode in step]
    missing = [episode["problem"] for episode in episodes if episode["missing"]]
    return {
        "hosts": num_hosts,
        "trainer_starts": stage.num_starts,
        "server_starts": stage.num_server_starts,
        "steps": len(episodes_of(stage.run_dir)),
        "episodes": len(episodes),
        "missing": len(missing),
        "answers_logged": logged.total(),
        "answers_given": stage.sampled.total(),
        "faults": dict(faults.most_common()),
        "reasons": dict(Counter(map(_shortened, missing)).most_common()),
        "exits": _counted(stage.exits),
        "violations": violations,
    }


async def _service(seed: int, seconds: float, directory: Path) -> dict[str, Any]:
    stage = ServiceStage(directory)
    faults, violations = await _under_faults(stage, seed, schedule(seed, seconds, SERVICE_KINDS), seconds)
    violations += unexplained(SERVICE, stage.exits, faults)
    return {
        "service_exits": len(stage.exits),
        "server_starts": stage.num_server_starts,
        "requests": stage.outcomes.total(),
        "answered": stage.outcomes["answered"],
        "faults": dict(faults.most_common()),
        "outcomes": dict(stage.outcomes.most_common()),
        "exits": _counted(stage.exits),
        "violations": violations,
    }


async def _under_faults(
    stage: Stage, seed: int, faults: Sequence[Fault], seconds: float
) -> tuple[Counter[str], list[str]]:
    """Runs a stage from start to end. Returns the faults that found a target, and the violations."""
    in_memory = set(SHARED_MEMORY.iterdir())
    injected = Counter[str]()
    try:
        with Meter("start"):
            await stage.start(seed)
        with Meter("faults", int(seconds), "second") as meter:
            await _inject_all(faults, stage, injected, meter)
        with Meter("recovery"):
            violations = await recovery_problems(stage)
            await stage.finish()
    finally:
        await stage.close()
    violations += stage.violations
    violations += [f"still running: {command}" for command in stage.survivors()]
    violations += [f"left in {SHARED_MEMORY}: {name}" for name in sorted(left_in_memory(in_memory))]
    violations += [f"left in the temporary directory: {path.name}" for path in stage.temporary.glob("paravt*")]
    return injected, violations


async def _inject_all(faults: Sequence[Fault], stage: Stage, injected: Counter[str], meter: Meter) -> None:
    """Starts each fault at its scheduled time, also while earlier faults last; returns when all are over."""
    begin_s = time.monotonic()

    async def inject(fault: Fault) -> None:
        if await stage.inject(fault):
            injected[fault.name] += 1

    async with asyncio.TaskGroup() as tasks:
        for fault in faults:
            await asyncio.sleep(max(0.0, fault.at_s - (time.monotonic() - begin_s)))
            stage.check()
            meter.at(int(fault.at_s), f"{fault.name} ({sum(injected.values())} faults so far)")
            tasks.create_task(inject(fault))


class Open(NamedTuple):
    """Counts of a process's open files and connections."""

    files: int
    connections: int

    @classmethod
    def of(cls, pid: int) -> "Open":
        process, files = Path(f"/proc/{pid}"), []
        for path in (process / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed after it was listed
                files.append(str(path.readlink()))
        inodes = {line.split()[9] for line in (process / "net" / "tcp").read_text().splitlines()[1:]}
        connections = sum(file.removeprefix("socket:[").removesuffix("]") in inodes for file in files)
        return cls(len(files) - connections, connections)


async def recovery_problems(stage: Stage) -> list[str]:
    """Waits until steps complete again, then checks that open files and connections do not keep growing."""
    await stage.steps_more(1)
    begin, end = [await _fewest_open(stage) for _ in range(STEPS_AFTER)]
    files = f"at least {end.files} open files during a step, {begin.files} during the step before it"
    connections = f"at least {end.connections} connections during a step, at most {MOST_CONNECTIONS} are needed"
    wrong = {files: end.files > begin.files + MORE_FILES, connections: end.connections > MOST_CONNECTIONS}
    return [problem for problem, is_true in wrong.items() if is_true]


async def _fewest_open(stage: Stage) -> Open:
    """Returns the minimum counts during the next step, because both vary within a step."""
    samples, step = [], asyncio.create_task(stage.steps_more(1))
    while not step.done():
        await asyncio.wait([step], timeout=SAMPLE_S)
        samples += [Open.of(pid) for (pid,) in stage.targets(TRAINER)]
    await step
    files, connections = zip(*samples, strict=True)
    return Open(min(files), min(connections))


def unexplained(role: str, exits: Sequence[Exit], faults: Counter[str]) -> list[str]:
    """Lists exits that neither a fault nor an error message explains; a process out of memory may print none."""
    return [
        f"the {role} ended with {exit.code}: {exit.error or 'no error message'}"
        for exit in exits
        if not (exit.code in (0, *KILLED) or (exit.code and exit.follows) or _has_message(exit))
        and not faults[f"no memory {role}"]
    ]


def _has_message(exit: Exit) -> bool:
    return exit.code == 1 and bool(exit.error) and "not expected" not in exit.error


def left_in_memory(at_start: set[Path]) -> set[str]:
    """Lists new shared-memory files that no living process uses; files in use belong to other runs."""
    new = {path for path in SHARED_MEMORY.iterdir() if path.name.startswith(LEFT_BY_SERVERS)} - at_start
    in_use = mapped_or_open(process.pid for process in processes())
    unused = set(orphans([SHARED_MEMORY], WEIGHTS_PREFIX)) - at_start
    for path in new:
        with suppress(FileNotFoundError):  # removed by another run
            unused |= {path} if path.lstat().st_ino not in in_use else set()
    return {path.name for path in unused}


def _counted(exits: Sequence[Exit]) -> dict[str, int]:
    names = (f"{exit.code}: {_shortened(exit.error)}" if exit.error else str(exit.code) for exit in exits)
    return dict(Counter(names).most_common())


def _shortened(text: str) -> str:
    """Removes numbers, paths and URLs, so that messages of the same kind are equal."""
    return re.sub(r"http://\S+|/\S+|\d+(\.\d+)?", "…", text)[:100]
