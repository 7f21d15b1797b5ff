"""Parameters on disk in orbax's format: `orbax.checkpoint.StandardCheckpointer().restore` reads CKPT/params.

    CKPT/params/          a nested dict: the weight table's paths, split at "."
    CKPT/hf/              the model's config, tokenizer and processor files
    CKPT/paravt_jax.json  source and dtype of the conversion, written last

Orbax would hold whole arrays in memory. It therefore only writes the tree, with one-element placeholders, which this
module then replaces by the real arrays, block by block, as raw bytes. `StoredParams.blocks` reads them for export, and
`restore_params` reads them onto devices.
"""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax.traverse_util import unflatten_dict

from model_port.config import DTYPES, ModelConfig, read_config
from model_port.json_files import flattened
from model_port.layout import HF_DIR, PARAMS_DIR, absolute_path, newest_checkpoint
from model_port.safetensors_io import check_finite, copy_cast
from model_port.weights import check_param_paths

FORMAT_VERSION = 1

BLOCK_BYTES = 64 * 2**20  # maximum size of a block in memory, and of a chunk on disk
MIN_LAYER_BYTES = 2**20  # smaller layers share a chunk
MAX_SPREAD = 8  # maximum number of blocks in memory for rows that span the chunks of several shards
NUM_WORKERS = max(2, min(4, os.cpu_count() or 1))  # more threads use more memory, but are not faster
MAX_PENDING = 4  # number of blocks to read ahead

Index = tuple[slice, ...]
Box = tuple[tuple[int, int], ...]  # start and stop along each axis; hashable, unlike slices


def only_dtype(dtypes: Mapping[str, np.dtype], where: str | Path) -> str:
    """Returns the dtype that all tensors of a model share. Raises if there are several."""
    examples: dict[str, str] = {}
    for tensor, dtype in dtypes.items():
        examples.setdefault(dtype.name, tensor)
    if len(examples) == 1 and examples.keys() <= set(DTYPES):
        return next(iter(examples))
    listing = " and ".join(f"{dtype} (such as {examples[dtype]})" for dtype in sorted(examples))
    raise ValueError(f"{where} has parameters in {listing}; choose {', '.join(DTYPES)} with --dtype")


