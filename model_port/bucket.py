"""Objects in Google Cloud Storage, through tensorstore's and pyarrow's drivers: gs://BUCKET/PATH acts as a directory.

Transient failures (429, 5xx, a lost connection, no answer) are retried until DEADLINE_S. After that, and for all other
failures, the error is one sentence. Buckets have no atomic rename. A directory upload therefore writes the object
UPLOADING before its first file and deletes it after the last, and readers reject a directory that has this object.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from model_port.progress import Meter
from model_port.terminal import say

ADDRESS = re.compile(r"gs:/{1,2}([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/(.+)")  # pathlib merges two slashes into one
UPLOADING = ".uploading.json"
PARTIAL = ".partial"  # suffix of partial downloads
DEADLINE_S = 300.0  # per object, over all attempts
ATTEMPT_S = 60.0  # per attempt, plus the time for the transferred bytes at SLOWEST_BYTES_PER_S
SLOWEST_BYTES_PER_S = 2**20
PAUSE_S, MOST_PAUSE_S = 0.5, 15.0
ABSENT = b"\x02"  # tensorstore's generation for a missing object
REFUSED = b""  # tensorstore's generation for a failed conditional write
AT_ONCE = 8  # concurrent transfers
PART_BYTES = 64 * 2**20  # size of a read from a large object
TRANSIENT = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNKNOWN", "CANCELLED")
STATUS = re.compile(r"^(\[Errno \d+\] )?google::cloud::Status\(")
SERVER_VARIABLE = "TENSORSTORE_GCS_HTTP_URL"  # overrides Google's server
ACCESS = ("PERMISSION_DENIED", "UNAUTHENTICATED")


class Conflict(ValueError):
    """An object does not have the expected generation: another process has written it."""


def is_address(path: str | Path) -> bool:
    return str(path).startswith("gs:/")


@cache
def _driver(bucket: str) -> Any:
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")  # otherwise a stalled connection hangs
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    import tensorstore as ts  # imported late, because most callers never open a bucket

    # `_answer` retries instead of tensorstore, because it can report the problem.
    context = ts.Context({"gcs_request_retries": {"max_retries": 1, "initial_delay": "100ms", "max_delay": "1s"}})
    return ts.KvStore.open({"driver": "gcs", "bucket": bucket}, context=context).result()


@dataclass(frozen=True)
class Bucket:
    """The object gs://BUCKET/PATH, or the directory of the objects below it. Its interface is similar to Path's."""

    bucket: str
    path: str

    @classmethod
    def of(cls, address: str | Path) -> "Bucket":
        match = ADDRESS.fullmatch(str(address).rstrip("/"))
        if match is None or any(step in ("", ".", "..") for step in match[2].split("/")):
            raise ValueError(f"{address} does not name a directory in a bucket; write gs://BUCKET/PATH")
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return f"gs://{self.bucket}/{self.path}"

    def __truediv__(self, name: str) -> "Bucket":
        return Bucket(self.bucket, f"{self.path}/{name}" if self.path else name)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "Bucket":
        return Bucket(self.bucket, self.path.rpartition("/")[0])

    def is_below(self, other: "Bucket") -> bool:
        """Returns whether this path equals the other or is below it."""
        return self.bucket == other.bucket and f"{self.path}/".startswith(f"{other.path}/")

    def listed(self, name: str | None = None) -> dict[str, tuple[int, int]]:
        """Maps the names of all objects below this path, or only `name`, to their bytes and modification times."""
        begin = f"{self.bucket}/{self.path}" if self.path else self.bucket
        only = None if name is None else f"{begin}/{name}"
        listed = self._answer("listed", lambda: in_background(partial(_listed, f"{begin}/", only)))
        return dict(sorted(listed.items()))

    def sizes(self, name: str | None = None) -> dict[str, int]:
        return {each: num_bytes for each, (num_bytes, _) in self.listed(name).items()}

    def names(self) -> list[str]:
        return list(self.sizes())

    def read(self, part: slice | None = None) -> tuple[bytes | None, bytes]:
        """Returns the content, or a part of it, and the generation. Content None: the object does not exist."""
        ask = lambda: _driver(self.bucket).read(self.path, byte_range=part)  # noqa: E731
        answer = self._answer("read", ask)
        return (answer.value if answer.state == "value" else None), answer.stamp.generation

    def read_bytes(self) -> bytes:
        content, _ = self.read()
        if content is None:
            raise FileNotFoundError(2, "No such object", str(self))
        return content

    def write(self, content: bytes, expected: bytes | None = None) -> bytes:
        """Writes the object and returns its new generation. Raises Conflict if its generation is not `expected`."""
        ask = lambda: _driver(self.bucket).write(self.path, content, if_equal=expected)  # noqa: E731
        stamp = self._answer("written", ask, len(content))
        if stamp.generation != REFUSED:
            return stamp.generation
        current, generation = self.read()
        if current == content:  # an earlier attempt succeeded, but its answer was lost
            return generation
        raise Conflict(f"{self} was written by another process at the same time")

    def delete(self, expected: bytes | None = None) -> None:
        stamp = self._answer("deleted", lambda: _driver(self.bucket).write(self.path, None, if_equal=expected))
        if stamp.generation == REFUSED and self.read()[0] is not None:
            raise Conflict(f"{self} was written by another process at the same time")

    def clear(self, names: Iterable[str] | None = None) -> None:
        """Deletes the named objects below this path, or all objects."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda name: (self / name).delete(), self.names() if names is None else names))

    def _answer(self, done: str, ask: Callable[[], Any], num_bytes: int = 0) -> Any:
        attempt_s = ATTEMPT_S + num_bytes / SLOWEST_BYTES_PER_S
        begin_s, pause_s = time.monotonic(), PAUSE_S
        while True:
            future = ask()
            try:
                return future.result(timeout=attempt_s)
            except TimeoutError:
                future.cancel()
                problem = f"no answer in {attempt_s:g} s"
            except (ValueError, OSError) as error:  # from tensorstore, from pyarrow
                problem = STATUS.sub("", str(error)).partition("\n")[0].partition(" error_info=")[0]
                if not problem.startswith(TRANSIENT):
                    raise self._problem(done, problem) from None
            if pause_s == PAUSE_S:
                say(f"{self} is not {done} yet ({problem}); retrying for {DEADLINE_S:g} s")
            waited_s = time.monotonic() - begin_s
            if waited_s + pause_s > max(DEADLINE_S, 2 * attempt_s):
                raise self._problem(done, f"{problem}, retried for {waited_s:.0f} s") from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def _problem(self, done: str, problem: str) -> RuntimeError:
        advice = ""
        if problem.startswith(ACCESS):
            advice = "; grant this machine's account access, or set GOOGLE_APPLICATION_CREDENTIALS to another's"
        elif problem.startswith("NOT_FOUND"):
            advice = f"; does the bucket {self.bucket} exist?"
        return RuntimeError(f"{self} could not be {done} ({problem}){advice}")


def _listed(begin: str, only: str | None) -> dict[str, tuple[int, int]]:
    """Lists objects. Uses pyarrow's driver, because tensorstore's returns an empty list if listing is not allowed."""
    from pyarrow import fs

    server, options = os.environ.get(SERVER_VARIABLE), {}
    if server:
        scheme, _, host = server.partition("://")
        options = {"anonymous": True, "scheme": scheme, "endpoint_override": host}
    system = fs.GcsFileSystem(retry_time_limit=timedelta(seconds=1), **options)
    include = fs.FileSelector(begin, allow_not_found=True, recursive=True) if only is None else [only]
    entries = system.get_file_info(include)
    return {each.path.removeprefix(begin): (each.size, each.mtime_ns) for each in entries if each.is_file}


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Runs work in a daemon thread, so that work that never ends does not block the exit of the process."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as problem:
            future.set_exception(problem)

    threading.Thread(target=run, daemon=True).start()
    return future


def downloaded(address: str | Path, include: Callable[[str], bool] = lambda _: True) -> Path:
    """Copies an object, or a directory's included objects, to the local cache, unless it already has them."""
    bucket = Bucket.of(address)
    listed = bucket.listed()
    if not listed:
        beside = bucket.parent.listed(bucket.name) if include(bucket.name) else {}
        if bucket.name not in beside:
            raise ValueError(f"{bucket} does not exist: there is no such object and none below it")
        return _copied(bucket.parent, {bucket.name: beside[bucket.name]}) / bucket.name
    if UPLOADING in listed:
        raise ValueError(f"{bucket} is incomplete: an upload to it did not finish; write it again")
    included = {name: about for name, about in listed.items() if include(name)}
    if not included:
        raise ValueError(f"{bucket} has no file of the expected kind")
    directory = _copied(bucket, included)
    now = bucket.listed()
    if UPLOADING in now or any(now.get(name) != listed.get(name) for name in filter(include, {*now, *listed})):
        raise ValueError(f"{bucket} changed during the download; start again")
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if path.is_file() and include(name) and name not in included and not name.endswith(PARTIAL):
            path.unlink()  # was deleted in the bucket, and a loader would mix old and new files
    return directory


