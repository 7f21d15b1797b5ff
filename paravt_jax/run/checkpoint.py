"""Saves and restores a learner's state in RUN/checkpoints, in the background; a checkpoint is complete or absent.

Each host copies its devices' shards to memory once and writes them with checksums to a hidden directory that all hosts
share. When all hosts are done, host 0 adds the record and renames the directory. Orbax also writes per host, but has no
checksums and would copy the state once more.

python -m paravt_jax.run.checkpoint verify DIR      DIR is a checkpoint, or contains checkpoints
"""

import argparse
import json
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from model_port.adapters import AdapterInfo, write_adapter
from model_port.bucket import Bucket, is_address
from model_port.checkpoint import ArrayPart, box_of, make_arrays, write_shards
from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.config import read_config
from model_port.hf_files import read_side_files, write_side_files
from model_port.layout import CHECKPOINTS_DIR, HF_DIR, OPTIMIZER_DIR, RECORD_FILE
from model_port.output_dir import delete, output_directory, sync_path
from model_port.sharding import on_host
from paravt_jax.config import CheckpointConfig
from paravt_jax.learner.learner import Learner
from paravt_jax.run.checkpoint_files import (
    BrokenCheckpoint,
    Directory,
    FileSums,
    file_sums,
    files_in,
    leaves_by_name,
    location,
    read_checkpoint,
    record_bytes,
    steps_in,
    stored_part,
    verify,
)
from paravt_jax.run.hosts import ALONE, Hosts

BROKEN_SUFFIX = ".broken"
SUMS_FILE = ".sums{}.json"  # a host's checksums, until host 0 adds them to the record


@dataclass(frozen=True)
class LocalArray:
    """This host's part of an array, in host memory."""

    shape: tuple[int, ...]  # the shape of the whole array
    shard: tuple[int, ...]  # the shape of each shard
    dtype: np.dtype
    parts: list[ArrayPart]


Arrays = dict[str, LocalArray]


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that several hosts are writing. `written` gives this host's error, or an empty string."""

    step: int
    directory: Directory
    record: dict[str, Any]
    stack: ExitStack
    written: Future[str]


