"""Reads Hugging Face safetensors by byte range and writes them as a stream.

The safetensors package maps whole files and saves whole shards, so its resident memory grows with the checkpoint. Here,
a read touches only the requested rows and a write holds one block at a time. The format is a little-endian u64 header
length, a JSON header of {name: {dtype, shape, data_offsets}}, and the tensors' bytes.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np

from model_port.json_files import LFS_POINTER, Section, check_not_pointer, read_object

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
PART_BYTES = 2**20  # read at a time, and checked while in the CPU's cache
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
    swapped: bool = False  # the file has the last two axes in the other order

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HfTensors:
    """All tensors of a Hugging Face directory, readable by rows. Opening it checks that all shards are complete.

    Several threads may read at once.
    """

    def __init__(self, directory: str | Path, single_file: str = SINGLE_FILE):
        """`single_file` is the file to read if there is no index of several."""
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

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.infos.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.infos.items()}

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows of the first axis (or a scalar), as a new array in the file's dtype. Raises if a value is not finite."""
        info = self.infos[name]
        first, last, _ = rows.indices(info.shape[0] if info.shape else 1)
        shape = (last - first, *info.shape[1:]) if info.shape else ()
        row_bytes = info.num_bytes // max(info.shape[0], 1) if info.shape else info.num_bytes
        out = np.empty(math.prod(shape), info.dtype)
        self._read_into(out, name, info.start_byte + first * row_bytes)
        if not info.swapped:
            return out.reshape(shape)
        return np.ascontiguousarray(out.reshape(last - first, *info.shape[:0:-1]).swapaxes(1, 2))

    def _read_into(self, out: np.ndarray, name: str, offset: int) -> None:
        path = self.infos[name].path
        part_size = max(1, PART_BYTES // out.itemsize)
        for first in range(0, out.size, part_size):
            part = out[first : first + part_size]
            _read_exactly(self._descriptors[path], part, offset + first * out.itemsize, path)
            check_finite(part, f"tensor {name} of {path}")

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> "HfTensors":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _shards(directory: Path, single_file: str) -> tuple[list[Path], dict[str, str] | None]:
    index_path = directory / INDEX_FILE
    if index_path.is_file():
        index = Section(str(index_path), read_object(index_path)).section("weight_map")
        weight_map = {name: index.text(name) for name in index.values}
        for name, shard in weight_map.items():
            if Path(shard).name != shard or shard in ("", ".."):
                raise index.wrong(name, "the name of a file beside the index")
        shards = [directory / name for name in sorted(set(weight_map.values()))]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ValueError(
                f"{directory}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:5])}"
            )
        return shards, weight_map
    if (directory / single_file).is_file():
        return [directory / single_file], None
    raise ValueError(f"{directory} has neither {single_file} nor {INDEX_FILE}")


def _read_header(path: Path) -> dict[str, TensorInfo]:
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        check_not_pointer(path, file.read(len(LFS_POINTER)))
        file.seek(0)
        header_bytes = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
            raise ValueError(f"{path} is not a complete safetensors file: {file_bytes} bytes cannot hold its header")
        try:
            header: Any = json.loads(file.read(header_bytes))
        except (ValueError, RecursionError):
            raise ValueError(f"{path} is not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is not a JSON object")
    infos = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype_name, shape, start, end = _described(path, name, entry)
        if dtype_name not in DTYPES:
            raise ValueError(f"{path}: tensor {name} has dtype {dtype_name}; supported are {', '.join(DTYPES)}")
        info = TensorInfo(path, DTYPES[dtype_name], shape, 8 + header_bytes + start)
        if end - start != info.num_bytes:
            raise ValueError(f"{path}: tensor {name} claims {end - start} bytes, its shape needs {info.num_bytes}")
        if info.start_byte + info.num_bytes > file_bytes:
            raise ValueError(
                f"{path} is truncated: tensor {name} ends at byte {info.start_byte + info.num_bytes}, "
                f"the file has {file_bytes}; download it again"
            )
        infos[name] = info
    _check_layout(path, infos, file_bytes, 8 + header_bytes)
    return infos


def _check_layout(path: Path, infos: dict[str, TensorInfo], file_bytes: int, data_byte: int) -> None:
    """Raises unless the tensors are contiguous and share no bytes, as every writer of the format lays them out."""
    end = data_byte
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start_byte, item[1].num_bytes)):
        if info.start_byte != end:
            raise ValueError(
                f"{path}: tensor {name} starts at byte {info.start_byte - data_byte} of the data, expected "
                f"{end - data_byte}; the file is damaged, download it again"
            )
        end += info.num_bytes
    if end != file_bytes:
        raise ValueError(
            f"{path}: its data are {file_bytes - data_byte} bytes, its tensors have {end - data_byte}; the file is "
            f"damaged, download it again"
        )


def _described(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype_name, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if all(type(number) is int and number >= 0 for number in (*shape, start, end)):
            return str(dtype_name), shape, start, end
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(f"{path}: tensor {name} lacks a valid dtype, shape or data_offsets")


def _check_index(index_path: Path, weight_map: dict[str, str], infos: dict[str, TensorInfo]) -> None:
    wrong = [name for name, shard in weight_map.items() if name not in infos or infos[name].path.name != shard]
    if wrong:
        raise ValueError(
            f"{index_path} names {len(wrong)} tensors that their shards do not hold: {', '.join(wrong[:5])}"
        )


def check_finite(values: np.ndarray, name: str) -> None:
    """Raises if a weight is NaN or infinite: the file is damaged, or the run diverged.

    Such values have the largest exponent. Compared as integers, positive ones are at least infinity, and negative ones
    at least minus infinity. So two maxima are enough, which is 20 times as fast as numpy's isfinite on bfloat16.
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
            raise ValueError(f"{path} ended at byte {offset + done} during reading; did another process change it?")
        done += count


class SafetensorsWriter:
    """Writes a safetensors file with a known header, block by block in header order."""

    def __init__(self, path: str | Path, tensors: dict[str, tuple[np.dtype, tuple[int, ...]]]):
        self.path = Path(path)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
        end = 0
        for name, (dtype, shape) in tensors.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # aligns the tensors
        self._file = self.path.open("wb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)
        self._remaining_bytes = end

    def write(self, block: np.ndarray) -> None:
        """Appends a block; the blocks of a tensor, in row order, together make up the tensor."""
        if block.nbytes > self._remaining_bytes:
            raise RuntimeError(f"{self.path}: more bytes were written than the header declares")
        self._remaining_bytes -= block.nbytes
        self._file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._remaining_bytes:
            raise RuntimeError(
                f"{self.path}: {self._remaining_bytes} bytes that the header declares were never written"
            )
