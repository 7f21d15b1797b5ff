"""Publishes new weights to running servers, by one of two routes.

`disk`: safetensors are written once, to /dev/shm if they fit or to a directory that servers of other hosts can read,
and every server reads them. `tensors`: a small process in the servers' environment sends buckets of torch tensors,
because this package has no torch; on a GPU the bucket's memory is shared instead of sent over HTTP. Both routes leave
the weights' label on a server; `disk` does so in the same step of the server's scheduler.
"""

import asyncio
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollout.engine.http import HttpClient
from rollout.engine.labels import Label, publish_label
from rollout.engine.protocol import EngineError, Weights
from rollout.engine.settings import ServerState, SGLangSettings
from rollout.supervisor import SHARED_MEMORY

WEIGHTS_PREFIX = "paravt-weights-"
SPARE_FRAC = 0.1  # part of a disk's space that is left free
BUCKET_BYTES = 2**30
STAGING_START_S = 120.0

Problems = dict[str, str]  # by URL, of the servers that failed


class Route(Protocol):
    async def send(self, urls: Sequence[str], weights: Weights, label: Label, deadline_s: float) -> Problems:
        """Loads the weights into every server and labels them."""
        ...

    async def close(self) -> None: ...


async def load_weights(
    client: HttpClient,
    route: Route,
    servers: Sequence[ServerState],
    weights: Weights,
    label: Label,
    settings: SGLangSettings,
) -> Problems:
    """Pauses all servers, flushes their caches, loads the weights, resumes.

    Running requests wait; their keys and values are recomputed afterwards.
    """
    problems: Problems = {}

    def healthy() -> list[str]:
        return [server.url for server in servers if server.url not in problems]

    def post(path: str, body: Any) -> Callable[[str], Coroutine[Any, Any, Any]]:
        return lambda url: client.post(f"{url}{path}", body, settings.control_deadline_s)

    try:
        for server in servers:
            server.loading = server.paused = True
        problems |= await post_all(healthy(), post("/pause_generation", {"mode": "retract"}))
        # Keys and values of the old weights. SGLang refuses to flush while a request runs, hence the pause.
        problems |= await post_all(healthy(), post("/flush_cache", {}))
        try:
            problems |= await route.send(healthy(), weights, label, settings.load_deadline_s)
        except EngineError as problem:  # their weights may be partly loaded
            problems |= dict.fromkeys(healthy(), str(problem))
    finally:
        problems |= await post_all(healthy(), post("/continue_generation", {}))
        for server in servers:
            server.loading, server.paused = False, server.url in problems
    return problems


async def post_all(urls: Sequence[str], call: Callable[[str], Coroutine[Any, Any, Any]]) -> Problems:
    """Makes the same call to all servers at once."""
    answers = await asyncio.gather(*(call(url) for url in urls), return_exceptions=True)
    problems = {}
    for url, answer in zip(urls, answers, strict=True):
        if isinstance(answer, EngineError):
            problems[url] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        elif isinstance(answer, dict) and answer.get("success") is False:
            problems[url] = f"{url}: {answer.get('message')}"
    return problems


class DiskRoute:
    """One directory of safetensors for all servers. It is kept until the next weights, or until this process ends."""

    def __init__(self, client: HttpClient, directory: str | Path = ""):
        """Without a directory the weights go to this host's memory, or to its disk if they do not fit there."""
        self._client = client
        self._parents = [Path(directory)] if directory else [SHARED_MEMORY, Path(tempfile.gettempdir())]
        self._written: tuple[int, Weights, Path] | None = None
        self._lock = ExitStack()  # on that directory

    async def send(self, urls: Sequence[str], weights: Weights, label: Label, deadline_s: float) -> Problems:
        assert label.version is not None
        directory = await self._directory(weights, label.version)
        body = {"model_path": str(directory), "flush_cache": False, "weight_version": str(label)}
        return await post_all(urls, lambda url: self._client.post(f"{url}/update_weights_from_disk", body, deadline_s))

    async def _directory(self, weights: Weights, version: int) -> Path:
        """The directory of this version; it is written once, and servers that come back later read it again."""
        if self._written is not None and self._written[:2] == (version, weights):
            return self._written[2]
        self._remove()
        for orphan in orphans(self._parents):
            shutil.rmtree(orphan, ignore_errors=True)
        parent = next((parent for parent in self._parents if _fits(parent, weights.num_bytes)), None)
        if parent is None:
            tried = " nor into ".join(map(str, self._parents))
            raise EngineError(
                f"{weights.num_bytes / 2**30:.1f} GiB of weights do not fit into {tried}; free some space there, or "
                f"name another directory with engine.weights_dir"
            )
        directory = self._make_locked(parent, version)
        self._written = (version, weights, directory)
        try:
            await asyncio.to_thread(weights.write, directory)
        except BaseException:
            self._remove()
            raise
        return directory

    def _make_locked(self, parent: Path, version: int) -> Path:
        """A new directory that stays locked for as long as this process lives."""
        hidden = Path(tempfile.mkdtemp(prefix=".paravt-", dir=parent))
        self._lock = ExitStack()
        self._lock.enter_context(_locked(hidden))
        return hidden.rename(parent / f"{WEIGHTS_PREFIX}v{version}-{hidden.name.removeprefix('.paravt-')}")

    def _remove(self) -> None:
        if self._written is not None:
            shutil.rmtree(self._written[2], ignore_errors=True)
            self._lock.close()
            self._written = None

    async def close(self) -> None:
        await asyncio.to_thread(self._remove)


