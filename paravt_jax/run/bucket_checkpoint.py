"""Stores RUN/checkpoints/N in a bucket, one object per file; a checkpoint is complete once N/state.json exists.

Buckets cannot rename, so the record N/state.json is written last, only if none exists, and deleted first. Each host
uploads its own blocks from memory. A checkpoint without a record was left by a killed process and is removed.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import xxhash

from model_port.bucket import ABSENT, AT_ONCE, UPLOADING, Bucket, upload
from model_port.checkpoint import shard_blocks
from model_port.layout import RECORD_FILE
from paravt_jax.run.checkpoint import Arrays, Checkpoints, by_folder, common_dtype
from paravt_jax.run.checkpoint_files import FileSums, array_folder, file_sums, files_in, record_bytes

BROKEN_RECORD = "broken.json"  # new name of a broken checkpoint's record


class BucketCheckpoints(Checkpoints):
    """Checkpoints in a bucket. After all uploads, host 0 calls `before_commit`; if it raises, nothing is committed."""

    _directory: Bucket

    def __init__(self, *args: Any, before_commit: Callable[[], None], **options: Any):
        self._before_commit = before_commit
        super().__init__(*args, **options)

    def _clear(self) -> None:
        names = self._directory.names()
        complete = {name.partition("/")[0] for name in names if name.endswith((f"/{RECORD_FILE}", f"/{BROKEN_RECORD}"))}
        self._directory.clear(
            name for name in names if name.partition("/")[0] not in complete or name.endswith(f"/{UPLOADING}")
        )

    def _broken(self) -> list[str]:
        return sorted(name for name in self._directory.names() if name.endswith(f"/{BROKEN_RECORD}"))

    def _rename_broken(self, directory: Bucket) -> str:
        content, _ = (directory / RECORD_FILE).read()
        (directory / BROKEN_RECORD).write(content or b"")
        (directory / RECORD_FILE).delete()
        return f"{directory.name} with {RECORD_FILE} renamed to {BROKEN_RECORD}"

    def _start(self, step: int, arrays: Arrays, stack: ExitStack) -> Bucket:
        directory = self._directory / str(step)
        directory.clear()
        (directory / UPLOADING).write(b'{"files": []}')
        return directory

    def _write_parts(self, directory: Bucket, arrays: Arrays) -> FileSums:
        sums: FileSums = {}
        if self._hosts.leads:
            with TemporaryDirectory() as temporary:
                self._make_files(Path(temporary), arrays)
                files = files_in(Path(temporary))
                sums = file_sums(Path(temporary), files)
                upload({str(path.relative_to(temporary)): path for path in files}, directory)

        def send(name: str, make_content: Callable[[], bytes]) -> None:
            content = make_content()
            (directory / name).write(content)
            sums[name] = [len(content), xxhash.xxh3_128(content).hexdigest()]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            uploads = []
            for folder, in_folder in by_folder(arrays).items():
                if folder == "." and self._adapter is not None:
                    continue
                dtype = common_dtype(in_folder)
                for path, array in in_folder.items():
                    prefix = array_folder(folder, path)
                    for number, content in shard_blocks(array.shape, array.shard, dtype, array.parts, path):
                        uploads.append(pool.submit(send, prefix + number, content))
            try:
                for each in uploads:
                    each.result()
            finally:
                pool.shutdown(cancel_futures=True)
        return sums

    def _commit(self, directory: Bucket, record: dict[str, Any], sums: FileSums, stack: ExitStack) -> None:
        self._before_commit()
        (directory / RECORD_FILE).write(record_bytes(record, sums), ABSENT)
        (directory / UPLOADING).delete()
        for old in self.steps[: -self._config.keep]:
            (self._directory / str(old) / RECORD_FILE).delete()
            (self._directory / str(old)).clear()