class Checkpoints:
    """A run's checkpoints. Only one process may use them at a time."""

    def __init__(
        self,
        directory: Directory,
        hf_dir: Path,
        config: CheckpointConfig,
        say: Callable[[str], None],
        adapter: AdapterInfo | None = None,
        hosts: Hosts = ALONE,
    ):
        """Every checkpoint includes the files in `hf_dir` except weights. With `adapter`, only the adapter trains."""
        self._directory: Any = directory if isinstance(directory, Bucket) else directory.absolute()
        self._config, self._say, self._hosts = config, say, hosts
        # Raises here instead of at the first export.
        self._adapter, self._model = adapter, read_config(hf_dir)
        self._hf_files = read_side_files(hf_dir)
        if hosts.leads:
            self._clear()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self._committing: tuple[int, Future[str]] | None = None  # on host 0

    @property
    def steps(self) -> list[int]:
        """The steps of complete checkpoints, in ascending order."""
        return steps_in(self._directory)

    @property
    def latest(self) -> Directory | None:
        return self._directory / str(self.steps[-1]) if self.steps else None

    def save(self, learner: Learner, progress: dict[str, Any]) -> None:
        """Saves in the background. Returns when the state is in host memory, so that the learner may update it."""
        self.wait()  # a host holds only one copy of the state at a time
        step = int(learner.state.step)
        if self._hosts.gather("saved steps", step in self.steps)[0]:
            return
        leaves = leaves_by_name(stored_part(learner.state, self._adapter))
        record: dict[str, Any] = {
            "scalars": {name: np.asarray(leaf).item() for name, leaf in leaves.items() if not leaf.ndim},
            "shapes": {name: leaf.shape for name, leaf in leaves.items()},
            "progress": progress,
        }
        record = json.loads(json.dumps(record))  # a copy, because the trainer changes its progress

        def copied(name: str) -> LocalArray:
            return _copy(leaves[name], complete=self._adapter is not None and location(name)[0] == ".")

        arrays = {name: copied(name) for name, leaf in leaves.items() if leaf.ndim}
        if self._hosts.num == 1:
            self._committing = step, self._pool.submit(_error_of, partial(self._save_alone, step, arrays, record))
        else:
            self._start_together(step, arrays, record)

    def commit_if_written(self) -> None:
        """Commits a checkpoint on host 0 if all hosts have written their parts. All hosts must call it together."""
        if self._pending is not None:
            written = self._hosts.gather("checkpoint written", self._pending.written.done())
            if all(written):
                self._complete()

    def wait(self) -> None:
        """Waits until all checkpoints are on disk or have failed. All hosts must call it together."""
        if self._pending is not None:
            self._complete()
        if self._committing is not None:
            step, committed = self._committing
            self._committing = None
            if problem := committed.result():
                self._report(step, problem)

    def close(self) -> None:
        """Completes the last checkpoint of a single host. With several hosts, a host may close alone after an error."""
        if self._hosts.num == 1:
            self.wait()
        self._pool.shutdown()

    def restore(self, learner: Learner) -> dict[str, Any] | None:
        """Sets the learner's state from the newest intact checkpoint and returns its progress; None if there is none.

        Broken checkpoints are renamed to N.broken. If no intact checkpoint is left, an error lists them.
        """
        self.wait()
        old = learner.state
        for step in self._hosts.gather("steps", self.steps[::-1])[0]:
            directory, progress, problem = self._directory / str(step), {}, ""
            try:
                learner.state, progress = read_checkpoint(directory, old, self._model, self._adapter)
            except BrokenCheckpoint as broken:
                problem = str(broken)
            problem = next(filter(None, self._hosts.gather("restored", problem)), "")
            if not problem:
                return progress
            renamed = self._rename_broken(directory) if self._hosts.leads else ""
            renamed = self._hosts.gather("set aside", renamed)[0]
            following = f"trying step {self.steps[-1]} next" if self.steps else "there is no earlier one"
            self._say(f"The checkpoint {directory} is broken ({problem}). It is kept as {renamed}; {following}.")
        if broken := self._broken():
            raise RuntimeError(
                f"{self._directory} has no intact checkpoint left ({', '.join(broken)}); restore one, move the run's "
                f"directory away to start over, or choose another run_dir"
            )
        return None

    def _save_alone(self, step: int, arrays: Arrays, record: dict[str, Any]) -> None:
        with ExitStack() as stack:
            directory = self._start(step, arrays, stack)
            self._commit(directory, record, self._write_parts(directory, arrays), stack)

    # With several hosts: they start and commit a checkpoint together, and write it in the background.

    def _start_together(self, step: int, arrays: Arrays, record: dict[str, Any]) -> None:
        address, problem, stack = "", "", ExitStack()
        if self._hosts.leads:
            try:
                with ExitStack() as started:
                    address = str(self._start(step, arrays, started))
                    stack = started.pop_all()
            except Exception as error:
                problem = _sentence(error)
        address, problem = self._hosts.gather("checkpoint starts", (address, problem))[0]
        if problem:
            self._report(step, problem)
            return
        directory = Bucket.of(address) if is_address(address) else Path(address)
        written = self._pool.submit(_error_of, partial(self._write_own, directory, arrays))
        self._pending = _Pending(step, directory, record, stack, written)

    def _write_own(self, directory: Directory, arrays: Arrays) -> None:
        """Writes this host's part and its checksums."""
        sums = json.dumps(self._write_parts(directory, arrays)).encode()
        file: Any = directory / SUMS_FILE.format(self._hosts.index)
        file.write(sums) if isinstance(file, Bucket) else file.write_bytes(sums)

    def _commit_together(self, pending: _Pending, problem: str) -> None:
        """Commits the checkpoint on host 0, or removes it if a host failed to write its part."""
        with pending.stack:
            if problem:
                raise ValueError(problem)
            sums: FileSums = {}
            for host in range(self._hosts.num):
                file: Any = pending.directory / SUMS_FILE.format(host)
                sums |= json.loads(file.read_bytes())
                file.delete() if isinstance(file, Bucket) else file.unlink()
            self._commit(pending.directory, pending.record, sums, pending.stack)

    def _complete(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        problems = self._hosts.gather("checkpoint", pending.written.result())
        problem = "; ".join(f"host {host}: {text}" for host, text in enumerate(problems) if text)
        if self._hosts.leads:
            self._committing = (
                pending.step,
                self._pool.submit(_error_of, partial(self._commit_together, pending, problem)),
            )
        elif problem:
            self._report(pending.step, problem)

    def _report(self, step: int, problem: str) -> None:
        restart = f"would resume from step {self.steps[-1]}" if self.steps else "would start over"
        self._say(
            f"The checkpoint of step {step} could not be written ({problem}). Training continues; a restart {restart}."
        )

    # For local directories; BucketCheckpoints overrides these methods.

    def _clear(self) -> None:
        """Removes files that a killed process left."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for pattern in (".*.partial", ".*.removed"):
            for leftover in self._directory.glob(pattern):
                delete(leftover)

    def _broken(self) -> list[str]:
        return sorted(entry.name for entry in self._directory.glob(f"*{BROKEN_SUFFIX}"))

    def _rename_broken(self, directory: Any) -> str:
        renamed = directory.with_name(f"{directory.name}{BROKEN_SUFFIX}")
        if renamed.exists():
            _remove(renamed)
        directory.rename(renamed)
        return renamed.name

    def _start(self, step: int, arrays: Arrays, stack: ExitStack) -> Directory:
        """Creates the hidden directory with empty arrays on host 0."""
        num_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays.values())
        directory = stack.enter_context(output_directory(self._directory / str(step), needed_bytes=num_bytes))
        self._make_files(directory, arrays)
        return directory

    def _make_files(self, directory: Path, arrays: Arrays) -> None:
        """Creates all files except the arrays' blocks."""
        for folder, in_folder in by_folder(arrays).items():
            (directory / folder).mkdir(exist_ok=True)
            if folder == "." and self._adapter is not None:
                adapter = {path: array.parts[0].values for path, array in in_folder.items()}  # each is complete here
                write_adapter(directory, self._model, self._adapter, adapter)
            else:
                shapes = {path: array.shape for path, array in in_folder.items()}
                shards = {path: array.shard for path, array in in_folder.items()}
                make_arrays(directory / folder, shapes, shards, common_dtype(in_folder))
        write_side_files(self._hf_files, directory / HF_DIR)

    def _write_parts(self, directory: Any, arrays: Arrays) -> FileSums:
        files: list[Path] = []
        for folder, in_folder in by_folder(arrays).items():
            if folder != "." or self._adapter is None:
                files += write_shards(directory / folder, {path: array.parts for path, array in in_folder.items()})
        if not self._hosts.leads:  # host 0 syncs its files before the rename
            for file in files:
                sync_path(file)
        return file_sums(directory, files)

    def _commit(self, directory: Any, record: dict[str, Any], sums: FileSums, stack: ExitStack) -> None:
        """Writes the record on host 0 and closes `stack`, which renames the directory."""
        new = [path for path in files_in(directory) if str(path.relative_to(directory)) not in sums]
        (directory / RECORD_FILE).write_bytes(record_bytes(record, sums | file_sums(directory, new)))
        stack.close()
        for old in self.steps[: -self._config.keep]:
            _remove(self._directory / str(old))


def by_folder(arrays: Arrays) -> dict[str, Arrays]:
    """Groups arrays by folder of the checkpoint, keyed by their paths in that folder."""
    folders: dict[str, Arrays] = {".": {}, OPTIMIZER_DIR: {}}
    for name, array in arrays.items():
        folder, path = location(name)
        folders[folder][path] = array
    return folders


def common_dtype(arrays: Arrays) -> np.dtype:
    """The smallest dtype that can represent all values of all arrays."""
    return np.result_type(*{array.dtype for array in arrays.values()})


def _copy(leaf: jax.Array, complete: bool) -> LocalArray:
    """Copies an array to host memory. On CPU the copies are views, and updates never overwrite a viewed array.

    `complete` copies the whole array on every host. Otherwise a single host copies each replicated shard, so that it is
    written once.
    """
    dtype = np.dtype(leaf.dtype)
    if complete:
        return LocalArray(leaf.shape, leaf.shape, dtype, [ArrayPart(box_of(None, leaf.shape), on_host(leaf))])
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    parts = [ArrayPart(box_of(shard.index, leaf.shape), np.asarray(shard.data)) for shard in shards]
    return LocalArray(leaf.shape, leaf.sharding.shard_shape(leaf.shape), dtype, parts)


def _error_of(work: Callable[[], None]) -> str:
    """Runs a part of a save and returns its error message or an empty string, because a failure must not end the run.

    It returns no exception, because a traceback would keep the arrays alive.
    """
    try:
        work()
    except Exception as error:
        return _sentence(error)
    return ""


def _sentence(problem: Exception) -> str:
    named = isinstance(problem, OSError | ValueError)
    return f"{'' if named else f'{type(problem).__name__}: '}{problem}".partition("\n")[0]


def _remove(directory: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a killed process never leaves a partial checkpoint."""
    hidden = directory.with_name(f".{directory.name}.removed")
    directory.rename(hidden)
    delete(hidden, ignore_errors=True)


def _has_checkpoints(directory: Directory) -> bool:
    """Whether a directory has checkpoints or is one."""
    if steps_in(directory):
        return True
    if isinstance(directory, Bucket):
        return RECORD_FILE in directory.listed(RECORD_FILE)
    return (directory / RECORD_FILE).exists()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.run.checkpoint"), description="Compares a run's checkpoints with their checksums."
    )
    parser.add_argument("command", choices=["verify"])
    parser.add_argument("directory", metavar="DIR", help="RUN, or RUN/checkpoints or a single checkpoint, also gs://…")
    add_debug_flag(parser)
    args = parser.parse_args()
    given: Directory = Bucket.of(args.directory) if is_address(args.directory) else Path(args.directory)
    if isinstance(given, Path) and not given.is_dir():
        raise ValueError(f"{given} is not a directory")
    if not (directory := next((part for part in (given / CHECKPOINTS_DIR, given) if _has_checkpoints(part)), None)):
        raise ValueError(f"{given} is neither a run with checkpoints nor one of them")
    results = list(verify(directory))
    for checkpoint, problem in results:
        print(f"{checkpoint}: {f'broken, {problem}' if problem else 'intact'}")
    if broken := [checkpoint for checkpoint, problem in results if problem]:
        raise RuntimeError(f"{len(broken)} of {len(results)} checkpoints are broken")


if __name__ == "__main__":
    run_cli(main)
