"""RUN/checkpoints/N: the whole state of a learner after N updates, written in the background, whole or not there.

    N/params/, N/hf/      what `model_port.load` and `model_port.export` take
    N/adapter_*           in the place of N/params, where adapters train: what PEFT and these two take
    N/optimizer/params/   every other array of the state, named by its path, in the same format
    N/state.json          scalars of the state, the trainer's progress, shapes of arrays, sums of files; written last

What adapters lie beside is not stored, only where it was and the sum of its weights, which must be found again. Both
`params` are what `orbax.checkpoint.StandardCheckpointer().restore` reads. They are written as raw blocks, from one
copy on the host: orbax would copy that once more. A hidden directory is renamed at the end.

Of several hosts each copies, writes and sums the shards that are its own, into one directory that all see, and reads
what its devices need; host 0 renames when all have written. Orbax writes by host as well, but knows no sums of files.

A checkpoint is broken when a file is not there, is shorter or longer, or has other bytes than were written: it is set
aside, and the one before it is read. A file that cannot be read at the moment proves nothing, and ends the run instead.

python -m paravt_jax.run.checkpoint verify DIR      DIR is a checkpoint, or holds some
"""

import argparse
import io
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash
from flax import nnx

from model_port.adapters import (
    AdapterInfo,
    check_base,
    check_base_files,
    read_adapter,
    read_adapter_info,
    write_adapter,
)
from model_port.bucket import Bucket, downloaded, is_address
from model_port.checkpoint import (
    ArrayPart,
    Box,
    box_of,
    cast,
    common_box,
    grid_of,
    index_of,
    make_arrays,
    write_shards,
)
from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.config import ModelConfig, config_from_hf, read_hf_config
from model_port.hf_files import read_side_files, write_side_files
from model_port.json_files import Section, parse_object
from model_port.layout import HF_DIR, OPTIMIZER_DIR, PARAMS_DIR, RECORD_FILE
from model_port.output_dir import LIST_FILE, LOCK_FILE, named, output_directory, sync_path
from model_port.progress import Meter
from model_port.sharding import on_host, param_name
from paravt_jax.config import CheckpointConfig
from paravt_jax.learner.learner import Learner
from paravt_jax.learner.programs import TrainState
from paravt_jax.run.hosts import ALONE, Hosts

BROKEN_SUFFIX = ".broken"
MAX_LENGTH = 2**48  # of an axis, and of a run
RECORD_KEYS = ("scalars", "shapes", "progress", "files")
OWN_SUM = "sum"  # of the record without it
BLOCK = re.compile(rf"(^|/){PARAMS_DIR}/[^/]+/[\d.]+$")  # of an array
SUM_THREADS = min(16, os.cpu_count() or 1)
SUM_BYTES = 2**20  # read at a time


class BrokenCheckpoint(Exception):
    """It cannot be read, whatever model it is of."""


