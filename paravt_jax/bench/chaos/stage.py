"""Two real servers behind recorders and one trainer, each started again whenever it ends, as an operator would."""

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
from typing import NamedTuple

from model_port.tiny import make_tiny
from paravt_jax.bench.chaos.recorder import Recorder, Sampled
from paravt_jax.bench.smoke_run import ROOT, is_decoder, num_steps, trainer_command
from paravt_jax.data.synthetic import make_synthetic
from rollout.supervisor import KILL_NOW, descendants, supervised

NUM_SERVERS = 2
CONTEXT_TOKENS = 1024  # of the smoke run
SETTINGS = (
    "engine.kind=sglang",
    "train.prompts_per_step=3",  # more than there are broken videos
    "train.max_missing_frac=0.99",
    "rollout.turn_deadline_s=40",
    "rollout.call_deadline_s=25",
    "rollout.min_video_deadline_s=10",
    "video.max_pixels=6144",  # as many as the videos have: with more, the gate of every start shows larger pictures
    "rollout.prompts.system=Call crop_video.",
    "rollout.prompts.system_has_tools=true",  # the schema would be most of what every step and its replay compute
    "rollout.prompts.with_tool=Look, or answer.",
    "log.tensorboard=false",
)
# At this rate tokens of the version before have a KL of 5e-3 or more, those of the right one 1e-12: checks.MAX_KL lies
# between. With staleness they are allowed, and the tiny model would be another policy after one such update.
FRESH = ("optim.learning_rate=1e-4", "train.max_staleness=0")
STALE = ("optim.learning_rate=1e-5", "train.max_staleness=1")
ADAPTERS = ("lora.rank=4",)
START_S, STOP_S = 450.0, 180.0
MARK_VARIABLE = "PARAVT_CHAOS"  # in the environment of whatever belongs to a stage
POLL_S = 0.2


class Ended(NamedTuple):
    """How the trainer ended once, and why if it said so."""

    code: int
    error: str


def settings_of(seed: int) -> tuple[str, ...]:
    return (*SETTINGS, *(STALE if seed % 2 else FRESH), *(ADAPTERS if seed % 3 == 2 else ()))


