"""Defines the files of a checkpoint RUN/checkpoints/N, the learner's state after N updates, and reads them.

    N/params/, N/hf/      weights for `model_port.load` and `model_port.export`
    N/adapter_*           instead of N/params if adapters train: weights for PEFT, `load` and `export`
    N/optimizer/params/   every other array of the state, named by its path, in the same format
    N/state.json          scalars, the trainer's progress, array shapes, file checksums; written last

Weights that adapters freeze are not stored, only their path and checksum. Orbax can read both `params` with
`orbax.checkpoint.StandardCheckpointer().restore`.

Each host reads the blocks that its devices need and verifies checksums. A checkpoint is broken if a file is missing or
has another size or checksum. A read error does not prove this, so it ends the run.
"""

import io
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash
from flax import nnx

from model_port.adapters import AdapterInfo, check_base, check_base_files, read_adapter, read_adapter_info
from model_port.bucket import Bucket, downloaded
from model_port.checkpoint import Box, box_of, cast, common_box, grid_of, index_of
from model_port.config import ModelConfig
from model_port.json_files import Section, parse_object
from model_port.layout import OPTIMIZER_DIR, PARAMS_DIR, RECORD_FILE
from model_port.output_dir import LIST_FILE, LOCK_FILE, named
from model_port.progress import Meter
from model_port.sharding import param_name
from paravt_jax.learner.programs import TrainState

MAX_LENGTH = 2**48  # limit for an axis and for the number of steps
OWN_SUM = "sum"  # key of the record's checksum over all other keys
RECORD_KEYS = ("scalars", "shapes", "progress", "files", OWN_SUM)
BLOCK = re.compile(rf"(^|/){PARAMS_DIR}/[^/]+/[\d.]+$")  # matches an array's block
SUM_THREADS = 16
SUM_BYTES = 2**20  # bytes hashed at a time

Directory = Path | Bucket
FileSums = dict[str, list[Any]]  # path -> [size, checksum]; None: not compared


class BrokenCheckpoint(Exception):
    """Raised for a checkpoint that cannot be read correctly."""


def steps_in(directory: Directory) -> list[int]:
    """The steps of the checkpoints in a directory, in ascending order."""
    if isinstance(directory, Bucket):  # a checkpoint without a record is incomplete
        parts = [name.split("/") for name in directory.names()]
        return sorted(int(part[0]) for part in parts if part[1:] == [RECORD_FILE] and part[0].isdecimal())
    return sorted(int(entry.name) for entry in directory.glob("*") if entry.name.isdecimal())