class Checkpoints:
    """The checkpoints of one run; one process at a time."""

    def __init__(
        self,
        directory: Path | Bucket,
        hf_dir: Path,
        config: CheckpointConfig,
        say: Callable[[str], None],
        adapter: AdapterInfo | None = None,
        hosts: Hosts = ALONE,
    ):
        """`hf_dir` has the files beside the weights that every checkpoint carries; they are read here, once.

        `adapter` is what the learner trains, where it is not the model itself.
        """
        self._directory: Any = directory if isinstance(directory, Bucket) else directory.absolute()
        self._config, self._say = config, say
        self._hosts = hosts
        # Refused now, not when the first checkpoint is exported.
        self._adapter, self._model = adapter, config_from_hf(read_hf_config(hf_dir), str(hf_dir))
        self._hf_files = read_side_files(hf_dir)
        if hosts.leads:
            self._clear()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future[str | None]] | None = None

    def _clear(self) -> None:
        """What is there of a process that was killed."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for pattern in (".*.partial", ".*.removed"):
            for leftover in self._directory.glob(pattern):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    @property
    def steps(self) -> list[int]:
        """Those on disk, the oldest first."""
        return _steps_in(self._directory)

    @property
    def latest(self) -> Path | Bucket | None:
        return self._directory / str(self.steps[-1]) if self.steps else None

    def save(self, learner: Learner, progress: dict[str, Any]) -> None:
        """Returns when the state is copied to the host; then the learner may go on."""
        self.wait()  # the host holds one copy of the state at a time
        step = int(learner.state.step)
        if self._hosts.gather("saved", step in self.steps)[0]:
            return
        leaves = _named(self._stored(learner.state))
        record: dict[str, Any] = {
            "scalars": {name: np.asarray(leaf).item() for name, leaf in leaves.items() if not leaf.ndim},
            "shapes": {name: leaf.shape for name, leaf in leaves.items()},
            "progress": progress,
        }
        record = json.loads(json.dumps(record))  # as it is now: the trainer goes on with its own
        whole = self._adapter is not None
        arrays = {name: _copied(leaf, whole and _home(name)[0] == ".") for name, leaf in leaves.items() if leaf.ndim}
        self._writing = step, self._pool.submit(self._write, step, arrays, record)

    def wait(self) -> None:
        """Until everything is on disk, or known not to get there."""
        if self._writing is None:
            return
        step, future = self._writing
        problem = future.result()
        self._writing = None
        if problem is not None:
            latest = f"would continue from step {self.steps[-1]}" if self.steps else "would begin anew"
            self._say(
                f"The checkpoint of step {step} could not be written ({problem}). Training goes on; a restart {latest}."
            )

    def close(self) -> None:
        self.wait()
        self._pool.shutdown()

    def restore(self, learner: Learner) -> dict[str, Any] | None:
        """Sets the learner's state from the newest whole checkpoint and returns its progress; None if there is none.

        The old state is given up array by array, so that devices never hold two. Broken checkpoints become N.broken;
        where no other is left an error says so.
        """
        self.wait()
        old = learner.state
        for step in self._hosts.gather("steps", self.steps[::-1])[0]:
            directory, record, problem = self._directory / str(step), {}, ""
            try:
                record = _read_record(directory)
                _check_same(directory, record, self._stored(old))
                with Meter(f"loading {directory}"):
                    learner.state = self._read_state(directory, record, old)
            except BrokenCheckpoint as found:
                problem = str(found)
            problem = next(filter(None, self._hosts.gather("restored", problem)), "")
            if not problem:
                return record["progress"]
            self._set_aside(directory, problem)
        if broken := self._broken():
            raise RuntimeError(
                f"{self._directory} has no whole checkpoint left ({', '.join(broken)}); put one back, move the run's "
                f"directory away to begin anew, or choose another run_dir"
            )
        return None

    def _broken(self) -> list[str]:
        return sorted(entry.name for entry in self._directory.glob(f"*{BROKEN_SUFFIX}"))

    def _set_aside(self, directory: Path | Bucket, problem: str) -> None:
        aside = self._rename_broken(directory)
        latest = f"step {self.steps[-1]} is tried next" if self.steps else "there is none before it"
        self._say(f"The checkpoint {directory} is broken ({problem}). It is kept as {aside}; {latest}.")

    def _rename_broken(self, directory: Any) -> str:
        aside = directory.with_name(f"{directory.name}{BROKEN_SUFFIX}")
        if self._hosts.leads:
            if aside.exists():
                _remove(aside)
            directory.rename(aside)
        self._hosts.gather("set aside", None)
        return aside.name

    def _stored(self, state: TrainState) -> TrainState:
        """The part of it that a checkpoint holds."""
        return state if self._adapter is None else replace(state, frozen=nnx.State({}))

    def _read_state(self, directory: Path | Bucket, record: dict[str, Any], old: TrainState) -> TrainState:
        if self._adapter is None:
            return _read_state(directory, record, old)
        state = _read_state(directory, record, self._stored(old), partial(_read_adapter, self._model, self._adapter))
        return replace(state, frozen=old.frozen)

    def _write(self, step: int, arrays: dict[str, "_Copied"], record: dict[str, Any]) -> str | None:
        """Why it failed. Not an exception: its traceback would hold the arrays."""
        try:
            with ExitStack() as stack:
                partial, *_ = self._on_all(lambda: self._begin(step, arrays, stack))
                place = Bucket.of(partial) if is_address(partial) else Path(partial)
                written = self._on_all(lambda: self._write_own(place, arrays))
                self._on_all(lambda: self._commit(place, record, written, stack))
        except Exception as problem:  # whatever it is, the run is worth more than one checkpoint
            return _words(problem)
        return None

    def _on_all(self, work: Callable[[], Any]) -> list[Any]:
        """What came of it on every host; where it failed on one it fails on all."""
        result, failed = None, None
        try:
            result = work()
        except Exception as problem:
            failed = problem
        said = self._hosts.gather("checkpoint", (result, failed and _words(failed)))
        try:
            if failed is not None:
                raise failed
        finally:
            failed = None  # its traceback knows this frame, and both would hold the arrays
        for host, (_, words) in enumerate(said):
            if words is not None:
                raise ValueError(f"{self._hosts.name_of(host)}: {words}")
        return [one for one, _ in said]

    def _begin(self, step: int, arrays: dict[str, "_Copied"], stack: ExitStack) -> str:
        """Host 0 makes the hidden directory, with arrays that have nothing in them yet."""
        if not self._hosts.leads:
            return ""
        num_bytes = sum(array.num_bytes for array in arrays.values())
        partial = stack.enter_context(output_directory(self._directory / str(step), needed_bytes=num_bytes))
        self._make(partial, arrays)
        return str(partial)

    def _make(self, partial: Path, arrays: dict[str, "_Copied"]) -> None:
        """All that is no block of an array."""
        for folder, part in _by_folder(arrays).items():
            (partial / folder).mkdir(exist_ok=True)
            if folder == "." and self._adapter is not None:
                write_adapter(partial, self._model, self._adapter, {path: one.only for path, one in part.items()})
            else:
                widest = _widest(part)
                shapes, shards = ({path: getattr(one, of) for path, one in part.items()} for of in ("shape", "shard"))
                make_arrays(partial / folder, shapes, shards, widest)
        write_side_files(self._hf_files, partial / HF_DIR)

    def _write_own(self, partial: Any, arrays: dict[str, "_Copied"]) -> dict[str, list[Any]]:
        """The shards of this host, and the bytes and sums of their files."""
        files: list[Path] = []
        for folder, part in _by_folder(arrays).items():
            if folder != "." or self._adapter is None:
                files += write_shards(partial / folder, {path: one.shards for path, one in part.items()})
        if not self._hosts.leads:  # host 0 sees to what is in its own memory
            for file in files:
                sync_path(file)
        return _file_sums(partial, files)

    def _commit(
        self, partial: Any, record: dict[str, Any], written: list[dict[str, list[Any]]], stack: ExitStack
    ) -> None:
        """Host 0 writes what all have written, and gives it its name."""
        if not self._hosts.leads:
            return
        sums = {name: found for of_host in written for name, found in of_host.items()}
        others = [path for path in _files_in(partial) if str(path.relative_to(partial)) not in sums]
        record = {**record, "files": dict(sorted((sums | _file_sums(partial, others)).items()))}
        (partial / RECORD_FILE).write_text(json.dumps({**record, OWN_SUM: _record_sum(record)}))
        stack.close()
        for old in self.steps[: -self._config.keep]:
            _remove(self._directory / str(old))


@dataclass(frozen=True)
class _Copied:
    """What this host writes of an array of the state, in its memory."""

    shape: tuple[int, ...]
    shard: tuple[int, ...]  # the shape of each part
    dtype: np.dtype
    shards: list[ArrayPart]

    @property
    def num_bytes(self) -> int:
        """Of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def only(self) -> np.ndarray:
        """The array, which is its own only part."""
        ((_, values),) = self.shards
        return values


