"""Collects a step's episodes in one file: each host writes its own episodes to the run's shared directory or bucket.

Only host 0 reads them and writes RUN/episodes/NNNNNN.jsonl, so no episodes are sent between hosts.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_port.bucket import Bucket
from paravt_jax.run.hosts import Hosts
from paravt_jax.run.log import EPISODES_DIR, json_line, whole_file

SUFFIX = ".part"


class EpisodeParts:
    """Files with the episodes of all hosts. All hosts must see `directory`."""

    def __init__(self, directory: Path | Bucket, hosts: Hosts):
        self._directory: Any = directory / EPISODES_DIR
        self._hosts = hosts

    def write(self, step: int, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Writes this host's groups of episodes, by the keys that host 0 looks up."""
        content = json.dumps({key: b"".join(map(json_line, group)).decode() for key, group in rows.items()}).encode()
        file = self._file(step, self._hosts.index)
        if isinstance(file, Bucket):
            file.write(content)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as stream:
            stream.write(content)

    def read(self, step: int) -> dict[str, bytes]:
        """Reads the other hosts' groups as lines for the step's file, by key. All hosts must have written them."""
        files = [self._file(step, host) for host in range(1, self._hosts.num)]
        return {key: lines.encode() for file in files for key, lines in json.loads(file.read_bytes()).items()}

    def clear(self) -> None:
        """Removes files that are already in the step's file or were left by a killed run."""
        if isinstance(self._directory, Bucket):
            self._directory.clear([name for name in self._directory.names() if name.endswith(SUFFIX)])
        else:
            for file in self._directory.glob(f".*{SUFFIX}"):
                file.unlink()

    def _file(self, step: int, host: int) -> Any:
        return self._directory / f".{step:06d}.host{host}{SUFFIX}"
