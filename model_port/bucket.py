"""Objects in Google Cloud Storage, through the drivers of tensorstore and pyarrow: gs://BUCKET/PATH for a directory.

A request that fails in passing (429, 5xx, a lost connection, no answer) is repeated until DEADLINE_S; then, and for
whatever else is wrong, there is one sentence. A bucket has no rename: a directory that is written into one has the
object UPLOADING from before its first file until after its last, and while that is there nobody reads the others.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from model_port.progress import Meter
from model_port.terminal import say

ADDRESS = re.compile(r"gs:/{1,2}([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/(.+)")  # pathlib makes one slash of two
UPLOADING = ".uploading.json"
GENERATIONS_FILE, PARTIAL = ".generations.json", ".partial"  # of what was downloaded, and is being
OWN_SUFFIXES = (GENERATIONS_FILE, PARTIAL)
DEADLINE_S = 300.0  # of one object, all attempts together
ATTEMPT_S = 60.0  # of an answer, and as long again for every 64 MB that travel
SLOWEST_BYTES_PER_S = 2**20
PAUSE_S, MOST_PAUSE_S = 0.5, 15.0
ABSENT = b"\x02"  # the generation of what is not there, as tensorstore spells it
REFUSED = b""  # of what was not written, because another generation was there
AT_ONCE = 8  # objects on their way
PART_BYTES = 64 * 2**20  # of a large one that are read at a time
PASSING = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNKNOWN", "CANCELLED")
STATUS = re.compile(r"^(\[Errno \d+\] )?google::cloud::Status\(")
SERVER_VARIABLE = "TENSORSTORE_GCS_HTTP_URL"  # of another server than Google's, for both drivers
ACCESS = ("PERMISSION_DENIED", "UNAUTHENTICATED")


class Conflict(ValueError):
    """An object is not of the generation that was expected: somebody else has written it."""


def is_address(path: str | Path) -> bool:
    return str(path).startswith("gs:/")


@cache
def _driver(bucket: str) -> Any:
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")  # or a stalled connection stays for ever
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    import tensorstore as ts  # late: not everything that may name a bucket opens one

    # It is asked again below, where what goes wrong meanwhile is known.
    context = ts.Context({"gcs_request_retries": {"max_retries": 1, "initial_delay": "100ms", "max_delay": "1s"}})
    return ts.KvStore.open({"driver": "gcs", "bucket": bucket}, context=context).result()


@dataclass(frozen=True)
class Bucket:
    """What lies below gs://BUCKET/PATH, by the names of its objects, or one of them. Reads as a Path does."""

    bucket: str
    path: str

    @classmethod
    def of(cls, address: str | Path) -> "Bucket":
        match = ADDRESS.fullmatch(str(address).rstrip("/"))
        if match is None or any(step in ("", ".", "..") for step in match[2].split("/")):
            raise ValueError(f"{address} is no address of a directory in a bucket; write it as gs://BUCKET/PATH")
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
        """Or it is the other."""
        return self.bucket == other.bucket and f"{self.path}/".startswith(f"{other.path}/")

    def sizes(self, name: str | None = None) -> dict[str, int]:
        """Bytes of every object below it, or of one of that name, by their names."""
        begin = f"{self.bucket}/{self.path}" if self.path else self.bucket
        only = None if name is None else f"{begin}/{name}"
        found = self._answer("listed", lambda: _in_background(partial(_listed, f"{begin}/", only)))
        return dict(sorted(found.items()))

    def names(self) -> list[str]:
        return list(self.sizes())

    def read(self) -> tuple[bytes | None, bytes]:
        """The content, None where there is no such object, and the generation."""
        answer = self._answer("read", lambda: _driver(self.bucket).read(self.path))
        return (answer.value if answer.state == "value" else None), answer.stamp.generation

    def read_if_changed(self, generation: bytes | None, part: slice | None = None) -> tuple[bytes | None, bytes]:
        """The same of a part of it; None also where it is of this generation still."""
        ask = lambda: _driver(self.bucket).read(self.path, if_not_equal=generation, byte_range=part)  # noqa: E731
        answer = self._answer("read", ask)
        return (answer.value if answer.state == "value" else None), answer.stamp.generation

    def read_bytes(self) -> bytes:
        content, _ = self.read()
        if content is None:
            raise FileNotFoundError(2, "No such object", str(self))
        return content

    def write(self, content: bytes, expected: bytes | None = None) -> bytes:
        """Its new generation. `expected` is the one that it replaces, or a Conflict says that another was there."""
        ask = lambda: _driver(self.bucket).write(self.path, content, if_equal=expected)  # noqa: E731
        stamp = self._answer("written", ask, len(content))
        if stamp.generation != REFUSED:
            return stamp.generation
        held, generation = self.read()
        if held == content:  # an attempt whose answer was lost
            return generation
        raise Conflict(f"{self} was written by somebody else meanwhile")

    def delete(self, expected: bytes | None = None) -> None:
        stamp = self._answer("deleted", lambda: _driver(self.bucket).write(self.path, None, if_equal=expected))
        if stamp.generation == REFUSED and self.read()[0] is not None:
            raise Conflict(f"{self} was written by somebody else meanwhile")

    def clear(self, names: Iterable[str] | None = None) -> None:
        """Deletes these objects below it, or all."""
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
            except (ValueError, OSError) as error:  # of tensorstore, of pyarrow
                problem = STATUS.sub("", str(error)).partition("\n")[0].partition(" error_info=")[0]
                if not problem.startswith(PASSING):
                    raise self._problem(done, problem) from None
            if pause_s == PAUSE_S:
                say(f"{self} is not {done} yet ({problem}); trying for {DEADLINE_S:g} s")
            waited_s = time.monotonic() - begin_s
            if waited_s + pause_s > max(DEADLINE_S, 2 * attempt_s):
                raise self._problem(done, f"{problem}, tried for {waited_s:.0f} s") from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def _problem(self, done: str, problem: str) -> RuntimeError:
        advice = ""
        if problem.startswith(ACCESS):
            advice = "; give this machine's account access, or name another with GOOGLE_APPLICATION_CREDENTIALS"
        elif problem.startswith("NOT_FOUND"):
            advice = f"; is there a bucket {self.bucket}?"
        return RuntimeError(f"{self} could not be {done} ({problem}){advice}")


