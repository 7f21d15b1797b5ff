"""Writes a directory atomically: it is complete or absent, even if the process is killed.

Everything is written into a hidden sibling directory, synced, and renamed at the end. The sibling has a fixed name for
each destination and is locked while its writer lives, so the next run can recognize and remove a dead run's files.

The directory has a list of its files, and a directory is only replaced if it has no other or changed files. Neither a
mistyped path nor a user's own file in one of our directories can therefore lose data.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from model_port.bucket import UPLOADING, Bucket, is_address, upload_directory
from model_port.json_files import Section, read_object
from model_port.layout import absolute_path
from model_port.progress import BYTES, in_units

LOCK_FILE = ".lock"
LIST_FILE = ".written_by_paravt_jax.json"  # the directory's name, each file's size and time, and small files' checksums
SUMMED_BYTES = 2**24  # weights are larger, and are not read again for a checksum
GIB = 2**30
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # pathlib merges two slashes into one


def check_local(path: str | Path) -> None:
    """Raises for an address such as s3://bucket/x, which pathlib would treat as local folders."""
    if scheme := SCHEME.match(str(path)):
        raise ValueError(f"{path} is not a local path: {scheme[1]}:// is not supported here; give a local path")


@contextmanager
def named(path: object) -> Iterator[None]:
    """Adds a file name to OS errors that have none, for example if the disk is full."""
    try:
        yield
    except OSError as problem:
        _add_name(problem, path)
        raise


def _add_name(problem: OSError, path: object) -> None:
    if problem.errno is not None and problem.filename is None:  # without a number, its text would be lost
        problem.filename = str(path)


@contextmanager
def output_directory(
    dst: str | Path, *, force: bool = False, source: Path | None = None, needed_bytes: int = 0
) -> Iterator[Path]:
    """Yields an empty directory that is renamed to `dst` when the body ends, and removed if the body raises.

    `force` replaces an existing `dst` at the end, if this function wrote `dst` and it is unchanged. `source` is the
    directory that the body reads.
    """
    if is_address(dst):
        with _into_bucket(Bucket.of(dst), force, needed_bytes) as partial:
            yield partial
        return
    check_local(dst)
    dst = absolute_path(dst)
    dst = dst.resolve() if dst.is_symlink() else dst  # replacing a link would leave its target behind
    replaced = dst.with_name(f".{dst.name}.replaced")
    partial = dst.with_name(f".{dst.name}.partial")
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(partial, dst)
    except OSError as problem:
        where = f"{problem.filename}: {problem.strerror}"
        raise ValueError(f"{dst} cannot be written ({where}); choose another directory") from None
    try:
        try:
            _clear(partial)
            if replaced.exists() and not dst.exists():  # another run died between the two renames below
                replaced.rename(dst)
            delete(replaced)
            check_replaceable(dst, force, source)
            check_free_disk(dst, needed_bytes)
            yield partial
            (partial / LIST_FILE).write_text(json.dumps(_list_of(partial, dst.name)))
            _sync(partial)
            if dst.exists():
                dst.rename(replaced)
            partial.rename(dst)
        except BaseException as problem:
            if replaced.exists() and not dst.exists():
                replaced.rename(dst)
            _discard(partial)
            if isinstance(problem, OSError):
                _add_name(problem, dst)
            raise
        sync_path(dst.parent)
        (dst / LOCK_FILE).unlink()  # only after the rename, because another run could take an unlocked directory
        delete(replaced)
    finally:
        os.close(lock)


@contextmanager
def _into_bucket(bucket: Bucket, force: bool, needed_bytes: int) -> Iterator[Path]:
    """Yields a local directory in TMPDIR, and uploads it when the body ends."""
    _check_bucket_replaceable(bucket, force)
    with TemporaryDirectory() as temporary:
        directory = Path(temporary) / bucket.name
        with output_directory(directory, needed_bytes=needed_bytes) as partial:
            yield partial
        _check_bucket_replaceable(bucket, force)
        upload_directory(directory, bucket)


def check_replaceable(dst: Path, force: bool, source: Path | None = None) -> None:
    if is_address(dst):
        bucket = Bucket.of(dst)
        if source is not None and is_address(source) and Bucket.of(source).is_below(bucket):
            raise ValueError(f"{Bucket.of(source)} is in {bucket}, which would be replaced; choose another directory")
        return _check_bucket_replaceable(bucket, force)
    check_local(dst)
    if not dst.exists():
        return
    if not force:
        raise ValueError(f"{dst} already exists; choose another directory, or replace it with --force")
    if source is not None and source.resolve().is_relative_to(dst.resolve()):
        raise ValueError(f"{source} is in {dst}, which would be replaced; choose another directory")
    if problem := _why_not_ours(dst):
        raise ValueError(f"{dst} {problem}, so it is not replaced; move it away, or choose another directory")