class Stage:
    """Use `await start()`, then `await finish()`; `close` whatever happened."""

    def __init__(self, directory: Path, settings: Sequence[str]):
        self.run_dir, self.log = directory / "run", directory / "trainer.log"
        self.data, self.videos = directory / "data", directory / "data" / "videos"
        self.temporary = directory / "tmp"
        self.sampled: Counter[Sampled] = Counter()
        self.ended: list[Ended] = []
        self.num_server_starts = 0
        self._model = directory / "model"
        self._settings = settings
        self._num_seconds = 0
        self._mark = uuid.uuid4().hex
        self._closing = False
        self._trainer: asyncio.subprocess.Process | None = None
        self._servers: dict[int, asyncio.subprocess.Process] = {}
        self._recorders = [Recorder(self.sampled) for _ in range(NUM_SERVERS)]
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def settings(self) -> list[str]:
        """Of the run, but for the addresses of its servers."""
        return [*self._settings, f"model.path={self._model}", f"data.train={self.data / 'train.jsonl'}"]

    async def start(self, seed: int) -> None:
        """Returns after the first step."""
        self.temporary.mkdir(parents=True)
        make_tiny(self._model)
        break_videos(make_synthetic(self.data, seed))
        for number, recorder in enumerate(self._recorders):
            await recorder.start()
            self._keepers.append(asyncio.create_task(self._keep_server(number)))
        await self._until(lambda: all(recorder.server_url for recorder in self._recorders), "the servers did not start")
        self._keepers.append(asyncio.create_task(self._keep_trainer()))
        await self.steps_more(1)

    async def steps_more(self, number: int) -> None:
        """Until the run has logged so many steps more."""
        wanted = num_steps(self.run_dir) + number
        await self._until(lambda: num_steps(self.run_dir) >= wanted, f"no {number} steps were made")

    def families(self, role: str) -> list[list[int]]:
        """The processes of each server, of each decoder, of the trainer; those that a user started come first."""
        if role == "server":
            return [descendants(server.pid) for server in self._servers.values() if server.returncode is None]
        if self._trainer is None or self._trainer.returncode is not None:
            return []
        below = descendants(self._trainer.pid)
        if role == "trainer":
            return [below[:1]] if below else []
        with suppress(OSError):
            return [[pid] for pid in below if is_decoder(pid)]
        return []

    @property
    def _urls(self) -> str:
        return f"engine.urls=[{','.join(recorder.url for recorder in self._recorders)}]"

    async def second_trainer(self, seconds: float) -> None:
        """One of another run, which may have the servers only while the first one gives no sign of life."""
        self._num_seconds += 1
        run_dir = self.run_dir.with_name(f"second{self._num_seconds}")
        with run_dir.with_suffix(".log").open("wb") as log:
            second = await self._run(trainer_command(run_dir, [*self.settings, self._urls]), stderr=log)
        try:
            async with asyncio.timeout(seconds):
                await second.wait()
        except TimeoutError:
            pass  # it is killed
        finally:
            if second.returncode is None:
                second.send_signal(KILL_NOW)
                await second.wait()

    def check(self) -> None:
        """Raises what made somebody give up."""
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()

    async def finish(self) -> None:
        """Stops the trainer as a user does, then the servers, and returns when they ended well."""
        self._closing = True
        if self._trainer is not None and self._trainer.returncode is None:
            self._trainer.send_signal(signal.SIGTERM)
        await self._ended_all(self._keepers[-1:], "the trainer did not stop")
        for server in self._servers.values():
            if server.returncode is None:
                server.send_signal(signal.SIGTERM)
        await self._ended_all(self._keepers, "the servers did not stop")

    async def close(self) -> None:
        self._closing = True
        for keeper in self._keepers:
            keeper.cancel()
        for process in (*self._servers.values(), self._trainer):
            if process is not None and process.returncode is None:
                process.send_signal(KILL_NOW)
                await process.wait()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for recorder in self._recorders:
            await recorder.close()

    def left(self) -> list[str]:
        """Processes that still run, by what they are called."""
        mark, found = f"{MARK_VARIABLE}={self._mark}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return found

    async def _keep_server(self, number: int) -> None:
        limits = ("--context-length", str(CONTEXT_TOKENS), "--max-total-tokens", str(16 * CONTEXT_TOKENS))
        command = [sys.executable, "-m", "rollout.serve", "--model", str(self._model), "--json", *limits]
        while not self._closing:
            self.num_server_starts += 1
            with self.log.with_name(f"server{number}.log").open("ab") as log:
                server = await self._run(command, stdout=asyncio.subprocess.PIPE, stderr=log)
            self._servers[number] = server
            assert server.stdout is not None
            if line := await server.stdout.readline():
                self._recorders[number].server_url = json.loads(line)["url"]
            await server.wait()

    async def _keep_trainer(self) -> None:
        command = trainer_command(self.run_dir, [*self.settings, self._urls])
        while not self._closing:
            self._trainer = trainer = await self._run(command, stderr=asyncio.subprocess.PIPE)
            said = await self._last_words(trainer)
            code = await trainer.wait()
            self.ended.append(Ended(code, said))

    async def _last_words(self, trainer: asyncio.subprocess.Process) -> str:
        """Why the trainer ended, if it says so; its log gets everything."""
        error = ""
        assert trainer.stderr is not None
        with self.log.open("ab") as log:
            async for line in trainer.stderr:
                log.write(line)
                log.flush()
                if line.startswith((b"error: ", b"stopped again")):
                    error = line.decode(errors="replace").strip()
        return error

    async def _run(self, command: Sequence[str], **streams: object) -> asyncio.subprocess.Process:
        environment = os.environ | {MARK_VARIABLE: self._mark, "TMPDIR": str(self.temporary)}
        return await asyncio.create_subprocess_exec(
            *supervised(command),  # whatever ends us ends them
            cwd=ROOT,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            limit=2**20,
            **streams,  # type: ignore[arg-type]
        )

    async def _until(self, true: Callable[[], bool], otherwise: str) -> None:
        give_up_s = time.monotonic() + START_S
        while not true():
            self.check()
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"{otherwise} within {START_S:g} s; see {self.log.parent}")
            await asyncio.sleep(POLL_S)

    async def _ended_all(self, keepers: Sequence[asyncio.Task[None]], otherwise: str) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*keepers)
        except TimeoutError:
            raise RuntimeError(f"{otherwise} within {STOP_S:g} s; see {self.log.parent}") from None


def break_videos(train: Path) -> None:
    """Two more questions, about a video that ends too early and one that is none."""
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    whole = (train.parent / rows[0]["videos"][0]["video"]).read_bytes()
    for name, content in (("cut", whole[: len(whole) // 2]), ("noise", bytes(range(256)) * 64)):
        path = train.parent / "videos" / f"{name}.mp4"
        path.write_bytes(content)
        rows.append({**rows[0], "videos": [{"video": f"videos/{path.name}"}]})
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
