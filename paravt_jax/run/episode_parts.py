"""The episodes of a step on their way into one file: each host leaves its own in the run's shared directory or bucket.

Only host 0 reads them, and writes RUN/episodes/NNNNNN.jsonl: episodes do not travel between the hosts.
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
    """`directory` is seen by all hosts."""

    def __init__(self, directory: Path | Bucket, hosts: Hosts):
        self._directory: Any = directory / EPISODES_DIR
        self._hosts = hosts

    def write(self, step: int, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """This host's episodes, in groups that host 0 finds by their keys."""
        content = json.dumps({key: b"".join(map(json_line, group)).decode() for key, group in rows.items()}).encode()
        file = self._file(step, self._hosts.index)
        if isinstance(file, Bucket):
            file.write(content)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as stream:
            stream.write(content)

    def read(self, step: int) -> dict[str, bytes]:
        """The groups of all other hosts: lines of the step's file, by key. All hosts have written them before."""
        files = [self._file(step, host) for host in range(1, self._hosts.num)]
        return {key: lines.encode() for file in files for key, lines in json.loads(file.read_bytes()).items()}

    def clear(self) -> None:
        """Removes what is in the step's file by now, or was left by a run that was killed."""
        if isinstance(self._directory, Bucket):
            self._directory.clear([name for name in self._directory.names() if name.endswith(SUFFIX)])
        else:
            for file in self._directory.glob(f".*{SUFFIX}"):
                file.unlink()

    def _file(self, step: int, host: int) -> Any:
        return self._directory / f".{step:06d}.host{host}{SUFFIX}"