def _check_bucket_replaceable(bucket: Bucket, force: bool) -> None:
    """Raises unless the bucket's directory may be replaced. Our own unfinished uploads need no `force`."""
    names, listed = set(bucket.names()), set[str]()
    if not names:
        return
    if not force and UPLOADING not in names:
        raise ValueError(f"{bucket} already exists; choose another directory, or replace it with --force")
    for name in {LIST_FILE, UPLOADING} & names:
        listed |= {name, *json.loads((bucket / name).read_bytes())["files"]}
    if foreign := sorted(names - listed):
        raise ValueError(
            f"{bucket} has {foreign[0]}, which this program did not write, so it is not replaced; choose another "
            f"directory"
        )


def _why_not_ours(directory: Path) -> str:
    """Returns "" if this program wrote the directory and it is unchanged; otherwise the reason for an error."""
    if not directory.is_dir():
        return "is not a directory"
    files, listed = _files(directory), directory / LIST_FILE
    if not listed.is_file():
        return "was not written by this program" if any(directory.iterdir()) else ""
    try:
        written = Section(str(listed), read_object(listed))
        name, statuses = written.text("name"), written.section("files").values
        sums = written.section("sums", default={}).values  # older lists have none
    except ValueError as problem:
        return f"has a list of files that this program did not write ({problem})"
    if name != directory.name:
        return f"was written as {name} and moved here"
    changed = sorted(name for name, status in files.items() if statuses.get(name) != status)
    # A copy without the modification times is still ours
    changed = [name for name in changed if not sums.get(name) or sums[name] != _sum(directory / name)]
    return f"has {changed[0]}, which was added or changed after it was written" if changed else ""


def _list_of(directory: Path, name: str) -> dict[str, Any]:
    files = _files(directory)
    sums = {file: checksum for file in files if (checksum := _sum(directory / file))}
    return {"name": name, "files": files, "sums": sums}


def _sum(path: Path) -> str | None:
    """The checksum of a small file; None for others."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > SUMMED_BYTES:
        return None
    return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()


def _files(directory: Path) -> dict[str, list[int]]:
    paths = (Path(root) / name for root, folders, names in os.walk(directory) for name in (*names, *folders))
    files = {path: path.lstat() for path in paths if path.is_symlink() or not path.is_dir()}
    return {
        str(path.relative_to(directory)): [status.st_size, status.st_mtime_ns]
        for path, status in files.items()
        if path.name not in (LOCK_FILE, LIST_FILE)
    }


def check_free_disk(dst: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(dst.parent).free
    if free_bytes < needed_bytes:
        raise ValueError(
            f"{dst.parent} has {in_units([free_bytes], BYTES)} free, but {in_units([needed_bytes], BYTES)} are needed; "
            f"free some space or choose another disk"
        )


def exit_on_sigterm() -> None:
    """Makes SIGTERM run the same cleanup as Ctrl-C."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _lock(partial: Path, dst: Path) -> int:
    """Creates `partial` and locks it for this process."""
    while True:
        partial.mkdir(exist_ok=True)  # outside of the context, because it may raise FileNotFoundError, as in /proc
        with suppress(FileNotFoundError):  # the previous owner has just renamed or removed the directory
            return lock_file(partial / LOCK_FILE, dst)


def lock_file(file: Path, output: Path) -> int:
    """Creates and locks a file for the process that writes `output`. The kernel releases the lock if it dies."""
    while True:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), file.stat()):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise ValueError(f"another process is writing {output}; wait for it, or choose another path") from None
        except FileNotFoundError:
            pass
        os.close(lock)  # the file was renamed or removed between open and lock


def _clear(partial: Path) -> None:
    for entry in partial.iterdir():
        if entry.name != LOCK_FILE:
            delete(entry)


def _discard(partial: Path) -> None:
    if not partial.exists():
        return
    _clear(partial)
    (partial / LOCK_FILE).unlink()
    with suppress(OSError):  # not empty, because another run has already taken the directory
        partial.rmdir()


def delete(path: Path, ignore_errors: bool = False) -> None:
    """Deletes a file or directory, if it exists. Of a link, for example to another disk, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors)
    else:
        path.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    for root, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync_path(Path(root) / name)
        sync_path(Path(root))


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
