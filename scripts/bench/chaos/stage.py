"""The processes under fault injection: two real SGLang servers behind recorders, and a trainer on one or two hosts.

Every process that exits is restarted, as an operator or a launcher would do.
"""

import asyncio
import json
import os
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from model_port.tiny import make_tiny
from paravt_jax.data.synthetic import make_synthetic
from rollout.supervisor import KILL_NOW, descendants, supervised
from scripts.bench.chaos.faults import OLDER, ROLL_BACK, SECOND, Fault, chosen, inject
from scripts.bench.chaos.recorder import Recorder, Sampled, sampled_by
from scripts.bench.hosts import free_port, with_devices
from scripts.bench.smoke_run import ROOT, is_decoder, num_steps, trainer_command

NUM_SERVERS = 2
CONTEXT_TOKENS = 1024  # as in the smoke run
SETTINGS = (
    "engine.kind=sglang",
    "train.prompts_per_step=3",  # more than the number of broken videos
    "train.max_missing_frac=0.99",
    "rollout.turn_deadline_s=40",
    "video.max_pixels=6144",  # the videos' size, and the parity gate's
    "rollout.prompts.system=Call crop_video.",
    "rollout.prompts.system_has_tools=true",  # the schema would be most of the tokens
    "rollout.prompts.with_tool=Look, or answer.",
)
# At this rate weights one version behind have a KL of 5e-3 or more, the right ones 1e-12; checks.MAX_KL is between.
# A staleness of 1 allows such tokens, and one such update would change the tiny model too much.
FRESH = ("optim.learning_rate=1e-4", "train.max_staleness=0")
STALE = ("optim.learning_rate=1e-5", "train.max_staleness=1")
ADAPTERS = ("lora.rank=4",)
TWO_HOSTS = ("mesh.fsdp=2", "pack.num_rows=2")
START_S, STOP_S = 450.0, 180.0
LAST_HOST_S = 100.0  # after one host exits, the others must exit within this time
MARK_VARIABLE = "PARAVT_CHAOS"  # in the environment of every process of a stage
POLL_S = 0.2


class Exit(NamedTuple):
    """How a process ended, and its error line if it printed one."""

    code: int
    error: str
    follows: bool = False  # another host exited first


def num_hosts_of(seed: int) -> int:
    return 2 if seed % 5 == 3 else 1


def settings_of(seed: int) -> tuple[str, ...]:
    hosts = TWO_HOSTS if num_hosts_of(seed) > 1 else ()
    return (*SETTINGS, *(STALE if seed % 2 else FRESH), *(ADAPTERS if seed % 3 == 2 else ()), *hosts)


