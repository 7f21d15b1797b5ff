"""A process's directory for weights: in shared memory if they fit, else on disk.

It stays locked for as long as its process lives. The directories of killed processes are removed, because they take the
memory that new weights need.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rollout.engine.protocol import EngineError
from rollout.supervisor import SHARED_MEMORY

WEIGHTS_PREFIX = "paravt-weights-"
SPARE_FRAC = 0.1  # part of a disk's space that is left free


class WeightRoot:
    """Call `make` before use and `remove` at the end."""

    def __init__(self, directory: str | Path = ""):
        """Without a directory the weights go to this host's memory, or to its disk if they do not fit there."""
        self.parents = [Path(directory)] if directory else [SHARED_MEMORY, Path(tempfile.gettempdir())]
        self.path: Path | None = None
        self._lock = ExitStack()

    def make(self, num_bytes: int) -> Path:
        for orphan in orphans(self.parents):
            shutil.rmtree(orphan, ignore_errors=True)
        parent = next((parent for parent in self.parents if fits(parent, num_bytes)), None)
        if parent is None:
            tried = " nor into ".join(map(str, self.parents))
            raise EngineError(
                f"{num_bytes / 2**30:.1f} GiB of weights do not fit into {tried}; free some space there, or "
                f"name another directory with engine.weights_dir"
            )
        hidden = Path(tempfile.mkdtemp(prefix=".paravt-", dir=parent))
        self._lock = ExitStack()
        self._lock.enter_context(_locked(hidden))
        self.path = hidden.rename(parent / f"{WEIGHTS_PREFIX}{hidden.name.removeprefix('.paravt-')}")
        return self.path

    def remove(self) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()
            self.path = None

    def readable(self) -> list[str]:
        """Names of all processes' directories that this process can read."""
        paths = (path for parent in self.parents for path in parent.glob(f"{WEIGHTS_PREFIX}*"))
        return [path.name for path in paths if os.access(path, os.R_OK | os.X_OK)]


def orphans(parents: Sequence[Path]) -> Iterator[Path]:
    """Directories of killed processes."""
    for directory in (path for parent in parents for path in parent.glob(f"{WEIGHTS_PREFIX}*")):
        with suppress(OSError), _locked(directory):  # OSError: in use, another user's, or gone
            yield directory


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """The kernel drops the lock when the process ends; it survives a rename of the directory."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(number)


def fits(directory: Path, num_bytes: int) -> bool:
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        return False
    usage = shutil.disk_usage(directory)
    return num_bytes + SPARE_FRAC * usage.total < usage.free
