"""Where a server keeps what clients send: a directory that the next server removes if this one is killed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "paravt_serve_"
LOCK = "lock"  # held as long as the server lives: the kernel lets go of it, however a process ends


@contextmanager
def client_files() -> Iterator[Path]:
    """The directory; gone at the end, and those that killed servers of this user have left are gone at once."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another one removes it just now
            _remove_if_left(left)
    directory, lock = _locked()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _locked() -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (directory / LOCK).exists():  # else a server that starts at the same time took it for a dead one's
                return directory, lock
            os.close(lock)


def _remove_if_left(directory: Path) -> None:
    found = directory.lstat()
    if not directory.is_dir() or directory.is_symlink() or found.st_uid != os.getuid():
        return
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(lock)
