"""A file that a command writes, such as --html or --json: written atomically, and never over a file of somebody else.

Make an `OutputFile` before the work and write to it at the end: what may not be replaced is refused at once. A hidden
record beside the file says which command wrote it, and with what size and time of change. That command replaces its own
file as long as nobody has changed it; any other file needs --force; an input of the command is never replaced.
"""

import fcntl
import filecmp
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

RECORD_SUFFIX = ".written_by_paravt_jax.json"
MAX_NAME_BYTES = 200  # so that the names beside it are none that a file system refuses
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # pathlib makes one slash of two


class OutputFile:
    """A file to be written by `by`, which names the command and, where the file took long to make, its source.

    `inputs` are the files and directories that the command reads; what is no path is ignored. Of a directory no file is
    replaced that `by` did not write.
    """

    def __init__(self, path: str | Path, by: str, *, inputs: Sequence[str | Path] = (), force: bool = False) -> None:
        if scheme := SCHEME.match(str(path)):
            raise ValueError(
                f"{path} is in no local directory: {scheme[1]}:// is not supported here, give a local path"
            )
        self.path = path = Path(path).absolute()
        self.changed = False  # whether writing it has changed it
        self._stream = _is_stream(path)
        linked = path.is_symlink() and not self._stream
        self._file = path.resolve() if linked else path  # a replaced link would leave its target behind
        self._record = self._file.with_name(f".{self._file.name}{RECORD_SUFFIX}")
        self._by, self._inputs, self._force = by, [Path(one) for one in inputs if one and _exists(Path(one))], force
        self._check()

    def write(self, content: str | bytes) -> None:
        with self.partial() as partial:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)

    @contextmanager
    def partial(self) -> Iterator[Path]:
        """Where to write the content; it becomes the file when the body ends, and is removed when it raises."""
        if self._stream:
            with TemporaryDirectory() as directory:
                yield (partial := Path(directory) / "content")
                with self.path.open("ab") as stream:
                    stream.write(partial.read_bytes())
            return
        self._check()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_name(f".{self._file.name}.partial")
        lock = _lock(partial, self._file)
        try:
            yield partial
            self._check()  # something may have appeared there meanwhile
            _sync(partial)
            self.changed = not (self._file.exists() and filecmp.cmp(partial, self._file, shallow=False))
            if self.changed:
                partial.replace(self._file)
                _sync(self._file.parent)
            self._write_record()
        except OSError as problem:
            problem.filename = problem.filename or str(self.path)  # a full disk does not say which
            raise
        finally:
            partial.unlink(missing_ok=True)
            os.close(lock)

    def _check(self) -> None:
        file, shown = self._file, self.path
        if len(os.fsencode(file.name)) > MAX_NAME_BYTES:
            raise ValueError(f"the name of {shown} is longer than {MAX_NAME_BYTES} bytes; choose a shorter one")
        if not file.exists():
            parent = next(parent for parent in file.parents if _exists(parent))
            if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
                raise ValueError(f"{shown} cannot be written: {parent} is no directory that may be written to")
            return
        for read in self._inputs:
            if file.samefile(read):
                raise ValueError(f"{shown} is what this command reads ({read}), so it is not replaced; choose another")
        if file.is_dir():
            raise ValueError(f"{shown} is a directory; give the name of a file")
        if self._stream or not file.stat().st_size:
            return
        problem = self._not_own()
        if problem and any(read.is_dir() and file.resolve().is_relative_to(read.resolve()) for read in self._inputs):
            raise ValueError(f"{shown} {problem} and lies in a directory that this command reads; choose another place")
        if problem and not self._force:
            raise ValueError(f"{shown} exists and {problem}; choose another place, or replace it with --force")

    def _not_own(self) -> str:
        """Why the file is not this command's own to replace; empty if it is."""
        try:
            record = json.loads(self._record.read_bytes())
            by, status = record["by"], record["status"]
        except (OSError, ValueError, LookupError, TypeError):
            return "was not written by this command"
        if status != _status(self._file):
            return "was changed since it was written"
        return "" if by == self._by else f"was written by {by}"

    def _write_record(self) -> None:
        partial = self._record.with_suffix(".partial")
        partial.write_text(json.dumps({"by": self._by, "status": _status(self._file)}) + "\n")
        partial.replace(self._record)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _status(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _is_stream(path: Path) -> bool:
    """A pipe, a terminal or /dev/null, where nothing can be lost; and what a shell has opened, such as /dev/stdout."""
    if not _exists(path) or path.is_dir():
        return False
    opened = str(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    return opened or not stat.S_ISREG(path.stat().st_mode)


def _lock(partial: Path, file: Path) -> int:
    """Creates `partial` and locks it for this process; the kernel releases the lock of a process that dies."""
    while True:
        lock = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), partial.stat()):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise ValueError(f"another process is writing {file}; wait for it, or choose another place") from None
        except FileNotFoundError:
            pass
        os.close(lock)  # renamed or removed between opening and locking


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