def _copied(leaf: jax.Array, whole: bool) -> _Copied:
    """On CPU these are views, and an update does not take back what has one.

    `whole`: every host has all of it. Otherwise of equal shards the first one counts, so that each is written once.
    """
    dtype = np.dtype(leaf.dtype)
    if whole:
        return _Copied(leaf.shape, leaf.shape, dtype, [ArrayPart(box_of(None, leaf.shape), on_host(leaf))])
    own = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    shards = [ArrayPart(box_of(shard.index, leaf.shape), np.asarray(shard.data)) for shard in own]
    return _Copied(leaf.shape, leaf.sharding.shard_shape(leaf.shape), dtype, shards)


def _by_folder(arrays: dict[str, _Copied]) -> dict[str, dict[str, _Copied]]:
    folders: dict[str, dict[str, _Copied]] = {".": {}, OPTIMIZER_DIR: {}}
    for name, array in arrays.items():
        folder, path = _home(name)
        folders[folder][path] = array
    return folders


def _widest(part: dict[str, _Copied]) -> np.dtype:
    """The dtype that holds every value of all these arrays."""
    return np.result_type(*{one.dtype for one in part.values()})


def _words(problem: Exception) -> str:
    known = isinstance(problem, OSError | ValueError)
    return f"{'' if known else f'{type(problem).__name__}: '}{problem}".partition("\n")[0]