def _copied(bucket: Bucket, objects: Mapping[str, tuple[int, int]]) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = home / "paravt_jax" / "buckets" / bucket.bucket / bucket.path
    directory.mkdir(parents=True, exist_ok=True)
    download(bucket, objects, directory)
    return directory


def download(bucket: Bucket, objects: Mapping[str, tuple[int, int]], directory: Path) -> None:
    """Copies objects, as returned by `listed`, into a directory, unless it has a file of the same size and time."""

    def copy(name: str) -> None:
        path, (num_bytes, time_ns) = directory / name, objects[name]
        if any(step in ("", ".", "..") for step in name.split("/")):
            raise ValueError(f"{bucket} has an object {name!r}, which is not a file name; delete it there")
        if path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) == objects[name]:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as file:
            _fetch(bucket / name, num_bytes, file)
        os.utime(path, ns=(time_ns, time_ns))

    _at_once(f"downloading {bucket}", copy, list(objects))


def _fetch(source: Bucket, num_bytes: int, file: IO[bytes]) -> None:
    """Reads an object in parts, all of one generation. The last part has no end, because the object may have grown."""
    begins = range(0, num_bytes - PART_BYTES, PART_BYTES)
    parts: list[slice | None] = [slice(begin, begin + PART_BYTES) for begin in begins]
    parts.append(slice(PART_BYTES * len(parts), None) if parts else None)
    generations = set()
    for part in parts:
        content, generation = source.read(part)
        generations.add(generation)
        if content is None or len(generations) > 1:
            raise ValueError(f"{source} changed during the download; start again")
        file.write(content)


