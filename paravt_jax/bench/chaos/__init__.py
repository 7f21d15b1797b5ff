"""The smoke run while everything around it fails: two real SGLang servers, and a schedule of faults that a seed gives.

Servers, decoders and the trainer are killed, stopped, slowed down, restarted, left without memory, disk or open files;
two videos are broken, now and then all are gone, and another run's trainer wants the servers. In the end nothing may be
lost, learnt twice, out of order, sampled with other weights than its label says, other than the servers sampled it,
other than its log leads to, or left behind.
"""

import argparse
import asyncio
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from model_port.output_dir import check_local
from model_port.progress import Meter
from paravt_jax.bench.chaos.checks import episodes_of, problems_of
from paravt_jax.bench.chaos.faults import SECOND, Fault, happen, schedule
from paravt_jax.bench.chaos.replay import replay
from paravt_jax.bench.chaos.stage import NUM_SERVERS, Ended, Stage, settings_of
from paravt_jax.bench.smoke_run import CONFIG, SETTINGS, check_clone
from paravt_jax.config import load_config
from rollout.engine.publishing import orphans
from rollout.supervisor import SHARED_MEMORY, mapped_or_open, processes

SEED_HELP = "of the schedule (default 0); odd: one step of staleness; one of three (2, 5, …): adapters alone train"
STEPS_AFTER = 2  # that are compared when it is quiet again
MORE_FILES = 8  # that a trainer may have open in the later one, connections apart
# Every request of a step may hold a connection, and idle ones are kept for two seconds: longer than a step may take. So
# there may be as many to each of the servers as 3 groups of 4 members with 2 calls make at once, in two steps at once.
MOST_CONNECTIONS = NUM_SERVERS * 3 * 4 * 2 * 2
SAMPLE_S = 0.2
KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)
LEFT_BY_SERVERS = ("psm_", "sem.", "torch_", "sglang")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=20, help="of faults (default 20)")
    parser.add_argument("--seed", type=int, default=0, help=SEED_HELP)
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the run and its logs here (default: nowhere)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    check_clone()
    if args.minutes <= 0:
        raise ValueError(f"--minutes {args.minutes} must be greater than 0")
    check_local(args.out or "")
    if args.out is not None and args.out.exists():
        raise ValueError(f"{args.out} is there already; move it away, or choose another --out")
    directory = Path(tempfile.mkdtemp(prefix="paravt-chaos-")) if args.out is None else args.out.absolute()
    try:
        return asyncio.run(_chaos(args.seed, args.minutes * 60, directory))
    finally:
        if args.out is None:
            shutil.rmtree(directory, ignore_errors=True)


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table of one row, so that those of several seeds fit together."""
    columns = {
        "seed": result["seed"],
        "minutes": result["minutes"],
        "faults": sum(result["faults"].values()),
        "starts of the trainer": result["trainer_starts"],
        "of servers": result["server_starts"],
        "steps": result["steps"],
        "episodes": result["episodes"],
        "missing": result["missing"],
        "answers logged": result["answers_logged"],
        "given": result["answers_given"],
        "violations": len(result["violations"]),
    }
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", f"| {' | '.join(map(str, columns.values()))} |"]
    for title, counts in (("Faults", "faults"), ("Missing", "reasons"), ("Ends of the trainer", "trainer_ends")):
        lines += ["", f"{title}: {', '.join(f'{name} {number}' for name, number in result[counts].items()) or 'none'}"]
    return "\n".join([*lines, *(f"\nVIOLATION {violation}" for violation in result["violations"])])


async def _chaos(seed: int, seconds: float, directory: Path) -> dict[str, Any]:
    in_memory = set(SHARED_MEMORY.iterdir())
    stage, happened, violations = Stage(directory, settings_of(seed)), Counter[str](), []
    try:
        with Meter("two servers and a trainer start"):
            await stage.start(seed)
        with Meter("faults", int(seconds), "second") as meter:
            await _faults(schedule(seed, seconds), stage, happened, meter, seconds)
        with Meter("quiet again"):
            violations += await recovers(stage)
            await stage.finish()
    finally:
        await stage.close()
    violations += [f"still running: {command}" for command in stage.left()]
    violations += [f"left in {SHARED_MEMORY}: {name}" for name in sorted(left_in_memory(in_memory))]
    violations += [f"left in the temporary directory: {path.name}" for path in stage.temporary.glob("paravt-*")]
    violations += [
        f"the trainer ended with {ended.code}: {ended.error or 'it said nothing'}"
        for ended in stage.ended
        if not _explained(ended, happened)
    ]
    settings = stage.settings
    config = load_config(CONFIG, *SETTINGS, *settings, f"run_dir={stage.run_dir}")
    violations += problems_of(stage.run_dir, config.train)
    problems, logged = await replay(stage.run_dir, settings, directory / "replay")
    violations += problems
    if invented := logged - stage.sampled:
        violations.append(f"{invented.total()} of {logged.total()} logged answers were given by no server")
    members = [episode for episodes in episodes_of(stage.run_dir).values() for episode in episodes]
    missing = [episode["problem"] for episode in members if episode["missing"]]
    return {
        "seed": seed,
        "minutes": seconds / 60,
        "faults": dict(happened.most_common()),
        "trainer_starts": len(stage.ended),
        "trainer_ends": dict(Counter(_ended(ended.code, ended.error) for ended in stage.ended).most_common()),
        "server_starts": stage.num_server_starts,
        "steps": len(episodes_of(stage.run_dir)),
        "episodes": len(members),
        "missing": len(missing),
        "reasons": dict(Counter(map(_in_short, missing)).most_common()),
        "answers_logged": logged.total(),
        "answers_given": stage.sampled.total(),
        "violations": violations,
    }


async def _faults(faults: list[Fault], stage: Stage, happened: Counter[str], meter: Meter, seconds: float) -> None:
    """One after the other begins, whether or not those before it are over; returns when all are."""
    began_s = time.monotonic()

    async def one(fault: Fault) -> None:
        if fault.role == SECOND:
            await stage.second_trainer(fault.lasts_s)
            happened[fault.name] += 1
        elif await happen(fault, stage.families(fault.role), stage.videos):
            happened[fault.name] += 1

    async with asyncio.TaskGroup() as tasks:
        for fault in faults:
            await asyncio.sleep(max(0.0, fault.at_s - (time.monotonic() - began_s)))
            stage.check()
            meter.at(int(fault.at_s), f"{fault.name} ({sum(happened.values())} faults so far)")
            tasks.create_task(one(fault))


class Open(NamedTuple):
    """What a process holds at one time."""

    files: int
    connections: int

    @classmethod
    def of(cls, pid: int) -> "Open":
        process, files = Path(f"/proc/{pid}"), []
        for path in (process / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                files.append(str(path.readlink()))
        inodes = {line.split()[9] for line in (process / "net" / "tcp").read_text().splitlines()[1:]}
        connections = sum(file.removeprefix("socket:[").removesuffix("]") in inodes for file in files)
        return cls(len(files) - connections, connections)


async def recovers(stage: Stage) -> list[str]:
    """The run goes on by itself, and its last process holds no more than it began with, or than its requests need."""
    await stage.steps_more(1)
    begin, end = [await _fewest_open(stage) for _ in range(STEPS_AFTER)]
    files = f"the trainer has at least {end.files} open files during a step, during the one before it had {begin.files}"
    connections = f"the trainer has at least {end.connections} connections during a step, it needs {MOST_CONNECTIONS}"
    wrong = {files: end.files > begin.files + MORE_FILES, connections: end.connections > MOST_CONNECTIONS}
    return [problem for problem, is_true in wrong.items() if is_true]


async def _fewest_open(stage: Stage) -> Open:
    """At any time during the next step: both come and go."""
    held, step = [], asyncio.create_task(stage.steps_more(1))
    while not step.done():
        await asyncio.wait([step], timeout=SAMPLE_S)
        held += [Open.of(pid) for (pid,) in stage.families("trainer")]
    await step
    files, connections = zip(*held, strict=True)
    return Open(min(files), min(connections))


def _explained(ended: Ended, happened: Counter[str]) -> bool:
    """It was stopped or killed, or says in its own words why it ended; without memory nobody can promise words."""
    said = ended.code == 1 and bool(ended.error) and "not expected" not in ended.error
    return ended.code in (0, *KILLED) or said or happened["no memory trainer"] > 0


def left_in_memory(before: set[Path]) -> set[str]:
    """What such programs leave there when they are killed; what a living process uses belongs to another run."""
    new = {path for path in SHARED_MEMORY.iterdir() if path.name.startswith(LEFT_BY_SERVERS)} - before
    used, left = mapped_or_open(process.pid for process in processes()), set(orphans([SHARED_MEMORY])) - before
    for path in new:
        with suppress(FileNotFoundError):  # another run has removed it
            left |= {path} if path.lstat().st_ino not in used else set()
    return {path.name for path in left}


def _ended(code: int, error: str) -> str:
    return f"{code}: {_in_short(error)}" if error else str(code)


def _in_short(text: str) -> str:
    """Without what differs between two of a kind."""
    return re.sub(r"http://\S+|/\S+|\d+(\.\d+)?", "…", text)[:100]