def _steps_in(directory: Path | Bucket) -> list[int]:
    if isinstance(directory, Bucket):  # one without its record is not whole
        parts = [name.split("/") for name in directory.names()]
        return sorted(int(part[0]) for part in parts if part[1:] == [RECORD_FILE] and part[0].isdecimal())
    return sorted(int(entry.name) for entry in directory.glob("*") if entry.name.isdecimal())


def _named(state: TrainState) -> dict[str, Any]:
    """The leaves in their order: params.text.embed.table_vd, opt_state.1.0.mu.text.embed.table_vd, step, ..."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path, _ in leaves]
    names = [param_name([path]) for path in paths]
    named = {
        re.sub(r"^(trainable|frozen)\.", "params.", name): leaf for name, (_, leaf) in zip(names, leaves, strict=True)
    }
    assert len(named) == len(leaves)
    return named


def _home(name: str) -> tuple[str, str]:
    """Folder in the checkpoint and path in its params/. Parameters go by the names that model_port knows."""
    return (".", name.removeprefix("params.")) if name.startswith("params.") else (OPTIMIZER_DIR, name)


def _files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in (LOCK_FILE, LIST_FILE))


def _file_sums(directory: Path, paths: Sequence[Path]) -> dict[str, list[Any]]:
    """Bytes and checksum of these files in it, by their paths."""
    with ThreadPoolExecutor(SUM_THREADS) as pool:
        return {
            str(path.relative_to(directory)): [path.stat().st_size, found]
            for path, found in zip(paths, pool.map(_sum_of, paths), strict=True)
        }


def _sum_of(path: Path | Bucket) -> str:
    return _read_summed(path, itertools.repeat(memoryview(bytearray(SUM_BYTES))))


def _opened(path: Path | Bucket) -> io.RawIOBase | io.BytesIO:
    return io.BytesIO(path.read_bytes()) if isinstance(path, Bucket) else path.open("rb", buffering=0)


def _read_summed(path: Path | Bucket, parts: Iterable[memoryview], summed: bool = True) -> str:
    """Reads a file into one part after another, and sums each while it is in the processor's cache."""
    found = xxhash.xxh3_128()
    with named(path), _opened(path) as file:
        for part in parts:
            num_bytes = 0
            while num_bytes < len(part) and (read := file.readinto(part[num_bytes:])):
                num_bytes += read
            if summed:
                found.update(part[:num_bytes])
            if num_bytes < len(part):
                break
    return found.hexdigest()


def _record_sum(record: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(record).encode()).hexdigest()


def _read_record(directory: Path | Bucket) -> dict[str, Any]:
    """The content of state.json, with values of the types that it is written with."""
    try:
        record = parse_object((directory / RECORD_FILE).read_bytes(), RECORD_FILE)
        if "file_bytes" in record:  # of 0.2 and before, without checksums
            sizes = Section(RECORD_FILE, record).section("file_bytes")
            record["files"] = {name: [size, None] for name, size in sizes.values.items()}
        elif OWN_SUM not in record:
            raise ValueError(f"{RECORD_FILE} has no {OWN_SUM}")
        whole = OWN_SUM not in record or record.pop(OWN_SUM) == _record_sum(record)
        missing = [key for key in RECORD_KEYS if key not in record]
        if missing:
            raise ValueError(f"{RECORD_FILE} says nothing of {', '.join(missing)}")
        _check_record(Section(RECORD_FILE, record), directory)
    except (FileNotFoundError, ValueError) as problem:
        raise BrokenCheckpoint(f"{problem}") from None
    if not whole:
        raise BrokenCheckpoint(f"{RECORD_FILE} has other bytes than were written")
    return record