def leaves_by_name(state: TrainState) -> dict[str, Any]:
    """The leaves by path, in order: params.text.embed.table_vd, opt_state.1.0.mu.text.embed.table_vd, step, ..."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path, _ in leaves]
    names = [param_name([path]) for path in paths]
    by_name = {
        re.sub(r"^(trainable|frozen)\.", "params.", name): leaf for name, (_, leaf) in zip(names, leaves, strict=True)
    }
    assert len(by_name) == len(leaves)
    return by_name


def location(name: str) -> tuple[str, str]:
    """A leaf's folder in the checkpoint, and its path within that folder in model_port's params/ format."""
    return (".", name.removeprefix("params.")) if name.startswith("params.") else (OPTIMIZER_DIR, name)


def array_folder(folder: str, path: str) -> str:
    return f"{folder}/{PARAMS_DIR}/{path}/".removeprefix("./")


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in (LOCK_FILE, LIST_FILE))


def file_sums(directory: Path, paths: Sequence[Path]) -> FileSums:
    with ThreadPoolExecutor(SUM_THREADS) as pool:
        return {
            str(path.relative_to(directory)): [path.stat().st_size, checksum]
            for path, checksum in zip(paths, pool.map(file_sum, paths), strict=True)
        }


def file_sum(path: Directory) -> str:
    return read_summed(path, itertools.repeat(memoryview(bytearray(SUM_BYTES))))


def read_summed(path: Directory, parts: Iterable[memoryview], summed: bool = True) -> str:
    """Reads a file into consecutive buffers, and hashes each one while it is in the CPU cache."""
    checksum = xxhash.xxh3_128()
    with named(path), _open(path) as file:
        for part in parts:
            num_bytes = 0
            while num_bytes < len(part) and (read := file.readinto(part[num_bytes:])):
                num_bytes += read
            if summed:
                checksum.update(part[:num_bytes])
            if num_bytes < len(part):
                break
    return checksum.hexdigest()


def _open(path: Directory) -> io.RawIOBase | io.BytesIO:
    return io.BytesIO(path.read_bytes()) if isinstance(path, Bucket) else path.open("rb", buffering=0)


def record_sum(record: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(record).encode()).hexdigest()


def record_bytes(record: dict[str, Any], files: FileSums) -> bytes:
    """Makes the content of state.json."""
    record = {**record, "files": dict(sorted(files.items()))}
    return json.dumps({**record, OWN_SUM: record_sum(record)}).encode()


def read_record(directory: Directory) -> dict[str, Any]:
    """Reads state.json and checks its types."""
    try:
        record = parse_object((directory / RECORD_FILE).read_bytes(), RECORD_FILE)
        missing = [key for key in RECORD_KEYS if key not in record]
        if missing:
            raise ValueError(f"{RECORD_FILE} lacks {', '.join(missing)}")
        unchanged = record.pop(OWN_SUM) == record_sum(record)
        _check_record(Section(RECORD_FILE, record), directory)
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenCheckpoint(f"{RECORD_FILE} is missing") from None
    except ValueError as problem:
        raise BrokenCheckpoint(f"{problem}") from None
    if not unchanged:
        raise BrokenCheckpoint(f"{RECORD_FILE} does not match its checksum")
    return record


def _check_record(record: Section, directory: Directory) -> None:
    record.section("progress")
    scalars, shapes, files = (record.section(key) for key in ("scalars", "shapes", "files"))
    for name in shapes.values:
        shapes.counts(name, MAX_LENGTH)
    for name, entry in files.values.items():
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        match entry:
            case [int(size), str() | None] if inside and size >= 0:
                continue
        raise files.wrong(name, "size and checksum of a file in the checkpoint")
    step = scalars.count("step", MAX_LENGTH, least=0)
    if directory.name.isdecimal() and step != int(directory.name):  # a renamed copy is valid
        raise ValueError(f"{RECORD_FILE} is from step {step}, not from step {directory.name}")


def stored_part(state: TrainState, adapter: AdapterInfo | None) -> TrainState:
    """The part of a state that checkpoints store: without frozen base weights."""
    return state if adapter is None else replace(state, frozen=nnx.State({}))


def read_checkpoint(
    directory: Directory, state: TrainState, model: ModelConfig, adapter: AdapterInfo | None
) -> tuple[TrainState, dict[str, Any]]:
    """Reads state and progress. Deletes the arrays of `state` one by one, so that devices never hold both states."""
    record = read_record(directory)
    stored = stored_part(state, adapter)
    _check_shapes(directory, record, stored)
    with Meter(f"loading {directory}"):
        restored = _read_state(directory, record, stored, model, adapter)
    return (restored if adapter is None else replace(restored, frozen=state.frozen)), record["progress"]


def verify(directory: Directory) -> Iterable[tuple[Directory, str]]:
    """Verifies every checkpoint in a directory. Yields each with its error or an empty string."""
    for checkpoint in [directory / str(step) for step in steps_in(directory)] or [directory]:
        try:
            files = read_record(checkpoint)["files"]
            _check_sizes(checkpoint, files)
            with Meter(f"checking {checkpoint}"), ThreadPoolExecutor(SUM_THREADS) as pool:
                _check_files(checkpoint, files, files, pool)
        except BrokenCheckpoint as problem:
            yield checkpoint, str(problem)
        else:
            yield checkpoint, ""


def _check_shapes(directory: Directory, record: dict[str, Any], state: TrainState) -> None:
    saved = {name: tuple(shape) for name, shape in record["shapes"].items()}
    ours = {name: leaf.shape for name, leaf in leaves_by_name(state).items()}
    differ = [
        f"{name} is {saved.get(name, 'missing')} in the checkpoint and {ours.get(name, 'missing')} here"
        for name in sorted(saved.keys() | ours.keys())
        if saved.get(name) != ours.get(name)
    ]
    if differ:
        raise ValueError(
            f"{directory} is from another model or optimizer: {len(differ)} arrays differ: {'; '.join(differ[:5])}; "
            f"use the settings it was saved with, or another run_dir"
        )


def _check_sizes(directory: Directory, files: FileSums) -> None:
    wrong, sizes = [], directory.sizes() if isinstance(directory, Bucket) else {}
    for name, (num_bytes, _) in files.items():
        try:
            size = (directory / name).stat().st_size if isinstance(directory, Path) else sizes.get(name, 0)
        except FileNotFoundError:
            size = 0
        if size != num_bytes:
            wrong.append(f"{name} has {size} of {num_bytes} bytes")
    if wrong:
        raise BrokenCheckpoint(f"{len(wrong)} of {len(files)} files are truncated or missing, first {wrong[0]}")


def _check_files(directory: Directory, files: FileSums, names: Iterable[str], pool: Executor) -> None:
    summed = [name for name in names if files[name][1] is not None]
    list(pool.map(lambda name: _check_sum(name, files, file_sum(directory / name)), summed))


def _check_sum(name: str, files: FileSums, checksum: str) -> None:
    if files[name][1] not in (None, checksum):
        raise BrokenCheckpoint(f"{name} does not match its checksum")


def _read_state(
    directory: Directory, record: dict[str, Any], old: TrainState, model: ModelConfig, adapter: AdapterInfo | None
) -> TrainState:
    """Reads the state: reads every file once and verifies its checksum."""
    files = record["files"]
    _check_sizes(directory, files)
    with ThreadPoolExecutor(SUM_THREADS, thread_name_prefix="checkpoint") as pool:
        _check_files(directory, files, [name for name in files if not BLOCK.search(name)], pool)
        adapter_arrays = {} if adapter is None else _read_adapter(directory, model, adapter)

        def read(name: str, leaf: jax.Array) -> jax.Array:
            scalar = record["scalars"].get(name)
            places = leaf.sharding.addressable_devices_indices_map(leaf.shape)
            needed = {box_of(index, leaf.shape) for index in places.values()}
            if name in adapter_arrays:
                stored = {box: adapter_arrays[name][index_of(box)] for box in needed}
            elif scalar is None:
                stored = _read_array(directory, files, name, needed, pool)
            else:
                stored = {box: np.array(scalar, leaf.dtype) for box in needed}
            leaf.delete()
            stored = {box: cast(values, np.dtype(leaf.dtype), name) for box, values in stored.items()}
            # Keeps uncommitted arrays uncommitted, so that they work with arrays on any mesh.
            if not leaf.committed:
                return jax.device_put(*stored.values())
            return jax.make_array_from_callback(
                leaf.shape, leaf.sharding, lambda index: stored[box_of(index, leaf.shape)]
            )

        leaves = [read(name, leaf) for name, leaf in leaves_by_name(old).items()]
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


def _read_adapter(directory: Directory, model: ModelConfig, adapter: AdapterInfo) -> dict[str, np.ndarray]:
    """Reads the adapter. Raises if this run's settings or base weights do not match it."""
    if isinstance(directory, Bucket):
        directory = downloaded(str(directory), lambda name: "/" not in name)
    saved = read_adapter_info(directory)
    if saved.lora != adapter.lora:
        raise ValueError(
            f"{directory} was saved with lora.alpha={saved.lora.alpha:g}, not {adapter.lora.alpha:g}; set it back, or "
            f"choose another run_dir"
        )
    assert adapter.base.sum is not None
    check_base(directory, saved.base, adapter.base.sum)
    check_base_files(directory, saved.base, adapter.base.files)
    return {f"params.{path}": array for path, array in read_adapter(directory, model, adapter.lora.rank).items()}