class Stage:
    """Two servers behind recorders. Use `await start(seed)`, then `await finish()`; always `await close()`."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.data, self.videos = directory / "data", directory / "data" / "videos"
        self.temporary = directory / "tmp"
        self.num_server_starts = 0
        self.violations: list[str] = []
        self.model = directory / "model"
        self._mark = uuid.uuid4().hex
        self._closing = False
        self._servers: dict[int, asyncio.subprocess.Process] = {}
        self._recorders = [Recorder(self.record, directory / f"published{number}") for number in range(NUM_SERVERS)]
        self._starts_older = [False] * NUM_SERVERS
        self._keepers: list[asyncio.Task[None]] = []

    def record(self, sent: dict[str, Any], answer: dict[str, Any]) -> None:
        """Handles each generation of a server."""

    @property
    def urls(self) -> list[str]:
        return [recorder.url for recorder in self._recorders]

    async def start(self, seed: int) -> None:
        """Starts the servers; returns when they answer."""
        self.temporary.mkdir(parents=True)
        make_tiny(self.model)
        break_videos(make_synthetic(self.data, seed))
        for number, recorder in enumerate(self._recorders):
            await recorder.start()
            self._keepers.append(asyncio.create_task(self._keep_server(number)))
        await self.until(lambda: all(recorder.server_url for recorder in self._recorders), "the servers did not start")

    def fronts(self) -> Sequence[asyncio.subprocess.Process]:
        """Returns the processes that use the servers: the trainer's hosts, or the service."""
        raise NotImplementedError

    async def steps_more(self, number: int) -> None:
        """Waits for `number` more steps."""
        raise NotImplementedError

    def targets(self, role: str) -> list[list[int]]:
        """Returns the processes of each target with this role; the process that a user started comes first."""
        started = self._servers.values() if role == "server" else self.fronts()
        below = [descendants(process.pid) for process in started if process.returncode is None]
        below = [pids for pids in below if pids]  # a process that has just started or exited may have no targets
        if role == "server":
            return below
        if role != "decoder":
            return [pids[:1] for pids in below]
        decoders = []
        for pid in [pid for pids in below for pid in pids]:
            with suppress(OSError):  # it has exited
                decoders += [[pid]] if is_decoder(pid) else []
        return decoders

    async def inject(self, fault: Fault) -> bool:
        """Injects a fault and waits until it is over. Returns False if it found no target."""
        return await inject(fault, self.targets(fault.role), self.videos)

    def check(self) -> None:
        """Raises the error of a task that keeps a process running."""
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()

    async def finish(self) -> None:
        """Stops trainer or service as a user does, then the servers; returns when all have exited."""
        self._closing = True
        for front in self.fronts():
            if front.returncode is None:
                front.send_signal(signal.SIGTERM)
        await self._ended_all(self._keepers[NUM_SERVERS:], "trainer or service did not stop")
        for server in self._servers.values():
            if server.returncode is None:
                server.send_signal(signal.SIGTERM)
        await self._ended_all(self._keepers, "the servers did not stop")

    async def close(self) -> None:
        self._closing = True
        for keeper in self._keepers:
            keeper.cancel()
        for process in (*self._servers.values(), *self.fronts()):
            await kill(process)
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for recorder in self._recorders:
            await recorder.close()

    def survivors(self) -> list[str]:
        """Lists the command lines of processes that still run."""
        mark, commands = f"{MARK_VARIABLE}={self._mark}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    commands.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return commands

    async def _keep_server(self, number: int) -> None:
        limits = ("--context-length", str(CONTEXT_TOKENS), "--max-total-tokens", str(16 * CONTEXT_TOKENS))
        command = [sys.executable, "-m", "rollout.serve", "--model", str(self.model), "--json", *limits]
        recorder = self._recorders[number]
        while not self._closing:
            self.num_server_starts += 1
            with (self.directory / f"server{number}.log").open("ab") as log:
                server = await self.run(command, stdout=asyncio.subprocess.PIPE, stderr=log)
            self._servers[number] = server
            assert server.stdout is not None
            if line := await server.stdout.readline():
                url = json.loads(line)["url"]
                if self._starts_older[number]:
                    self._starts_older[number] = False
                    await recorder.roll_back(url)
                recorder.server_url = url
            await server.wait()

    async def run(
        self, command: Sequence[str], num_devices: int = 1, *, stdout: Any = None, stderr: Any = None
    ) -> asyncio.subprocess.Process:
        environment = os.environ | {
            MARK_VARIABLE: self._mark,
            "TMPDIR": str(self.temporary),
            "XLA_FLAGS": with_devices(os.environ.get("XLA_FLAGS", ""), num_devices),
        }
        return await asyncio.create_subprocess_exec(
            *supervised(command),  # it exits with this process
            cwd=ROOT,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            limit=2**20,
        )

    async def until(self, condition: Callable[[], bool], otherwise: str) -> None:
        give_up_s = time.monotonic() + START_S
        while not condition():
            self.check()
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"{otherwise} within {START_S:g} s; see {self.directory}")
            await asyncio.sleep(POLL_S)

    async def _ended_all(self, keepers: Sequence[asyncio.Task[None]], otherwise: str) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*keepers)
        except TimeoutError:
            raise RuntimeError(f"{otherwise} within {STOP_S:g} s; see {self.directory}") from None