def _check_record(record: Section, directory: Path | Bucket) -> None:
    record.section("progress")
    scalars, shapes, files = (record.section(key) for key in ("scalars", "shapes", "files"))
    for name in shapes.values:
        shapes.counts(name, MAX_LENGTH)
    for name, entry in files.values.items():
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        match entry:
            case [int(size), str() | None] if inside and size >= 0:
                continue
        raise files.wrong(name, "the bytes and the checksum of a file in the checkpoint")
    step = scalars.count("step", MAX_LENGTH, least=0)
    if directory.name.isdecimal() and step != int(directory.name):  # a copy may have another name
        raise ValueError(f"{RECORD_FILE} is of step {step}, not of step {directory.name}")


def _check_sizes(directory: Path | Bucket, files: dict[str, list[Any]]) -> None:
    wrong, sizes = [], directory.sizes() if isinstance(directory, Bucket) else {}
    for name, (num_bytes, _) in files.items():
        try:
            found = (directory / name).stat().st_size if isinstance(directory, Path) else sizes.get(name, 0)
        except FileNotFoundError:
            found = 0
        if found != num_bytes:
            wrong.append(f"{name} has {found} of {num_bytes} bytes")
    if wrong:
        raise BrokenCheckpoint(f"{len(wrong)} of {len(files)} files are cut or lost, first {wrong[0]}")


def _check_files(directory: Path | Bucket, files: dict[str, list[Any]], names: Iterable[str], pool: Executor) -> None:
    summed = [name for name in names if files[name][1] is not None]
    list(pool.map(lambda name: _check_sum(name, files, _sum_of(directory / name)), summed))


def _check_sum(name: str, files: dict[str, list[Any]], found: str) -> None:
    if files[name][1] not in (None, found):  # None: of 0.2 and before
        raise BrokenCheckpoint(f"{name} has other bytes than were written")


