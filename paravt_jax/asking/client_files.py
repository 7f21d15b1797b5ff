"""The server's directory for files from clients. If the server is killed, the next one removes it."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "paravt_serve_"
LOCK = "lock"  # locked while the server runs; the kernel releases the lock however the process ends


@contextmanager
def client_files() -> Iterator[Path]:
    """A new directory, removed at the end. First removes the directories of this user's killed servers."""
    for stale in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use by a running server, or being removed by another one
            _remove_if_stale(stale)
    directory, lock = _make_locked()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _make_locked() -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (directory / LOCK).exists():  # else another server that is starting removed it
                return directory, lock
            os.close(lock)


def _remove_if_stale(directory: Path) -> None:
    stat = directory.lstat()
    if not directory.is_dir() or directory.is_symlink() or stat.st_uid != os.getuid():
        return
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(lock)