def _read_array(
    directory: Directory, files: FileSums, name: str, boxes: Iterable[Box], pool: Executor
) -> dict[Box, np.ndarray]:
    """Reads parts of an array from the raw blocks of `write_shards`. Reads each needed block once."""
    folder = array_folder(*location(name))
    layout = json.loads((directory / f"{folder}.zarray").read_bytes())
    shape, chunk, dtype = tuple(layout["shape"]), tuple(layout["chunks"]), np.dtype(layout["dtype"])
    arrays = {box: np.empty([stop - start for start, stop in box], dtype) for box in boxes}

    def read_block(block: Box) -> None:
        overlaps = [(array, box, common) for box, array in arrays.items() if (common := common_box(block, box))]
        if not overlaps:
            return
        array, box, common = overlaps[0]
        part = array[index_of(common, origin=box)]
        in_place = len(overlaps) == 1 and part.flags.c_contiguous and part.shape == chunk
        content = part if in_place else np.empty(chunk, dtype)  # the last block may extend beyond the array
        file = folder + ".".join(str(start // size) for (start, _), size in zip(block, chunk, strict=True))
        raw = content.reshape(-1).view(np.uint8).data
        parts = (raw[begin : begin + SUM_BYTES] for begin in range(0, len(raw), SUM_BYTES))
        _check_sum(file, files, read_summed(directory / file, parts, summed=files[file][1] is not None))
        if not in_place:
            for array, box, common in overlaps:
                array[index_of(common, origin=box)] = content[index_of(common, origin=block)]

    list(pool.map(read_block, grid_of(box_of(None, shape), chunk)))
    return arrays