class TrainerStage(Stage):
    """The servers and a trainer; its hosts are processes on this machine."""

    def __init__(self, directory: Path, settings: Sequence[str], num_hosts: int = 1):
        super().__init__(directory)
        self.run_dir = directory / "run"
        self.sampled: Counter[Sampled] = Counter()
        self.exits: list[Exit] = []
        self.num_starts = 0
        self._settings, self._num_hosts = settings, num_hosts
        self._hosts: list[asyncio.subprocess.Process] = []
        self._num_seconds = 0

    def record(self, sent: dict[str, Any], answer: dict[str, Any]) -> None:
        self.sampled[sampled_by(sent, answer)] += 1

    @property
    def settings(self) -> list[str]:
        """The run's settings without its servers' addresses."""
        return [*self._settings, f"model.path={self.model}", f"data.train={self.data / 'train.jsonl'}"]

    async def start(self, seed: int) -> None:
        """Starts servers and trainer; returns after the first step."""
        await super().start(seed)
        self._keepers.append(asyncio.create_task(self._keep_trainer()))
        await self.steps_more(1)

    def fronts(self) -> Sequence[asyncio.subprocess.Process]:
        return self._hosts

    async def steps_more(self, number: int) -> None:
        goal = num_steps(self.run_dir) + number
        await self.until(lambda: num_steps(self.run_dir) >= goal, f"the trainer did not make {number} more steps")

    async def inject(self, fault: Fault) -> bool:
        if fault.role == SECOND:
            await self._second_trainer(fault.lasts_s)
            return True
        number = chosen(fault, range(NUM_SERVERS))
        if fault.kind == ROLL_BACK:
            return await self.roll_back(number)
        if fault.kind == OLDER:
            self._starts_older[number] = True
            await kill(self._servers[number])
            return True
        return await super().inject(fault)

    async def roll_back(self, number: int, *, claim_current: bool = False) -> bool:
        return await self._recorders[number].roll_back(claim_current=claim_current)

    @property
    def _command(self) -> list[str]:
        return trainer_command(self.run_dir, [*self.settings, f"engine.urls=[{','.join(self.urls)}]"])

    async def _second_trainer(self, seconds: float) -> None:
        """Starts another run's trainer, which may take the servers only if the first trainer does not respond."""
        self._num_seconds += 1
        run_dir = self.run_dir.with_name(f"second{self._num_seconds}")
        command = [f"run_dir={run_dir}" if word == f"run_dir={self.run_dir}" else word for word in self._command]
        with run_dir.with_suffix(".log").open("wb") as log:
            second = await self.run(command, self._num_hosts, stderr=log)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await second.wait()
        finally:
            await kill(second)

    async def _keep_trainer(self) -> None:
        while not self._closing:
            self.num_starts += 1
            joint = [f"hosts.coordinator=127.0.0.1:{free_port()}", f"hosts.num={self._num_hosts}"]
            each = [[*joint, f"hosts.index={index}"] for index in range(self._num_hosts)]
            commands = [[*self._command, *(own if self._num_hosts > 1 else [])] for own in each]
            self._hosts = [await self.run(command, stderr=asyncio.subprocess.PIPE) for command in commands]
            await self._all_hosts_end(num_steps(self.run_dir))

    async def _all_hosts_end(self, num_before: int) -> None:
        """Waits as a launcher does: after the first exit it gives the other hosts some time, then kills them.

        Having to kill them is a violation, unless they were still starting, because starting hosts wait for longer.
        """
        ends = [asyncio.create_task(self._end_of(number, host)) for number, host in enumerate(self._hosts)]
        first, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        _, running = await asyncio.wait(ends, timeout=LAST_HOST_S)
        for number, host in enumerate(self._hosts):
            if ends[number] in running:
                await kill(host)
                if num_steps(self.run_dir) > num_before:
                    self.violations.append(f"host {number} ran {LAST_HOST_S:g} s longer than another one")
        exits = [await end for end in ends]
        self.exits += [exit._replace(follows=end not in first) for exit, end in zip(exits, ends, strict=True)]

    async def _end_of(self, number: int, host: asyncio.subprocess.Process) -> Exit:
        """Copies a host's output to its log until the host exits."""
        error = ""
        assert host.stderr is not None
        with (self.directory / f"trainer{number}.log").open("ab") as log:
            async for line in host.stderr:
                log.write(line)
                log.flush()
                if line.startswith((b"error: ", b"stopped again")):
                    error = line.decode(errors="replace").strip()
        return Exit(await host.wait(), error)


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kills a process and all its descendants: its supervisor forwards this signal."""
    if process.returncode is None:
        process.send_signal(KILL_NOW)
        await process.wait()


def break_videos(train: Path) -> None:
    """Adds two prompts with broken videos: a truncated video, and a file that is not a video."""
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    content_of_first = (train.parent / rows[0]["videos"][0]["video"]).read_bytes()
    for name, content in (("cut", content_of_first[: len(content_of_first) // 2]), ("noise", bytes(range(256)) * 64)):
        path = train.parent / "videos" / f"{name}.mp4"
        path.write_bytes(content)
        rows.append({**rows[0], "videos": [{"video": f"videos/{path.name}"}]})
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