def _listed(begin: str, only: str | None) -> dict[str, int]:
    """By pyarrow's driver: where tensorstore's may not list, or no longer, it says that there is nothing."""
    from pyarrow import fs

    server, options = os.environ.get(SERVER_VARIABLE), {}
    if server:
        scheme, _, host = server.partition("://")
        options = {"anonymous": True, "scheme": scheme, "endpoint_override": host}
    system = fs.GcsFileSystem(retry_time_limit=timedelta(seconds=1), **options)
    wanted = fs.FileSelector(begin, allow_not_found=True, recursive=True) if only is None else [only]
    return {one.path.removeprefix(begin): one.size for one in system.get_file_info(wanted) if one.is_file}


def _in_background(work: Callable[[], Any]) -> Future[Any]:
    """In a thread that the process does not wait for at its end, as what it waits for may never come."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as problem:
            future.set_exception(problem)

    threading.Thread(target=run, daemon=True).start()
    return future


def everything(_: str) -> bool:
    return True


def downloaded(address: str | Path, wanted: Callable[[str], bool] = everything) -> Path:
    """Where the object, or the directory's wanted objects, are on this disk; what is there is not read again."""
    bucket = Bucket.of(address)
    sizes = bucket.sizes()
    if not sizes:
        beside = bucket.parent.sizes(bucket.name) if wanted(bucket.name) else {}
        if bucket.name not in beside:
            raise ValueError(f"{bucket} does not exist: there is no such object, and none below it")
        return _copied(bucket.parent, {bucket.name: beside[bucket.name]}) / bucket.name
    if UPLOADING in sizes:
        raise ValueError(f"{bucket} is not whole: writing it was begun and not ended; write it again")
    names = {name: num_bytes for name, num_bytes in sizes.items() if wanted(name)}
    if not names:
        raise ValueError(f"{bucket} has no file of the kind that is read from there")
    here = _copied(bucket, names)
    for path in here.rglob("*"):
        name = str(path.relative_to(here))
        if path.is_file() and wanted(name) and name not in names and not name.endswith(OWN_SUFFIXES):
            path.unlink()  # it is gone there, and a loader would mix the two
    return here


