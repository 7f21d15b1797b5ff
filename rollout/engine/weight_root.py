"""A process's directory for weights: in shared memory if they fit there, otherwise on disk.

The directory stays locked while its process lives. The directories of killed processes are removed, because they occupy
the memory that new weights need.
"""

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rollout.engine.protocol import EngineError
from rollout.owned_directory import owned_directory, remove_orphans
from rollout.supervisor import SHARED_MEMORY

WEIGHTS_PREFIX = "paravt-weights-"
SPARE_FRAC = 0.2  # extra space, because a new tensor's file exists beside the old one until it replaces it


class WeightRoot:
    """A locked directory for weights. Call `make` before use and `remove` at the end."""

    def __init__(self, directory: str | Path = ""):
        """Uses shared memory, or the disk if the weights do not fit there, unless a parent `directory` is given."""
        self.parents = [Path(directory)] if directory else [SHARED_MEMORY, Path(tempfile.gettempdir())]
        self.path: Path | None = None
        self._owned = ExitStack()

    def make(self, num_bytes: int) -> Path:
        remove_orphans(self.parents, WEIGHTS_PREFIX)
        parent = next((parent for parent in self.parents if fits(parent, num_bytes)), None)
        if parent is None:
            tried = " nor into ".join(f"{each}{'' if each.is_dir() else ' (no directory)'}" for each in self.parents)
            raise EngineError(
                f"{num_bytes / 2**30:.1f} GiB of weights do not fit into {tried}; free some space there, or "
                f"name another directory with engine.weights_dir"
            )
        self.path = self._owned.enter_context(owned_directory(parent, WEIGHTS_PREFIX))
        return self.path

    def remove(self) -> None:
        self._owned.close()
        self.path = None

    def readable(self) -> list[str]:
        """Returns the names of all weight directories, of any process, that this process can read."""
        paths = (path for parent in self.parents for path in parent.glob(f"{WEIGHTS_PREFIX}*"))
        return [path.name for path in paths if os.access(path, os.R_OK | os.X_OK)]


def fits(directory: Path, num_bytes: int) -> bool:
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        return False
    return num_bytes * (1 + SPARE_FRAC) < shutil.disk_usage(directory).free
