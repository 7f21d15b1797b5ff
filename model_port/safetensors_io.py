"""Reads Hugging Face safetensors by byte range and writes them as a stream.

The safetensors package maps whole files and saves whole shards, so its resident memory grows with the checkpoint. In
this module, a read touches only the requested rows, and a write holds one block at a time. The format is a
little-endian u64 header length, a JSON header of {name: {dtype, shape, data_offsets}}, and the tensors' bytes.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from model_port.json_files import LFS_POINTER, Section, check_not_pointer, read_object

PART_BYTES = 2**20  # size of a read, so that values are checked while they are in the CPU's cache
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start_byte: int  # in the file
    swapped: bool = False  # True if the last two axes are swapped in the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HfTensors(ExitStack):
    """All tensors of a Hugging Face directory, readable by rows. Opening it checks that all shards are complete.

    Several threads may read concurrently.
    """

    def __init__(self, directory: str | Path, single_file: str = SINGLE_FILE):
        """`single_file` is the file to read if there is no index."""
        super().__init__()
        self.directory = Path(directory)
        self.infos: dict[str, TensorInfo] = {}
        shards, weight_map = _shards(self.directory, single_file)
        for shard in shards:
            for name, info in _read_header(shard).items():
                if name in self.infos:
                    raise ValueError(
                        f"{self.directory}: tensor {name} is in {self.infos[name].path.name} and in {shard.name}"
                    )
                self.infos[name] = info
        if weight_map is not None:
            _check_index(self.directory / INDEX_FILE, weight_map, self.infos)
        self._descriptors = {shard: os.open(shard, os.O_RDONLY) for shard in shards}
        for descriptor in self._descriptors.values():
            self.callback(os.close, descriptor)

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.infos.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.infos.items()}

    def rename(self, old: str, new: str) -> None:
        """Replaces the prefix `old` of tensor names by `new`."""
        for name in [name for name in self.infos if name.startswith(old) and old != new]:
            renamed = new + name.removeprefix(old)
            if renamed in self.infos:
                raise ValueError(f"{self.directory} has the tensor {renamed} twice, the second time as {name}")
            self.infos[renamed] = self.infos.pop(name)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads rows of the first axis into a new array of the file's dtype. Raises if a value is not finite."""
        info = self.infos[name]
        first, last, _ = rows.indices(info.shape[0] if info.shape else 1)
        shape = (last - first, *info.shape[1:]) if info.shape else ()
        row_bytes = info.num_bytes // max(info.shape[0], 1) if info.shape else info.num_bytes
        out = np.empty(math.prod(shape), info.dtype)
        offset, part_size = info.start_byte + first * row_bytes, max(1, PART_BYTES // out.itemsize)
        for start in range(0, out.size, part_size):
            part = out[start : start + part_size]
            _read_exactly(self._descriptors[info.path], part, offset + start * out.itemsize, info.path)
            check_finite(part, f"tensor {name} of {info.path}")
        if not info.swapped:
            return out.reshape(shape)
        return np.ascontiguousarray(out.reshape(last - first, *info.shape[:0:-1]).swapaxes(1, 2))


def _shards(directory: Path, single_file: str) -> tuple[list[Path], dict[str, str] | None]:
    index_path = directory / INDEX_FILE
    if index_path.is_file():
        index = Section(str(index_path), read_object(index_path)).section("weight_map")
        weight_map = {name: index.text(name) for name in index.values}
        for name, shard in weight_map.items():
            if Path(shard).name != shard or shard in ("", ".."):
                raise index.wrong(name, "the name of a file in the index's directory")
        shards = [directory / name for name in sorted(set(weight_map.values()))]
        if (directory / single_file).is_file() and directory / single_file not in shards:
            raise ValueError(
                f"{directory} has {single_file} and a {INDEX_FILE} of other files; remove the one that is outdated"
            )
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ValueError(
                f"{directory}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:5])}"
            )
        return shards, weight_map
    if (directory / single_file).is_file():
        return [directory / single_file], None
    raise ValueError(
        f"{directory} has neither {single_file} nor {INDEX_FILE}; weights in other formats (.bin, .gguf) are not read"
    )


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """Reads a file's header. The library checks that the tensors are contiguous, do not overlap and fill the file."""
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    check_not_pointer(path, start)
    infos, start_byte = {}, 8 + int.from_bytes(start[:8], "little")
    try:
        with safe_open(path, framework="numpy") as tensors:
            for name in tensors.offset_keys():
                tensor = tensors.get_slice(name)
                if (dtype_name := tensor.get_dtype()) not in DTYPES:
                    supported = ", ".join(DTYPES)
                    raise ValueError(f"{path}: tensor {name} has dtype {dtype_name}; supported are {supported}")
                infos[name] = TensorInfo(path, DTYPES[dtype_name], tuple(tensor.get_shape()), start_byte)
                start_byte += infos[name].num_bytes
    except SafetensorError as problem:
        raise ValueError(f"{path} is not a complete safetensors file ({problem}); download it again") from None
    return infos


def _check_index(index_path: Path, weight_map: dict[str, str], infos: dict[str, TensorInfo]) -> None:
    wrong = [name for name, shard in weight_map.items() if name not in infos or infos[name].path.name != shard]
    if wrong:
        places = ", ".join(f"{name} ({weight_map[name]})" for name in wrong[:5])
        raise ValueError(f"{index_path} names {len(wrong)} tensors that are not in their shards: {places}")


def copy_cast(out: np.ndarray, values: np.ndarray, name: str) -> None:
    """Copies values into an array of any dtype. Raises if a finite value becomes infinite in a smaller range."""
    with np.errstate(over="ignore"):
        out[...] = values
    if ml_dtypes.finfo(out.dtype).maxexp < ml_dtypes.finfo(values.dtype).maxexp:
        overflow = np.isinf(out) & np.isfinite(values)
        if overflow.any():
            worst = np.abs(values[overflow].astype(np.float64)).max()
            advice = "; use bfloat16 or float32" if out.dtype == np.float16 else ""
            raise ValueError(f"{name} has the value {worst:g}, which {out.dtype} cannot represent{advice}")


def check_finite(values: np.ndarray, name: str) -> None:
    """Raises if a weight is NaN or infinite, because the file is damaged or the run diverged.

    Such values have the largest exponent. As integers, positive ones are at least infinity, and negative ones at least
    minus infinity. Two maxima are therefore enough, which is 20 times as fast as numpy's isfinite on bfloat16.
    """
    if values.dtype not in DTYPE_NAMES or not values.size:
        return
    bits = np.dtype(f"i{values.itemsize}")
    infinity = np.array([np.inf, -np.inf], values.dtype)
    for sign, integer in enumerate((bits, np.dtype(f"u{values.itemsize}"))):
        if values.view(integer).max() >= infinity.view(integer)[sign]:
            raise ValueError(
                f"{name} has values that are NaN or infinite; the weights are damaged, or their run diverged"
            )


def _read_exactly(descriptor: int, out: np.ndarray, offset: int, path: Path) -> None:
    view = out.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise ValueError(f"{path} ended at byte {offset + done} while it was read; did another process change it?")
        done += count


@contextmanager
def safetensors_writer(
    path: str | Path, tensors: dict[str, tuple[np.dtype, tuple[int, ...]]]
) -> Iterator[Callable[[np.ndarray], None]]:
    """Yields a function that appends a block. The blocks together must have all tensors in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers rejects a file without it
    end, written = 0, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # aligns the tensors
    with Path(path).open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)

        def write(block: np.ndarray) -> None:
            nonlocal written
            written += file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)

        yield write
        if written != end:
            raise RuntimeError(f"{path}: {written} bytes of tensors were written, but the header declares {end}")
        file.flush()
        os.fsync(file.fileno())
