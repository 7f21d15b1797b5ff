"""Writes an output file of a command, such as --html or --json, atomically and without overwriting other files.

Make an `OutputFile` before the work and write it at the end, so that conflicts are reported early. A hidden record next
to the file stores the command that wrote it and the file's last two hashes, so that a copy is recognized. A command
replaces its own unchanged file. Other files need --force. A command never replaces its inputs.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from model_port.json_files import without_nan
from model_port.output_dir import check_local, lock_file, sync_path

RECORD_SUFFIX = ".written_by_paravt_jax.json"
MAX_NAME_BYTES = 200  # leaves room for suffixes of hidden files next to it
NEVER_READ = {".html", ".png"}  # suffixes that commands write and never read from a directory


class OutputFile:
    """An output file. `by` names the command and, if the file is expensive to make, its source.

    `inputs` are the files and directories that the command reads; values that are not paths are ignored. In an input
    directory, only pages, pictures and files that `by` wrote can be replaced.
    """

    def __init__(self, path: str | Path, by: str, *, inputs: Sequence[str | Path] = (), force: bool = False) -> None:
        check_local(path)
        self.path = path = Path(path).absolute()
        self.changed = False  # True once a write has changed the content
        self._stream = _is_stream(path)
        linked = path.is_symlink() and not self._stream
        self._file = path.resolve() if linked else path  # write through a link instead of replacing it
        self._record = self._file.with_name(f".{self._file.name}{RECORD_SUFFIX}")
        self._inputs = [Path(source) for source in inputs if source and _exists(Path(source))]
        self._by, self._force = by, force
        self._check()

    def write(self, content: str | bytes) -> None:
        with self.partial() as partial:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)

    def write_json(self, record: Any) -> None:
        """Writes JSON, with null for NaN and infinity, which JSON lacks."""
        self.write(json.dumps(without_nan(record), indent=2, allow_nan=False) + "\n")

    @contextmanager
    def partial(self) -> Iterator[Path]:
        """Yields a temporary path. When the body ends, it becomes the file; if the body raises, it is removed."""
        if self._stream:
            with TemporaryDirectory() as directory:
                yield (partial := Path(directory) / "content")
                with self.path.open("ab") as stream:
                    stream.write(partial.read_bytes())
            return
        self._check()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_name(f".{self._file.name}.partial")
        lock = lock_file(partial, self._file)
        try:
            yield partial
            self._check()  # a file may have appeared since the first check
            sync_path(partial)
            digests = [sha256_of(file) for file in (partial, self._file) if file.exists()]
            self._write_record(digests)  # first, so that a kill between the writes leaves the file replaceable
            self.changed = digests[1:] != digests[:1]
            if self.changed:
                partial.replace(self._file)
                sync_path(self._file.parent)
        except OSError as problem:
            problem.filename = problem.filename or str(self.path)  # errors such as "disk full" have no file name
            raise
        finally:
            partial.unlink(missing_ok=True)
            os.close(lock)

    def _check(self) -> None:
        file, path = self._file, self.path
        if len(os.fsencode(file.name)) > MAX_NAME_BYTES:
            raise ValueError(f"the name of {path} is longer than {MAX_NAME_BYTES} bytes; choose a shorter one")
        parent = next(parent for parent in file.parents if _exists(parent))
        if not self._stream and not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
            raise ValueError(f"{path} cannot be written: {parent} is not a writable directory")
        if not file.exists():
            return
        for read in self._inputs:
            if file.samefile(read):
                raise ValueError(f"{path} is an input of this command ({read}) and is never replaced; choose another")
        if file.is_dir():
            raise ValueError(f"{path} is a directory; give the name of a file")
        if self._stream or not file.stat().st_size:
            return
        problem, resolved = self._not_own(), file.resolve()
        is_read = any(resolved.is_relative_to(read.resolve()) for read in self._inputs if read.is_dir())
        if problem and is_read and resolved.suffix not in NEVER_READ:
            raise ValueError(f"{path} {problem} and is inside a directory that this command reads; choose another path")
        if problem and not self._force:
            raise ValueError(f"{path} exists and {problem}; choose another path, or replace it with --force")

    def _not_own(self) -> str:
        """The reason why this command may not replace the file; empty if it may."""
        try:
            record = json.loads(self._record.read_bytes())
            by, digests = record["by"], str(record["sha256"])
        except (OSError, ValueError, LookupError, TypeError):
            return "was not written by this command"
        if sha256_of(self._file) not in digests:
            return "was changed since it was written"
        return "" if by == self._by else f"was written by {by}"

    def _write_record(self, digests: list[str]) -> None:
        partial = self._record.with_suffix(".partial")
        partial.write_text(json.dumps({"by": self._by, "sha256": digests}) + "\n")
        partial.replace(self._record)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # not a valid file name
        return False


def sha256_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _is_stream(path: Path) -> bool:
    """Whether the path is a pipe, a terminal, /dev/null, or a file that a shell has opened, such as /dev/stdout."""
    if not _exists(path) or path.is_dir():
        return False
    opened = str(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    return opened or not stat.S_ISREG(path.stat().st_mode)