def _copied(bucket: Bucket, sizes: Mapping[str, int]) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    here = home / "paravt_jax" / "buckets" / bucket.bucket / bucket.path
    here.mkdir(parents=True, exist_ok=True)
    download(bucket, sizes, here)
    return here


def download(bucket: Bucket, sizes: Mapping[str, int], here: Path) -> None:
    """Copies objects of these sizes into a directory, but for those that it has in the same generation."""
    known: dict[str, str] = {}
    with suppress(FileNotFoundError, ValueError):
        known = json.loads((here / GENERATIONS_FILE).read_bytes())

    def copy(name: str) -> None:
        path, before = here / name, None
        if any(step in ("", ".", "..") for step in name.split("/")):
            raise ValueError(f"{bucket} has an object {name!r}, which is no name of a file; delete it there")
        if name in known and path.is_file():
            before = bytes.fromhex(known[name])
        path.parent.mkdir(parents=True, exist_ok=True)
        generation = _fetch(bucket / name, path, before, sizes[name])
        known[name] = generation.hex()

    try:
        _at_once(f"downloading {bucket}", copy, list(sizes))
    finally:
        with _replacing(here / GENERATIONS_FILE) as file:
            file.write(json.dumps(known).encode())


def _fetch(source: Bucket, path: Path, before: bytes | None, num_bytes: int) -> bytes:
    """Part by part, all of one generation, which is given back; nothing is written where it is the one of before."""
    parts = [slice(begin, min(begin + PART_BYTES, num_bytes)) for begin in range(0, num_bytes, PART_BYTES)] or [None]
    content, generation = source.read_if_changed(before, parts[0])
    if content is None and generation == before:
        return generation
    with _replacing(path) as file:
        for part in parts[1:]:
            file.write(content or b"")
            content, now = source.read_if_changed(None, part)
            if now != generation:
                raise ValueError(f"{source} was changed while it was downloaded; start again")
        if content is None:
            raise ValueError(f"{source} was deleted while it was downloaded; start again")
        file.write(content)
    return generation


def upload(files: Mapping[str, Path], bucket: Bucket) -> None:
    """One large file at a time: an object is sent from memory."""
    large = [name for name, path in files.items() if path.stat().st_size > PART_BYTES]

    def send(name: str) -> None:
        (bucket / name).write(files[name].read_bytes())

    _at_once(f"uploading to {bucket}", send, [name for name in files if name not in large])
    for number, name in enumerate(large, 1):
        with Meter(f"uploading {bucket / name}, large file {number} of {len(large)}"):
            send(name)


def upload_directory(directory: Path, bucket: Bucket) -> None:
    """Its files replace what is below `bucket`, where UPLOADING says meanwhile that they are not all there."""
    files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
    (bucket / UPLOADING).write(json.dumps({"files": sorted(files)}).encode())
    upload(files, bucket)
    bucket.clear(set(bucket.names()) - files.keys() - {UPLOADING})
    (bucket / UPLOADING).delete()


def _at_once(what: str, work: Callable[[str], object], names: Sequence[str]) -> None:
    with Meter(what, len(names), "file") as meter, ThreadPoolExecutor(AT_ONCE) as pool:
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
