"""Defines the files of a checkpoint RUN/checkpoints/N, the learner's state after N updates.

    N/params/, N/hf/      weights for `model_port.load` and `model_port.export`
    N/adapter_*           instead of N/params if adapters train: weights for PEFT, `load` and `export`
    N/optimizer/params/   every other array of the state, named by its path, in the same format
    N/state.json          scalars, the trainer's progress, array shapes, file checksums; written last

Weights that adapters freeze are not stored, only their path and checksum. Orbax can read both `params` with
`orbax.checkpoint.StandardCheckpointer().restore`.
"""

import io
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import xxhash

from model_port.bucket import Bucket
from model_port.json_files import Section, parse_object
from model_port.layout import OPTIMIZER_DIR, PARAMS_DIR, RECORD_FILE
from model_port.output_dir import LIST_FILE, LOCK_FILE, named
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
    """The directory with an array's blocks."""
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
    except (FileNotFoundError, ValueError) as problem:
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
