"""Publishes new weights to running servers.

Safetensors are written once, to /dev/shm if they fit or to a directory that servers of other hosts can read, while the
servers continue to sample. Then the servers are paused, read them, and resume. The weights get their label in the same
step of a server's scheduler.
"""

import asyncio
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rollout.engine.http import HttpClient
from rollout.engine.labels import Label
from rollout.engine.protocol import EngineError, Weights
from rollout.engine.settings import ServerState, SGLangSettings
from rollout.supervisor import SHARED_MEMORY

WEIGHTS_PREFIX = "paravt-weights-"
SPARE_FRAC = 0.1  # part of a disk's space that is left free

Problems = dict[str, str]  # by URL, of the servers that failed


async def load_weights(
    client: HttpClient,
    files: "WeightFiles",
    servers: Sequence[ServerState],
    label: Label,
    settings: SGLangSettings,
) -> Problems:
    """Pauses all servers, flushes their caches, loads the written weights, resumes.

    Running requests wait; their keys and values are recomputed afterwards.
    """
    problems: Problems = {}
    body = {"model_path": str(files.directory), "flush_cache": False, "weight_version": str(label)}

    def healthy() -> list[str]:
        return [server.url for server in servers if server.url not in problems]

    def post(
        path: str, body: Any, deadline_s: float = settings.control_deadline_s
    ) -> Callable[[str], Coroutine[Any, Any, Any]]:
        return lambda url: client.post(f"{url}{path}", body, deadline_s)

    try:
        for server in servers:
            server.loading = server.paused = True
        problems |= await post_all(healthy(), post("/pause_generation", {"mode": "retract"}))
        # Keys and values of the old weights. SGLang refuses to flush while a request runs, hence the pause.
        problems |= await post_all(healthy(), post("/flush_cache", {}))
        problems |= await post_all(healthy(), post("/update_weights_from_disk", body, settings.load_deadline_s))
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


class WeightFiles:
    """One directory of safetensors for all servers. It is kept until the next weights, or until this process ends."""

    def __init__(self, directory: str | Path = ""):
        """Without a directory the weights go to this host's memory, or to its disk if they do not fit there."""
        self._parents = [Path(directory)] if directory else [SHARED_MEMORY, Path(tempfile.gettempdir())]
        self._written: Path | None = None
        self._lock = ExitStack()  # on that directory

    @property
    def directory(self) -> Path:
        """The latest weights; servers that come back later read them again."""
        if self._written is None:
            raise EngineError("the latest weights could not be written")
        return self._written

    async def write(self, weights: Weights, version: int) -> None:
        """Replaces the weights of the previous version, so no server may be reading them."""
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
        self._written = self._make_locked(parent, version)
        try:
            await asyncio.to_thread(weights.write, self._written)
        except BaseException:
            self._remove()
            raise

    def _make_locked(self, parent: Path, version: int) -> Path:
        """A new directory that stays locked for as long as this process lives."""
        hidden = Path(tempfile.mkdtemp(prefix=".paravt-", dir=parent))
        self._lock = ExitStack()
        self._lock.enter_context(_locked(hidden))
        return hidden.rename(parent / f"{WEIGHTS_PREFIX}v{version}-{hidden.name.removeprefix('.paravt-')}")

    def _remove(self) -> None:
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)
            self._lock.close()
            self._written = None

    async def close(self) -> None:
        await asyncio.to_thread(self._remove)


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