def cast(block: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Casts a block to another dtype. Raises an error with the tensor's name if a finite value becomes infinite."""
    if block.dtype == dtype:
        return block
    out = np.empty(block.shape, dtype)
    copy_cast(out, block, name)
    return out


class ArrayPart(NamedTuple):
    box: Box
    values: np.ndarray


def make_arrays(
    directory: str | Path, shapes: dict[str, tuple[int, ...]], shards: dict[str, tuple[int, ...]], dtype: np.dtype
) -> None:
    """Creates DIRECTORY/params for `write_shards`. `shards` are the shapes of the parts that it will write."""
    params_dir = Path(directory).absolute() / PARAMS_DIR
    _write_structure(params_dir, shapes, dtype)
    for path, shape in shapes.items():
        _create_array(params_dir / path, shape, dtype, _chunk_of_shard(shape, shards[path], dtype.itemsize))


def write_shards(directory: str | Path, shards: dict[str, list[ArrayPart]]) -> list[Path]:
    """Writes parts of arrays that `make_arrays` has created, and returns their files. Does not sync.

    No file belongs to two shards, so hosts may write their shards concurrently.
    """
    params_dir, contents = Path(directory).absolute() / PARAMS_DIR, {}
    for path, parts in shards.items():
        layout = json.loads((params_dir / path / ".zarray").read_bytes())
        chunk, dtype = tuple(layout["chunks"]), np.dtype(layout["dtype"])
        contents |= {params_dir / path / name: content for name, content in _blocks(parts, chunk, dtype, path)}
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        list(pool.map(lambda file: file.write_bytes(contents[file]()), contents))
    return list(contents)


def shard_blocks(
    shape: tuple[int, ...], shard: tuple[int, ...], dtype: np.dtype, parts: Iterable[ArrayPart], name: str
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yields the blocks that `write_shards` would write, with their file names. Used for buckets."""
    return _blocks(parts, _chunk_of_shard(shape, shard, dtype.itemsize), dtype, name)


def _blocks(
    parts: Iterable[ArrayPart], chunk: tuple[int, ...], dtype: np.dtype, name: str
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for box, values in parts:
        for block in grid_of(box, chunk):
            yield _file_of(block, chunk), partial(_block_bytes, values[index_of(block, origin=box)], dtype, name, chunk)


def _file_of(block: Box, chunk: tuple[int, ...]) -> str:
    return ".".join(str(start // size) for (start, _), size in zip(block, chunk, strict=True))


def _block_bytes(values: np.ndarray, dtype: np.dtype, name: str, chunk: tuple[int, ...]) -> bytes:
    values = cast(values, dtype, name)
    if values.shape != chunk:  # at the array's edge, blocks are smaller than chunks
        values = np.pad(values, [(0, size - length) for size, length in zip(chunk, values.shape, strict=True)])
    return values.tobytes()


def write_params(
    directory: str | Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    read: Callable[[str, Index], np.ndarray],
    position: Callable[[str, Index], Any],
    on_bytes: Callable[[int], object],
) -> None:
    """Writes DIRECTORY/params from `read(path, index)`, which several threads call. Does not sync.

    `read` may return another dtype. Blocks are read in the order of `position(path, index)`, so that the source is read
    from front to back. `on_bytes` is called with the size of every block written.
    """
    make_arrays(directory, shapes, shapes, dtype)
    params_dir = Path(directory).absolute() / PARAMS_DIR
    chunks = {path: _chunk_shape(shape, dtype.itemsize) for path, shape in shapes.items()}

    def copy_block(path: str, block: Box) -> int:
        values = read(path, index_of(block))
        content = _block_bytes(values, dtype, path, chunks[path])
        (params_dir / path / _file_of(block, chunks[path])).write_bytes(content)
        return values.size * dtype.itemsize

    blocks = [(path, block) for path, shape in shapes.items() for block in grid_of(box_of(None, shape), chunks[path])]
    blocks.sort(key=lambda item: position(item[0], index_of(item[1])))
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        copies = [pool.submit(copy_block, *block) for block in blocks]
        try:
            for copy in copies:
                on_bytes(copy.result())
        finally:
            pool.shutdown(cancel_futures=True)


def _write_structure(params_dir: Path, shapes: dict[str, tuple[int, ...]], dtype: np.dtype) -> None:
    # numpy, because a jax array would record this machine's devices.
    placeholders = unflatten_dict({path: np.zeros((1,) * len(shape), dtype) for path, shape in shapes.items()}, sep=".")
    # One host writes the tree, and orbax must not wait for the others.
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix="structure"
    )
    # One directory per array, because the database format (ocdbt) buffers two gigabytes before it writes.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)
    with _quiet(), ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        checkpointer.save(params_dir, placeholders)


def _create_array(directory: Path, shape: tuple[int, ...], dtype: np.dtype, chunk_shape: tuple[int, ...]) -> None:
    ts.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{directory}/", "file_io_sync": False},
            "metadata": {"compressor": None},  # weights hardly compress, and a raw chunk is just the block's bytes
        },
        dtype=dtype,
        shape=shape,
        chunk_layout=ts.ChunkLayout(chunk_shape=chunk_shape),
        create=True,
        delete_existing=True,
    ).result()


class StoredParams:
    """The parameters of a checkpoint, which orbax may have written, readable in blocks."""

    def __init__(self, checkpoint: str | Path):
        checkpoint = absolute_path(checkpoint)
        _check_is_checkpoint(checkpoint)
        self.hf_dir = checkpoint / HF_DIR
        self._directory = checkpoint / PARAMS_DIR
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                metadata: Any = checkpointer.metadata(self._directory).item_metadata
        except (FileNotFoundError, KeyError, ValueError, TypeError, AttributeError) as problem:
            raise ValueError(f"{self._directory} is not a complete orbax checkpoint: {problem}") from None
        if metadata is None:
            raise ValueError(f"{self._directory} is not a complete orbax checkpoint: it has no metadata")
        self._driver = "zarr3" if metadata.use_zarr3 else "zarr"
        leaves = flattened(metadata.tree)
        self.shapes: dict[str, tuple[int, ...]] = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
        self.dtypes: dict[str, np.dtype] = {path: np.dtype(leaf.dtype) for path, leaf in leaves.items()}

    @property
    def config(self) -> ModelConfig:
        return read_config(self.hf_dir)

    def check(self, config: ModelConfig, expected: dict[str, tuple[int, ...]]) -> None:
        """Raises unless the parameters are exactly the weight table's, with the shapes of a model of this config."""
        check_param_paths(config, set(self.shapes))
        check_param_paths(config, set(expected))
        wrong = [
            f"{path} {self.shapes[path]}, not {shape}" for path, shape in expected.items() if self.shapes[path] != shape
        ]
        if wrong:
            raise ValueError(
                f"{self._directory}: the shapes of {len(wrong)} parameters do not match {self.hf_dir / 'config.json'}: "
                f"{'; '.join(wrong[:5])}"
            )

    def open(self, path: str) -> ts.TensorStore:
        kvstore: dict[str, Any] = {"driver": "file", "path": f"{self._directory}/"}
        if (self._directory / "manifest.ocdbt").is_file():
            kvstore = {"driver": "ocdbt", "base": kvstore, "path": f"{path}/"}
        else:
            kvstore["path"] += f"{path}/"
        # With the default of the last option, a missing chunk would read as zeros.
        spec = {"driver": self._driver, "kvstore": kvstore, "fill_missing_data_reads": False}
        return ts.open(spec, open=True, read=True).result()

    def blocks(self, path: str) -> Iterator[np.ndarray]:
        """Yields a parameter in consecutive blocks of full rows, in C order and of bounded size."""
        store = self.open(path)
        return self._read_ahead(path, store, _runs(store.shape, _stored_chunk_shape(store), self.dtypes[path].itemsize))

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """Reads a parameter, or the layer at `index`."""
        return self._finite(path, self.open(path)[index].read().result())

    def _read_ahead(self, path: str, store: ts.TensorStore, indices: Iterable[Index]) -> Iterator[np.ndarray]:
        pending: deque[ts.Future[np.ndarray]] = deque()
        for index in indices:
            pending.append(store[index].read())
            if len(pending) == MAX_PENDING:
                yield self._finite(path, pending.popleft().result())
        while pending:
            yield self._finite(path, pending.popleft().result())

    def _finite(self, path: str, values: np.ndarray) -> np.ndarray:
        check_finite(values, f"{path} of {self._directory}")
        return values

    def restore(self, path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        everything = box_of(None, target.shape)
        if target.sharding is None:
            return jax.numpy.asarray(self._read_boxes(path, {everything}, target.dtype)[everything])
        places = target.sharding.addressable_devices_indices_map(target.shape).values()
        shards = self._read_boxes(path, {box_of(index, target.shape) for index in places}, target.dtype)
        return jax.make_array_from_callback(
            target.shape, target.sharding, lambda index: shards[box_of(index, target.shape)]
        )

    def _read_boxes(self, path: str, boxes: set[Box], dtype: np.dtype) -> dict[Box, np.ndarray]:
        store = self.open(path)
        everything = box_of(None, store.shape)
        blocks = [
            block
            for block in grid_of(everything, _stored_chunk_shape(store))
            if any(common_box(block, box) is not None for box in boxes)
        ]
        arrays = {box: np.empty([stop - start for start, stop in box], dtype) for box in boxes}
        for block, values in zip(blocks, self._read_ahead(path, store, map(index_of, blocks)), strict=True):
            for box, array in arrays.items():
                common = common_box(block, box)
                if common is not None:
                    array[index_of(common, origin=box)] = cast(values[index_of(common, origin=block)], dtype, path)
        return arrays


def restore_params(checkpoint: str | Path, abstract: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads parameters from a checkpoint onto devices, with the shapes, dtypes and shardings in `abstract`.

    Each process reads every block that its devices need once. Host memory holds one parameter at a time.
    """
    stored = StoredParams(checkpoint)
    stored.check(stored.config, {path: target.shape for path, target in abstract.items()})
    return {path: stored.restore(path, target) for path, target in abstract.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences orbax's log, because it repeats the exceptions that orbax raises."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _check_is_checkpoint(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory")
    missing = [name for name in (PARAMS_DIR, HF_DIR) if not (path / name).is_dir()]
    if not missing:
        return
    hint = ""
    if (newest := newest_checkpoint(path)) is not None:
        hint = f"; it looks like a run: give one of its checkpoints, such as {newest}"
    elif (path / "config.json").is_file():
        hint = "; it looks like a Hugging Face directory: convert it with `python -m model_port.convert`"
    raise ValueError(f"{path} is not a checkpoint: it has no {' and no '.join(missing)}{hint}")


def _chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the chunk shape: a layer or consecutive rows of it, of at most BLOCK_BYTES; without layers, some rows."""
    if _has_layers(shape, itemsize):
        return (1, *_some_rows(shape[1:], itemsize))
    return _some_rows(shape, itemsize)


def _chunk_of_shard(shape: tuple[int, ...], shard: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the chunk shape of a sharded parameter. Chunks divide the shard, so that no chunk is in two shards.

    A reader of full rows holds as many chunks as rows are split into, so chunks have fewer rows if rows are split into
    many parts.
    """
    unsharded, chunk = _chunk_shape(shape, itemsize), _chunk_shape(shard, itemsize)
    if shard == shape:
        return unsharded
    most = (min(MAX_SPREAD * rows, own) for rows, own in zip(unsharded, chunk, strict=True))
    return tuple(
        next(part for part in range(bound, 0, -1) if size % part == 0) for size, bound in zip(shard, most, strict=True)
    )


def _some_rows(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    length, *row_shape = shape
    fewest = -(-length // max(1, BLOCK_BYTES // (math.prod(row_shape) * itemsize)))
    # The last chunk takes as much space as the others, so choose the number of chunks that fills it best.
    rows = min((-(-length // parts) for parts in range(fewest, 2 * fewest + 1)), key=lambda rows: -length % rows)
    return (rows, *row_shape)


def _has_layers(shape: tuple[int, ...], itemsize: int) -> bool:
    """Returns whether the first axis counts layers that are large enough for separate chunks, as in stacked kernels.

    Decided by the size of an element of this axis, which is far smaller in a vocabulary table or a single kernel.
    """
    return len(shape) > 2 and math.prod(shape[1:]) * itemsize >= MIN_LAYER_BYTES


def _stored_chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
    chunk_shape = store.chunk_layout.read_chunk.shape
    return tuple(step or length for step, length in zip(chunk_shape or store.shape, store.shape, strict=True))


def _runs(shape: tuple[int, ...], chunk_shape: tuple[int, ...], itemsize: int) -> Iterator[Index]:
    """Yields indices of consecutive full rows, chosen so that no chunk is needed by two indices."""
    length, *row_shape = shape
    chunk_rows, *rest_of_chunk = chunk_shape
    row_bytes = math.prod(row_shape) * itemsize
    if chunk_rows == 1 and row_bytes > BLOCK_BYTES and row_shape:
        for row in range(length):
            for inner in _runs(tuple(row_shape), tuple(rest_of_chunk), itemsize):
                yield (slice(row, row + 1), *inner)
        return
    rows = max(1, BLOCK_BYTES // (row_bytes * chunk_rows)) * chunk_rows
    for first in range(0, length, rows):
        yield (slice(first, min(first + rows, length)),)


def grid_of(box: Box, chunk_shape: tuple[int, ...]) -> Iterator[Box]:
    """Yields the chunks of a box that starts at a chunk boundary."""
    starts = (range(start, stop, step) for (start, stop), step in zip(box, chunk_shape, strict=True))
    for corner in product(*starts):
        yield tuple(
            (start, min(start + step, stop)) for start, step, (_, stop) in zip(corner, chunk_shape, box, strict=True)
        )


def box_of(index: Index | None, shape: tuple[int, ...]) -> Box:
    index = (slice(None),) * len(shape) if index is None else index
    return tuple(along.indices(length)[:2] for along, length in zip(index, shape, strict=True))


def index_of(box: Box, origin: Box | None = None) -> Index:
    """Converts a box to slices, relative to the start of `origin`."""
    starts = [0] * len(box) if origin is None else [start for start, _ in origin]
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(box, starts, strict=True))


def common_box(a: Box, b: Box) -> Box | None:
    overlap = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return overlap if all(start < stop for start, stop in overlap) else None
