"""A directory that appears whole or not at all, whatever moment the process dies at.

Everything is written into a hidden sibling, synced, and renamed last. The sibling has one fixed name per destination
and is locked while its writer lives, so the next run can tell what a dead one left behind and clear it away.

What was written is listed in the directory, and only a directory with nothing else in it is ever replaced: neither a
mistyped path nor a file that somebody put beside ours is lost.
"""

import fcntl
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

from model_port.bucket import UPLOADING, Bucket, is_address, upload_directory
from model_port.json_files import Section, read_object

LOCK_FILE = ".lock"
LIST_FILE = ".written_by_paravt_jax.json"  # name of the directory, and every file with its size and time of change
GIB = 2**30
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # pathlib makes one slash of two


def check_local(path: str | Path) -> None:
    """Refuses an address such as gs://bucket/x, of which pathlib would make folders here."""
    if scheme := SCHEME.match(str(path)):
        raise ValueError(f"{path} is in no local directory: {scheme[1]}:// is not supported here, give a local path")


@contextmanager
def named(path: object) -> Iterator[None]:
    """A full disk, or a read that fails, does not say which file it was."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None:
            problem.filename = str(path)
        raise


@contextmanager
def output_directory(
    dst: str | Path, *, force: bool = False, source: Path | None = None, needed_bytes: int = 0
) -> Iterator[Path]:
    """Gives an empty directory that becomes `dst` when the body ends, and is removed when it raises.

    `force` replaces what is at `dst`, at the very end, and only what was written like this and is unchanged since.
    `source` is what the body reads.
    """
    if is_address(dst):
        with _into_bucket(Bucket.of(dst), force, needed_bytes) as partial:
            yield partial
        return
    check_local(dst)
    dst = Path(dst).absolute()
    dst = dst.resolve() if dst.is_symlink() else dst  # a replaced link would leave its target behind
    replaced = dst.with_name(f".{dst.name}.replaced")
    partial = partial_directory(dst)
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(partial, dst)
    except OSError as problem:
        where = f"{problem.filename}: {problem.strerror}"
        raise ValueError(f"{dst} cannot be written ({where}); choose another place") from None
    try:
        try:
            _clear(partial)
            if replaced.exists() and not dst.exists():  # died between the two renames below
                replaced.rename(dst)
            _remove(replaced)
            check_replaceable(dst, force, source)
            check_free_disk(dst, needed_bytes)
            yield partial
            (partial / LIST_FILE).write_text(json.dumps({"name": dst.name, "files": _files(partial)}))
            _sync(partial)
            if dst.exists():
                dst.rename(replaced)
            partial.rename(dst)
        except BaseException as problem:
            if replaced.exists() and not dst.exists():
                replaced.rename(dst)
            _discard(partial)
            if isinstance(problem, OSError) and problem.filename is None:
                problem.filename = str(dst)  # a full disk does not say which
            raise
        sync_path(dst.parent)
        (dst / LOCK_FILE).unlink()  # not before the rename: a directory without its lock could be taken by another run
        _remove(replaced)
    finally:
        os.close(lock)


@contextmanager
def _into_bucket(bucket: Bucket, force: bool, needed_bytes: int) -> Iterator[Path]:
    """Written on this disk first, where TMPDIR says."""
    _check_bucket_replaceable(bucket, force)
    with TemporaryDirectory() as temporary:
        directory = Path(temporary) / bucket.name
        with output_directory(directory, needed_bytes=needed_bytes) as partial:
            yield partial
        _check_bucket_replaceable(bucket, force)
        upload_directory(directory, bucket)


def partial_directory(dst: Path) -> Path:
    return dst.with_name(f".{dst.name}.partial")


def check_replaceable(dst: Path, force: bool, source: Path | None = None) -> None:
    if is_address(dst):
        if source is not None and is_address(source) and Bucket.of(source).is_below(Bucket.of(dst)):
            raise ValueError(f"{source} lies in {dst}, which would be replaced; choose another place")
        return _check_bucket_replaceable(Bucket.of(dst), force)
    check_local(dst)
    if not dst.exists():
        return
    if not force:
        raise ValueError(f"{dst} exists already; choose another place, or replace it with --force")
    if source is not None and source.resolve().is_relative_to(dst.resolve()):
        raise ValueError(f"{source} lies in {dst}, which would be replaced; choose another place")
    if problem := _not_ours(dst):
        raise ValueError(f"{dst} {problem}, so it is not replaced; move it away, or choose another place")


def _check_bucket_replaceable(bucket: Bucket, force: bool) -> None:
    """What an upload of ours has left that did not come to its end is replaced without being forced."""
    names, listed = set(bucket.names()), set[str]()
    if not names:
        return
    if not force and UPLOADING not in names:
        raise ValueError(f"{bucket} exists already; choose another place, or replace it with --force")
    for name in {LIST_FILE, UPLOADING} & names:
        listed |= {name, *json.loads((bucket / name).read_bytes())["files"]}
    if others := sorted(names - listed):
        raise ValueError(
            f"{bucket} holds {others[0]}, which was not written with it by this program, so it is not replaced; choose "
            f"another place"
        )


def _not_ours(directory: Path) -> str:
    """What of it was not written here in one piece, or has changed since; empty when there is nothing."""
    if not directory.is_dir():
        return "is no directory"
    files, listed = _files(directory), directory / LIST_FILE
    if not listed.is_file():
        return "was not written by this program" if any(directory.iterdir()) else ""
    try:
        written = Section(str(listed), read_object(listed))
        name, sizes = written.text("name"), written.section("files").values
    except ValueError as problem:
        return f"holds a list of files that this program did not write ({problem})"
    if name != directory.name:
        return f"was written as {name} and moved here"
    changed = sorted(name for name, what in files.items() if sizes.get(name) != what)
    return f"holds {changed[0]}, which was put there or changed since it was written" if changed else ""


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
            f"{dst.parent} has {free_bytes / GIB:.2f} GiB free, {needed_bytes / GIB:.2f} GiB are needed; "
            f"free some space or choose another disk"
        )


def exit_on_sigterm() -> None:
    """Lets a polite kill run the clean-up that Ctrl-C runs."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _lock(partial: Path, dst: Path) -> int:
    """Creates `partial` and locks it for this process; the kernel lets go of the lock of a process that dies."""
    while True:
        partial.mkdir(exist_ok=True)  # an error here is the place's own: in /proc it is that there is no such file
        try:
            lock = os.open(partial / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            continue  # its previous owner has just renamed or removed it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), (partial / LOCK_FILE).stat()):
                return lock
        except BlockingIOError:
            os.close(lock)
            raise ValueError(f"another process is writing {dst}; wait for it, or choose another place") from None
        except FileNotFoundError:
            pass
        os.close(lock)  # renamed or removed between opening and locking


def _clear(partial: Path) -> None:
    for entry in partial.iterdir():
        if entry.name != LOCK_FILE:
            _remove(entry)


def _discard(partial: Path) -> None:
    if not partial.exists():
        return
    _clear(partial)
    (partial / LOCK_FILE).unlink()
    with suppress(OSError):  # not empty: from this moment on it belongs to another run
        partial.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
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
