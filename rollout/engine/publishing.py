"""New weights for running servers, by one of two routes.

`disk`: written once as safetensors, to memory-backed /dev/shm where they fit or to a directory that servers of other
hosts see too, and read by every server. `tensors`: sent in buckets by a small process in the servers' own environment,
since the servers take torch tensors and this package has none; on a GPU the bucket's memory is shared, so nothing
crosses HTTP. Both leave the label of the weights on a server; `disk` in the same step of its scheduler. Neither touches
the KV cache: `Fleet` pauses and flushes before, and continues after.
"""

import asyncio
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollout.engine.http import HttpClient
from rollout.engine.labels import Label, publish_label
from rollout.engine.protocol import EngineError, Weights
from rollout.supervisor import SHARED_MEMORY

WEIGHTS_PREFIX = "paravt-weights-"
SPARE_FRAC = 0.1  # of the space on a disk, left to others
BUCKET_BYTES = 2**30
STAGING_START_S = 120.0


class Route(Protocol):
    async def send(self, urls: Sequence[str], weights: Weights, label: Label, deadline_s: float) -> dict[str, str]:
        """Loads the weights into every server, and labels them; {url: problem} of those where it failed."""
        ...

    async def close(self) -> None: ...


class DiskRoute:
    """One directory of safetensors for all servers; it lasts until the next weights, or this process's end."""

    def __init__(self, client: HttpClient, directory: str | Path = ""):
        """`directory` takes the weights; by default this host's memory, or its disk where they do not fit."""
        self._client = client
        self._places = [Path(directory)] if directory else [SHARED_MEMORY, Path(tempfile.gettempdir())]
        self._written: tuple[int, Weights, Path] | None = None
        self._lock = ExitStack()  # on that directory

    async def send(self, urls: Sequence[str], weights: Weights, label: Label, deadline_s: float) -> dict[str, str]:
        assert label.version is not None
        directory = await self._directory(weights, label.version)
        body = {"model_path": str(directory), "flush_cache": False, "weight_version": str(label)}
        return await each(urls, lambda url: self._client.post(f"{url}/update_weights_from_disk", body, deadline_s))

    async def _directory(self, weights: Weights, version: int) -> Path:
        """Where this version lies; it is written once, and servers that come back later read it again."""
        if self._written is not None and self._written[:2] == (version, weights):
            return self._written[2]
        self._remove()
        for orphan in orphans(self._places):
            shutil.rmtree(orphan, ignore_errors=True)
        place = next((place for place in self._places if _fits(place, weights.num_bytes)), None)
        if place is None:
            tried = " nor into ".join(map(str, self._places))
            raise EngineError(
                f"{weights.num_bytes / 2**30:.1f} GiB of weights do not fit into {tried}; free some space there, or "
                f"name another place with engine.weights_dir"
            )
        directory = self._owned(place, version)
        self._written = (version, weights, directory)
        try:
            await asyncio.to_thread(weights.write, directory)
        except BaseException:
            self._remove()
            raise
        return directory

    def _owned(self, place: Path, version: int) -> Path:
        """A new directory there, locked for as long as this process lives."""
        hidden = Path(tempfile.mkdtemp(prefix=".paravt-", dir=place))
        self._lock = ExitStack()
        self._lock.enter_context(_locked(hidden))
        return hidden.rename(place / f"{WEIGHTS_PREFIX}v{version}-{hidden.name.removeprefix('.paravt-')}")

    def _remove(self) -> None:
        if self._written is not None:
            shutil.rmtree(self._written[2], ignore_errors=True)
            self._lock.close()
            self._written = None

    async def close(self) -> None:
        await asyncio.to_thread(self._remove)


class TensorRoute:
    """Buckets go through a file in shared memory to the staging process, `rollout.staging`, which sends them on."""

    def __init__(self, client: HttpClient, python: Path, env: dict[str, str], bucket_bytes: int = BUCKET_BYTES):
        """`python` and `env` are those of the servers."""
        self._client, self._python, self._env, self._bucket_bytes = client, python, env, bucket_bytes
        self._process: asyncio.subprocess.Process | None = None

    async def send(self, urls: Sequence[str], weights: Weights, label: Label, deadline_s: float) -> dict[str, str]:
        process = await self._started()
        problems = await each(urls, lambda url: self._client.post(f"{url}/begin_weight_update", {}, deadline_s))
        with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:  # without a name, so that nothing of it can stay
            buckets = _buckets(weights, self._bucket_bytes)
            while (bucket := await asyncio.to_thread(next, buckets, None)) is not None:
                left = [url for url in urls if url not in problems]
                if not left:
                    return problems
                described = await asyncio.to_thread(_write_bucket, file, bucket)
                name = f"/proc/{os.getpid()}/fd/{file.fileno()}"
                command = {"file": name, "tensors": described, "urls": left, "deadline_s": deadline_s}
                problems |= await _command(process, command, deadline_s)
        left = [url for url in urls if url not in problems]
        problems |= await each(left, lambda url: self._client.post(f"{url}/end_weight_update", {}, deadline_s))
        left = [url for url in urls if url not in problems]
        return problems | await each(left, lambda url: publish_label(self._client, url, label, deadline_s))

    async def _started(self) -> asyncio.subprocess.Process:
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
            self._process.kill()  # it holds nothing but copies
            await self._process.wait()


async def each(urls: Sequence[str], call: Any) -> dict[str, str]:
    """The same call to all servers at the same time; {url: problem} of those that failed or said no."""
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


def orphans(places: Sequence[Path]) -> Iterator[Path]:
    """Weights of processes that were killed; they would take the memory that new ones need."""
    for directory in (found for place in places for found in place.glob(f"{WEIGHTS_PREFIX}*")):
        with suppress(OSError), _locked(directory):  # an OSError: it is in use, of another user, or gone
            yield directory


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """The lock goes with the process, however it ends, and stays on a directory that is renamed."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


def _fits(place: Path, num_bytes: int) -> bool:
    if not place.is_dir() or not os.access(place, os.W_OK):
        return False
    usage = shutil.disk_usage(place)
    return num_bytes + SPARE_FRAC * usage.total < usage.free


def _buckets(weights: Weights, max_bytes: int) -> Iterator[list[tuple[str, np.ndarray]]]:
    """Tensors together up to the size of a bucket; a larger one has a bucket to itself."""
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
    described, start = [], 0
    file.seek(0)
    for name, tensor in bucket:
        end = start + tensor.nbytes
        file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        described.append({"name": name, "dtype": str(tensor.dtype), "shape": tensor.shape, "start": start, "end": end})
        start = end
    file.truncate()
    file.flush()
    return described


async def _command(process: asyncio.subprocess.Process, command: dict[str, Any], deadline_s: float) -> dict[str, str]:
    assert process.stdin is not None
    with suppress(ConnectionError):  # the missing reply tells more
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
        raise EngineError(f"the staging process ended with exit code {code}; its last words are above")
    return json.loads(line)