def _check_same(directory: Path | Bucket, record: dict[str, Any], state: TrainState) -> None:
    there = {name: tuple(shape) for name, shape in record["shapes"].items()}
    here = {name: leaf.shape for name, leaf in _named(state).items()}
    differ = [
        f"{name} is {there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    if differ:
        raise ValueError(
            f"{directory} is of another model or optimizer: {len(differ)} arrays differ: {'; '.join(differ[:5])}; "
            f"use the settings it was saved with, or another run_dir"
        )


def _read_adapter(model: ModelConfig, here: AdapterInfo, directory: Path | Bucket) -> dict[str, np.ndarray]:
    """The adapter of a checkpoint by name, where it is one of this run's, beside the same weights."""
    if isinstance(directory, Bucket):
        directory = downloaded(str(directory), lambda name: "/" not in name)
    there = read_adapter_info(directory)
    if there.lora != here.lora:
        raise ValueError(
            f"{directory} is of lora.alpha={there.lora.alpha:g}, not {here.lora.alpha:g}; set it back, or choose "
            f"another run_dir"
        )
    assert here.base.sum is not None
    check_base(directory, there.base, here.base.sum)
    check_base_files(directory, there.base, here.base.files)
    return {f"params.{path}": array for path, array in read_adapter(directory, model, here.lora.rank).items()}


def _read_state(
    directory: Path | Bucket,
    record: dict[str, Any],
    old: TrainState,
    read_params: Callable[[Path | Bucket], dict[str, np.ndarray]] = lambda _: {},
) -> TrainState:
    """Every file is read once, and compared with its sum on the way. `read_params` are those of other formats."""
    files = record["files"]
    _check_sizes(directory, files)
    with ThreadPoolExecutor(SUM_THREADS, thread_name_prefix="checkpoint") as pool:
        _check_files(directory, files, [name for name in files if not BLOCK.search(name)], pool)

        params = read_params(directory)

        def read(name: str, leaf: jax.Array) -> jax.Array:
            scalar = record["scalars"].get(name)
            needed = {box_of(index, leaf.shape) for index in _places(leaf)}
            if name in params:
                stored = {box: params[name][index_of(box)] for box in needed}
            elif scalar is None:
                stored = _read_array(directory, files, name, needed, pool)
            else:
                stored = {box: np.array(scalar, leaf.dtype) for box in needed}
            leaf.delete()
            stored = {box: cast(values, np.dtype(leaf.dtype), name) for box, values in stored.items()}
            # What was on no device in particular stays so: it must suit the mesh that the others are on.
            if not leaf.committed:
                return jax.device_put(*stored.values())
            return jax.make_array_from_callback(
                leaf.shape, leaf.sharding, lambda index: stored[box_of(index, leaf.shape)]
            )

        leaves = [read(name, leaf) for name, leaf in _named(old).items()]
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


def _places(leaf: jax.Array) -> Iterable[tuple[slice, ...] | None]:
    return leaf.sharding.addressable_devices_indices_map(leaf.shape).values()


def _read_array(
    directory: Path | Bucket, files: dict[str, list[Any]], name: str, boxes: Iterable[Box], pool: Executor
) -> dict[Box, np.ndarray]:
    """Parts of an array of zarr whose blocks are their bytes as they are in memory, as `write_shards` has written it.

    Only blocks that a part needs are read, each once.
    """
    folder, path = _home(name)
    place = f"{folder}/{PARAMS_DIR}/{path}/".removeprefix("./")
    layout = json.loads((directory / f"{place}.zarray").read_bytes())
    shape, chunk, dtype = tuple(layout["shape"]), tuple(layout["chunks"]), np.dtype(layout["dtype"])
    arrays = {box: np.empty([stop - start for start, stop in box], dtype) for box in boxes}

    def read_block(block: Box) -> None:
        found = [(array, box, common) for box, array in arrays.items() if (common := common_box(block, box))]
        if not found:
            return
        array, box, common = found[0]
        part = array[index_of(common, origin=box)]
        whole = len(found) == 1 and part.flags.c_contiguous and part.shape == chunk
        content = part if whole else np.empty(chunk, dtype)  # at an edge it is longer than the array
        file = place + ".".join(str(start // size) for (start, _), size in zip(block, chunk, strict=True))
        raw = content.reshape(-1).view(np.uint8).data
        parts = (raw[begin : begin + SUM_BYTES] for begin in range(0, len(raw), SUM_BYTES))
        _check_sum(file, files, _read_summed(directory / file, parts, summed=files[file][1] is not None))
        if not whole:
            for array, box, common in found:
                array[index_of(common, origin=box)] = content[index_of(common, origin=block)]

    list(pool.map(read_block, grid_of(box_of(None, shape), chunk)))
    return arrays


def _remove(directory: Path) -> None:
    """Out of the numbering first: a process killed half-way must not leave half a checkpoint."""
    hidden = directory.with_name(f".{directory.name}.removed")
    directory.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def verify(directory: Path | Bucket) -> Iterable[tuple[Path | Bucket, str]]:
    """Every checkpoint there, and what is broken about it, or nothing."""
    for checkpoint in [directory / str(step) for step in _steps_in(directory)] or [directory]:
        try:
            record = _read_record(checkpoint)
            _check_sizes(checkpoint, record["files"])
            with Meter(f"checking {checkpoint}"), ThreadPoolExecutor(SUM_THREADS) as pool:
                _check_files(checkpoint, record["files"], record["files"], pool)
        except BrokenCheckpoint as problem:
            yield checkpoint, str(problem)
        else:
            yield checkpoint, ""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("paravt_jax.run.checkpoint"), description="Compares checkpoints of a run with what was written."
    )
    parser.add_argument("command", choices=["verify"])
    parser.add_argument("directory", metavar="DIR", help="RUN/checkpoints, or one of those in it; also at gs://")
    add_debug_flag(parser)
    args = parser.parse_args()
    directory = Bucket.of(args.directory) if is_address(args.directory) else Path(args.directory)
    if isinstance(directory, Path) and not directory.is_dir():
        raise ValueError(f"{directory} is no directory")
    found = list(verify(directory))
    for checkpoint, problem in found:
        print(f"{checkpoint}: {f'broken, {problem}' if problem else 'as it was written'}")
    if broken := [checkpoint for checkpoint, problem in found if problem]:
        raise RuntimeError(f"{len(broken)} of {len(found)} checkpoints are broken")


if __name__ == "__main__":
    run_cli(main)
