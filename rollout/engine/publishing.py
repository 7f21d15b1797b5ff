"""Publishes new weights to running servers.

Safetensors are written once, to /dev/shm if they fit or to a directory that servers of other hosts can read, while the
servers continue to sample. Then the servers are paused, read them, and resume. A server that has the previous weights
reads only the tensors that differ from them: not the frozen vision tower, for example. The weights get their label in
the same step of a server's scheduler.
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
from typing import Any

import numpy as np

from rollout.engine.http import HttpClient
from rollout.engine.labels import Label
from rollout.engine.protocol import EngineError, Weights
from rollout.engine.settings import ServerState, SGLangSettings
from rollout.supervisor import SHARED_MEMORY

WEIGHTS_PREFIX = "paravt-weights-"
SPARE_FRAC = 0.1  # part of a disk's space that is left free
ALL, CHANGED = "all", "changed"  # directories of files, and of links to those that the latest weights changed
DTYPE_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
PART_BYTES = 2**20  # compared at a time; a trained tensor differs in its first part

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
    paths = {server.url: files.directory(server) for server in servers}

    def healthy() -> list[str]:
        return [server.url for server in servers if server.url not in problems]

    def post(path: str, body: Any) -> Callable[[str], Coroutine[Any, Any, Any]]:
        return lambda url: client.post(f"{url}{path}", body, settings.control_deadline_s)

    def load(url: str) -> Coroutine[Any, Any, Any]:
        body = {"model_path": str(paths[url]), "flush_cache": False, "weight_version": str(label)}
        return client.post(f"{url}/update_weights_from_disk", body, settings.load_deadline_s)

    try:
        for server in servers:
            server.loading = server.paused = True
        problems |= await post_all(healthy(), post("/pause_generation", {"mode": "retract"}))
        # Keys and values of the old weights. SGLang refuses to flush while a request runs, hence the pause.
        problems |= await post_all(healthy(), post("/flush_cache", {}))
        problems |= await post_all(healthy(), load)
    finally:
        problems |= await post_all(healthy(), post("/continue_generation", {}))
        for server in servers:
            server.loading, server.paused = False, server.url in problems
    files.loaded |= {server for server in servers if server.url not in problems}
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
    """The latest weights for all servers, a file for each tensor, until this process ends."""

    def __init__(self, directory: str | Path = ""):
        """Without a directory the weights go to this host's memory, or to its disk if they do not fit there."""
        self._parents = [Path(directory)] if directory else [SHARED_MEMORY, Path(tempfile.gettempdir())]
        self._root: Path | None = None
        self._lock = ExitStack()  # on that directory
        self.loaded: set[ServerState] = set()  # have loaded the latest weights
        self._loaded_previous: set[ServerState] = set()

    def directory(self, server: ServerState) -> Path:
        """The files for a server: all, unless it has the previous weights and needs only the tensors that changed."""
        if self._root is None:
            raise EngineError("the latest weights could not be written")
        return self._root / (CHANGED if server in self._loaded_previous - self.loaded else ALL)

    def forget(self, server: ServerState) -> None:
        """It no longer has the weights that it loaded."""
        self._loaded_previous.discard(server)

    async def write(self, weights: Weights) -> None:
        """Replaces the files whose tensors changed."""
        self._loaded_previous, self.loaded = self.loaded, set()
        if self._root is None:
            self._root = self._make_root(weights.num_bytes)
        try:
            await asyncio.to_thread(_write_changed, weights, self._root)
        except BaseException:
            self._remove()
            raise

    def _make_root(self, num_bytes: int) -> Path:
        for orphan in orphans(self._parents):
            shutil.rmtree(orphan, ignore_errors=True)
        parent = next((parent for parent in self._parents if _fits(parent, num_bytes)), None)
        if parent is None:
            tried = " nor into ".join(map(str, self._parents))
            raise EngineError(
                f"{num_bytes / 2**30:.1f} GiB of weights do not fit into {tried}; free some space there, or "
                f"name another directory with engine.weights_dir"
            )
        return self._make_locked(parent)

    def _make_locked(self, parent: Path) -> Path:
        """A new directory that stays locked for as long as this process lives."""
        hidden = Path(tempfile.mkdtemp(prefix=".paravt-", dir=parent))
        self._lock = ExitStack()
        self._lock.enter_context(_locked(hidden))
        return hidden.rename(parent / f"{WEIGHTS_PREFIX}{hidden.name.removeprefix('.paravt-')}")

    def _remove(self) -> None:
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._lock.close()
            self._root = None

    async def close(self) -> None:
        await asyncio.to_thread(self._remove)


def _write_changed(weights: Weights, root: Path) -> None:
    """Replaces the files whose tensors changed, and links to them."""
    shutil.rmtree(root / CHANGED, ignore_errors=True)
    for directory in (root / ALL, root / CHANGED):
        directory.mkdir(exist_ok=True)
    name = ""
    for name, tensor in weights.tensors():
        if _replace(root / ALL / f"{name}.safetensors", name, tensor):
            _link(root, name)
    if not any((root / CHANGED).iterdir()):
        _link(root, name)  # SGLang loads no empty directory


def _link(root: Path, name: str) -> None:
    (root / CHANGED / f"{name}.safetensors").symlink_to(f"../{ALL}/{name}.safetensors")


def _replace(path: Path, name: str, tensor: np.ndarray) -> bool:
    """Writes a tensor's file; False if the file has this content already.

    A server that has not noticed its deadline may still read the former file, so that is replaced, never overwritten.
    """
    data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    info = {"dtype": DTYPE_NAMES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [0, data.nbytes]}
    header = json.dumps({name: info}).encode()
    header = len(header).to_bytes(8, "little") + header
    if path.exists() and _same(np.memmap(path, np.uint8, "r"), header, data):
        return False
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(header)
        file.write(data.data)
    new.replace(path)
    return True


def _same(old: np.ndarray, header: bytes, data: np.ndarray) -> bool:
    start = len(header)
    parts = (slice(first, first + PART_BYTES) for first in range(0, data.size, PART_BYTES))
    return (
        old.size == start + data.size
        and old[:start].tobytes() == header
        and all(np.array_equal(old[start:][part], data[part]) for part in parts)
    )


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