class TensorRoute:
    """Sends buckets through a file in shared memory to the process `rollout.staging`, which forwards them."""

    def __init__(self, client: HttpClient, python: Path, env: dict[str, str], bucket_bytes: int = BUCKET_BYTES):
        """`python` and `env` are the servers'."""
        self._client, self._python, self._env, self._bucket_bytes = client, python, env, bucket_bytes
        self._process: asyncio.subprocess.Process | None = None

    async def send(self, urls: Sequence[str], weights: Weights, label: Label, deadline_s: float) -> Problems:
        process = await self._staging_process()
        problems = await post_all(urls, lambda url: self._client.post(f"{url}/begin_weight_update", {}, deadline_s))
        with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:  # unnamed, so that a crash leaves nothing behind
            buckets = _buckets(weights, self._bucket_bytes)
            while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
                healthy = [url for url in urls if url not in problems]
                if not healthy:
                    return problems
                tensors = await asyncio.to_thread(_write_bucket, file, bucket)
                name = f"/proc/{os.getpid()}/fd/{file.fileno()}"
                command = {"file": name, "tensors": tensors, "urls": healthy, "deadline_s": deadline_s}
                problems |= await _command(process, command, deadline_s)
        healthy = [url for url in urls if url not in problems]
        problems |= await post_all(healthy, lambda url: self._client.post(f"{url}/end_weight_update", {}, deadline_s))
        healthy = [url for url in urls if url not in problems]
        return problems | await post_all(healthy, lambda url: publish_label(self._client, url, label, deadline_s))

    async def _staging_process(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                self._python,
                Path(__file__).parents[1] / "staging.py",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=self._env,
                limit=2**20,
            )
            await _reply(self._process, STAGING_START_S)
        return self._process

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()  # it has only copies
            await self._process.wait()


def orphans(parents: Sequence[Path]) -> Iterator[Path]:
    """Weights of killed processes; they take the memory that new weights need."""
    for directory in (path for parent in parents for path in parent.glob(f"{WEIGHTS_PREFIX}*")):
        with suppress(OSError), _locked(directory):  # OSError: in use, another user's, or gone
            yield directory


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """The kernel drops the lock when the process ends; it survives a rename of the directory."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


def _fits(directory: Path, num_bytes: int) -> bool:
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        return False
    usage = shutil.disk_usage(directory)
    return num_bytes + SPARE_FRAC * usage.total < usage.free


def _buckets(weights: Weights, max_bytes: int) -> Iterator[list[tuple[str, np.ndarray]]]:
    """Groups of tensors up to `max_bytes`; a larger tensor gets its own bucket."""
    bucket, num_bytes = [], 0
    for name, tensor in weights.tensors():
        if bucket and num_bytes + tensor.nbytes > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def _write_bucket(file: Any, bucket: list[tuple[str, np.ndarray]]) -> list[dict[str, Any]]:
    """The name, dtype, shape and bytes of each tensor in the file."""
    tensors, start = [], 0
    file.seek(0)
    for name, tensor in bucket:
        end = start + tensor.nbytes
        file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        tensors.append({"name": name, "dtype": str(tensor.dtype), "shape": tensor.shape, "start": start, "end": end})
        start = end
    file.truncate()
    file.flush()
    return tensors


async def _command(process: asyncio.subprocess.Process, command: dict[str, Any], deadline_s: float) -> Problems:
    assert process.stdin is not None
    with suppress(ConnectionError):  # the missing reply has the cause
        process.stdin.write(json.dumps(command).encode() + b"\n")
        await process.stdin.drain()
    return (await _reply(process, deadline_s))["problems"]


async def _reply(process: asyncio.subprocess.Process, deadline_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), deadline_s)
    except TimeoutError:
        process.kill()
        raise EngineError(f"the staging process did not answer in {deadline_s:.0f} s") from None
    if not line:
        code = await process.wait()
        raise EngineError(f"the staging process ended with exit code {code}; its last output is above")
    return json.loads(line)
