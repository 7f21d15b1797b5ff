"""A directory that a process owns. If its owner is killed, the next process removes it.

The owner locks a file in the directory, because on NFS other hosts do not see locks on directories.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

HIDDEN = ".paravt-"  # prefix of a directory that is not locked yet
LOCK_FILE = ".lock"


@contextmanager
def owned_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Makes a new locked directory, and removes it at the end. First removes directories of killed processes."""
    remove_orphans([parent], prefix)
    hidden = Path(tempfile.mkdtemp(prefix=HIDDEN, dir=parent))
    (hidden / LOCK_FILE).touch()
    directory = parent / f"{prefix}{hidden.name.removeprefix(HIDDEN)}"
    try:
        with _locked(hidden):
            hidden.rename(directory)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_orphans(parents: Sequence[Path], prefix: str) -> None:
    for orphan in orphans(parents, prefix):
        shutil.rmtree(orphan, ignore_errors=True)
    for directory in _directories(parents, prefix):
        with suppress(OSError):  # not empty, for example because NFS keeps the lock's file until it is closed
            directory.rmdir()


def orphans(parents: Sequence[Path], prefix: str) -> Iterator[Path]:
    """Yields the directories of killed processes, each locked during its iteration."""
    for directory in _directories(parents, prefix):
        with suppress(OSError), _locked(directory):  # fails if it is in use, another user's, a link, or gone
            yield directory


def _directories(parents: Sequence[Path], prefix: str) -> list[Path]:
    return [path for parent in parents for path in parent.glob(f"{prefix}*")]


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Locks a directory. The kernel drops the lock when the process ends; a rename of the directory keeps it."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        number = os.open(LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW, dir_fd=opened)
    finally:
        os.close(opened)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)
