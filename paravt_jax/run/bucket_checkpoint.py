"""RUN/checkpoints/N in a bucket: the same files as on a disk, as objects; whole once N/state.json is there.

A bucket has no rename, so the record is written last, where there is none yet, and deleted first. Every host sends its
own blocks from its memory: nothing of them is on its disk. N without a record is what a kill has left, and is cleared.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import xxhash

from model_port.bucket import ABSENT, AT_ONCE, UPLOADING, Bucket, upload
from model_port.checkpoint import shard_blocks
from model_port.layout import PARAMS_DIR, RECORD_FILE
from paravt_jax.run.checkpoint import (
    OWN_SUM,
    Checkpoints,
    _by_folder,
    _Copied,
    _file_sums,
    _files_in,
    _record_sum,
    _widest,
)

BROKEN_RECORD = "broken.json"  # what the record becomes of a checkpoint that is set aside


class BucketCheckpoints(Checkpoints):
    """`before_commit` is called by host 0 when all blocks are there, and may refuse the checkpoint."""

    _directory: Bucket

    def __init__(self, *args: Any, before_commit: Callable[[], None], **options: Any):
        self._before_commit = before_commit
        super().__init__(*args, **options)

    def _clear(self) -> None:
        names = self._directory.names()
        known = {name.partition("/")[0] for name in names if name.endswith((f"/{RECORD_FILE}", f"/{BROKEN_RECORD}"))}
        self._directory.clear(
            name for name in names if name.partition("/")[0] not in known or name.endswith(f"/{UPLOADING}")
        )

    def _broken(self) -> list[str]:
        return sorted(name for name in self._directory.names() if name.endswith(f"/{BROKEN_RECORD}"))

    def _rename_broken(self, directory: Bucket) -> str:
        if self._hosts.leads:
            content, _ = (directory / RECORD_FILE).read()
            (directory / BROKEN_RECORD).write(content or b"")
            (directory / RECORD_FILE).delete()
        self._hosts.gather("set aside", None)
        return f"{directory.name} without its {RECORD_FILE}, which is {BROKEN_RECORD} now"

    def _begin(self, step: int, arrays: dict[str, _Copied], stack: ExitStack) -> str:
        place = self._directory / str(step)
        if self._hosts.leads:
            place.clear()
            (place / UPLOADING).write(b'{"files": []}')
        return str(place)

    def _write_own(self, partial: Bucket, arrays: dict[str, _Copied]) -> dict[str, list[Any]]:
        written: dict[str, list[Any]] = {}
        if self._hosts.leads:
            with TemporaryDirectory() as temporary:
                self._make(Path(temporary), arrays)
                files = _files_in(Path(temporary))
                written = _file_sums(Path(temporary), files)
                upload({str(path.relative_to(temporary)): path for path in files}, partial)

        def send(name: str, content_of: Callable[[], bytes]) -> None:
            content = content_of()
            (partial / name).write(content)
            written[name] = [len(content), xxhash.xxh3_128(content).hexdigest()]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            sent = []
            for folder, part in _by_folder(arrays).items():
                if folder == "." and self._adapter is not None:
                    continue
                dtype = _widest(part)
                for path, one in part.items():
                    place = f"{folder}/{PARAMS_DIR}/{path}/".removeprefix("./")
                    for number, content in shard_blocks(one.shape, one.shard, dtype, one.shards, path):
                        sent.append(pool.submit(send, place + number, content))
            try:
                for one in sent:
                    one.result()
            finally:
                pool.shutdown(cancel_futures=True)
        return written

    def _commit(
        self, partial: Bucket, record: dict[str, Any], written: list[dict[str, list[Any]]], stack: ExitStack
    ) -> None:
        if not self._hosts.leads:
            return
        sums = {name: found for of_host in written for name, found in of_host.items()}
        record = {**record, "files": dict(sorted(sums.items()))}
        self._before_commit()
        (partial / RECORD_FILE).write(json.dumps({**record, OWN_SUM: _record_sum(record)}).encode(), ABSENT)
        (partial / UPLOADING).delete()
        for old in self.steps[: -self._config.keep]:
            (self._directory / str(old) / RECORD_FILE).delete()
            (self._directory / str(old)).clear()
