"""A process's own directory, which the next process removes if its owner was killed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

HIDDEN = ".paravt-"  # prefix of a directory that is not locked yet


@contextmanager
def owned_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory, removed at the end. First removes what killed processes left."""
    remove_orphans([parent], prefix)
    hidden = Path(tempfile.mkdtemp(prefix=HIDDEN, dir=parent))
    with _locked(hidden):
        directory = hidden.rename(parent / f"{prefix}{hidden.name.removeprefix(HIDDEN)}")
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def remove_orphans(parents: Sequence[Path], prefix: str) -> None:
    for orphan in orphans(parents, prefix):
        shutil.rmtree(orphan, ignore_errors=True)


def orphans(parents: Sequence[Path], prefix: str) -> Iterator[Path]:
    """Directories of killed processes."""
    for directory in (path for parent in parents for path in parent.glob(f"{prefix}*")):
        with suppress(OSError), _locked(directory):  # OSError: in use, another user's, a link, or gone
            yield directory


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """The kernel drops the lock when the process ends; it survives a rename of the directory."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)