def upload(files: Mapping[str, Path], bucket: Bucket) -> None:
    """Uploads small files in parallel, and large files one at a time, because an object is sent from memory."""
    large = [name for name, path in files.items() if path.stat().st_size > PART_BYTES]

    def send(name: str) -> None:
        (bucket / name).write(files[name].read_bytes())

    _at_once(f"uploading to {bucket}", send, [name for name in files if name not in large])
    for number, name in enumerate(large, 1):
        with Meter(f"uploading {bucket / name}, large file {number} of {len(large)}"):
            send(name)


def upload_directory(directory: Path, bucket: Bucket) -> None:
    """Replaces the objects below `bucket` with the directory's files.

    The object UPLOADING marks an incomplete upload. It lists the new and the replaced objects, so that another upload
    may replace all of them.
    """
    files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
    (bucket / UPLOADING).write(json.dumps({"files": sorted({*files, *bucket.names()})}).encode())
    upload(files, bucket)
    bucket.clear(set(bucket.names()) - files.keys() - {UPLOADING})
    (bucket / UPLOADING).delete()


def _at_once(task: str, work: Callable[[str], object], names: Sequence[str]) -> None:
    with Meter(task, len(names), "file") as meter, ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for done in [pool.submit(work, name) for name in names]:
                done.result()
                meter.update()
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
