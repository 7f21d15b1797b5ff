"""A checkpoint's blocks on disk cover each parameter once, have bounded sizes, and a missing block is detected."""

import math
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from changed_files import change_tensors
from hypothesis import given, strategies as st

import model_port
from model_port import checkpoint
from model_port.checkpoint import StoredParams, cast, restore_params, write_params
from model_port.config import preset
from model_port.convert import convert
from model_port.download import source_directory
from model_port.loading import abstract_model, abstract_params
from model_port.sharding import make_mesh
from model_port.tiny import make_tiny, tiny_config

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A checkpoint whose kernels have many chunks, and its parameters."""
    folder = tmp_path_factory.mktemp("converted")
    make_tiny(folder / "hf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "BLOCK_BYTES", 40_011)
        patch.setattr(checkpoint, "MIN_LAYER_BYTES", 2**10)
        convert(folder / "hf", folder / "ckpt", "float32")
    return folder / "ckpt", restore_params(folder / "ckpt", wanted())


def wanted(dtype="float32", mesh=None):
    return abstract_params(abstract_model(tiny_config()), dtype, mesh)


shapes = st.lists(st.integers(1, 13), min_size=1, max_size=4).map(tuple)


@given(shape=shapes, block_bytes=st.integers(1, 300), layer_bytes=st.integers(1, 300))
def test_chunks_cover_every_element_once_with_little_padding(shape, block_bytes, layer_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "BLOCK_BYTES", block_bytes)
        patch.setattr(checkpoint, "MIN_LAYER_BYTES", layer_bytes)
        chunk_shape = checkpoint._chunk_shape(shape, 2)
    times_covered = np.zeros(shape, int)
    for box in checkpoint.grid_of(checkpoint.box_of(None, shape), chunk_shape):
        times_covered[checkpoint.index_of(box)] += 1
    assert (times_covered == 1).all()
    for length, step in zip(shape, chunk_shape, strict=True):
        assert -length % step < -(-length // step)  # less than one row per chunk


@given(shard=shapes, num_shards=st.integers(2, 4), block_bytes=st.integers(1, 300))
def test_no_chunk_is_in_two_shards(shard, num_shards, block_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "BLOCK_BYTES", block_bytes)
        chunk = checkpoint._chunk_of_shard((num_shards * shard[0], *shard[1:]), shard, 2)
    assert not any(size % step for size, step in zip(shard, chunk, strict=True))


@given(shape=shapes, data=st.data())
def test_runs_are_the_bytes_in_order_whatever_the_chunks(shape, data):
    chunk_shape = tuple(data.draw(st.integers(1, length)) for length in shape)
    values = np.arange(math.prod(shape)).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "BLOCK_BYTES", data.draw(st.integers(1, 300)))
        runs = list(checkpoint._runs(shape, chunk_shape, 2))
    np.testing.assert_array_equal(np.concatenate([values[run].reshape(-1) for run in runs]), values.reshape(-1))
    cells = [np.argwhere(np.isin(values, values[run])) // chunk_shape for run in runs]
    chunks = [set(map(tuple, of_run.tolist())) for of_run in cells]
    assert sum(map(len, chunks)) == len(set().union(*chunks))  # no chunk is read twice


def test_blocks_are_read_as_written_also_at_the_edge_and_rejected_if_not_finite(tmp_path, monkeypatch):
    """The array has seven rows in blocks of two."""
    monkeypatch.setattr(checkpoint, "BLOCK_BYTES", 60)
    (tmp_path / "hf").mkdir()
    values, sizes = np.arange(35, dtype=np.float32).reshape(7, 5), []
    write_params(tmp_path, {"a": (7, 5)}, values.dtype, lambda _, index: values[index], lambda *_: 0, sizes.append)
    assert sizes == [40, 40, 40, 20]
    stored = StoredParams(tmp_path)
    np.testing.assert_array_equal(stored.read("a", ()), values)
    (tmp_path / "params" / "a" / "0.0").write_bytes(np.full(10, np.nan, np.float32).tobytes())
    for read in (lambda: stored.read("a", ()), lambda: list(stored.blocks("a"))):
        with pytest.raises(ValueError, match=r"a of \S+ has values that are NaN or infinite"):
            read()


@pytest.mark.parametrize("name", ["2b", "4b", "8b", "32b"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_published_size_has_small_blocks_and_few_files(name, itemsize):
    abstract = abstract_params(abstract_model(preset(name)), "float32")
    chunks = {path: checkpoint._chunk_shape(leaf.shape, itemsize) for path, leaf in abstract.items()}
    assert max(map(math.prod, chunks.values())) * itemsize <= checkpoint.BLOCK_BYTES
    wholes = {path: checkpoint.box_of(None, abstract[path].shape) for path in chunks}
    num_files = sum(len(list(checkpoint.grid_of(wholes[path], chunk))) for path, chunk in chunks.items())
    num_bytes = sum(math.prod(leaf.shape) for leaf in abstract.values()) * itemsize
    assert num_bytes / num_files > 10 * 2**20


@pytest.mark.slow
def test_any_dtype_and_mesh_restores_the_same_values_and_can_be_donated(converted):
    ckpt, alone = converted
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    spread = restore_params(ckpt, wanted("bfloat16", mesh))
    for path, value in spread.items():
        np.testing.assert_array_equal(value, np.asarray(alone[path]).astype(BFLOAT16), err_msg=path)
        assert value.sharding == wanted("bfloat16", mesh)[path].sharding
    scale = "text.final_norm.scale"  # the same on every device
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(spread[scale])
    np.testing.assert_array_equal(doubled, np.asarray(alone[scale]).astype(BFLOAT16) * 2)


@pytest.mark.slow
def test_only_the_blocks_of_the_requested_rows_are_read(converted, tmp_path):
    shutil.copytree(converted[0], tmp_path / "ckpt")
    stored, path = StoredParams(tmp_path / "ckpt"), "text.layers.mlp.gate_kernel_fd"
    layers, rows, width = stored.shapes[path]
    chunk_rows = checkpoint._stored_chunk_shape(stored.open(path))[1]
    assert rows > 2 * chunk_rows
    (tmp_path / "ckpt" / "params" / path / "0.0.0").unlink()
    box = ((0, layers), (chunk_rows, rows), (0, width))
    found = stored._read_boxes(path, {box}, np.dtype(np.float32))[box]
    np.testing.assert_array_equal(found, converted[1][path][:, chunk_rows:])
    with pytest.raises(ValueError, match=r"NOT_FOUND.*missing"):  # otherwise the comparison would prove nothing
        restore_params(tmp_path / "ckpt", wanted())


def test_parameters_of_another_model_are_listed(converted):
    ckpt, _ = converted
    incomplete = wanted()
    del incomplete["text.final_norm.scale"]
    with pytest.raises(ValueError, match=r"1 missing: text\.final_norm\.scale"):
        restore_params(ckpt, incomplete)
    wrong = wanted() | {"text.final_norm.scale": jax.ShapeDtypeStruct((7,), np.float32)}
    with pytest.raises(ValueError, match=r"text\.final_norm\.scale \(128,\), not \(7,\)"):
        restore_params(ckpt, wrong)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda ckpt: shutil.rmtree(ckpt / "params"), "is not a checkpoint: it has no params"),
        (lambda ckpt: shutil.rmtree(ckpt / "hf"), "is not a checkpoint: it has no hf"),
        (lambda ckpt: (ckpt / "params" / "_METADATA").unlink(), "is not a complete orbax checkpoint"),
    ],
)
def test_an_incomplete_checkpoint_is_named(damage, message, converted, tmp_path):
    shutil.copytree(converted[0], tmp_path / "ckpt")
    damage(tmp_path / "ckpt")
    with pytest.raises(ValueError, match=message):
        StoredParams(tmp_path / "ckpt")


def test_errors_identify_run_and_hugging_face_directories(tiny_hf, tmp_path):
    for step in (9, 10):
        (tmp_path / "run" / "checkpoints" / str(step) / "params").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")  # the settings file of a run
    for read in (StoredParams, source_directory, model_port.load):
        with pytest.raises(ValueError, match=r"give one of its checkpoints, such as .*/checkpoints/10$"):
            read(tmp_path / "run")
    with pytest.raises(ValueError, match=r"^\S+ has no config.json, so it is not a Hugging Face model directory$"):
        source_directory(tmp_path)
    with pytest.raises(ValueError, match="looks like a Hugging Face directory"):
        StoredParams(tiny_hf)


def test_infinities_survive_a_cast():
    block = np.array([np.inf, -np.inf, 65_504.0, np.nan], np.float32)
    np.testing.assert_array_equal(cast(block, np.dtype(np.float16), "x"), block.astype(np.float16))
    with pytest.raises(ValueError, match="x has the value 65520, which float16 cannot represent"):
        cast(np.array([65_520.0, 1.0], np.float32), np.dtype(np.float16), "x")


@pytest.mark.parametrize(("value", "stored", "dtype"), [(1e5, "float32", "float16"), (1e300, "float64", "bfloat16")])
@pytest.mark.parametrize("name", ["norm.weight", "layers.1.input_layernorm.weight"])
def test_values_that_overflow_a_dtype_are_rejected(name, value, stored, dtype, tmp_path):
    def change(tensors):
        for each in tensors:
            tensors[each] = tensors[each].astype(stored)
        tensors[f"model.language_model.{name}"][0] = value

    make_tiny(tmp_path / "hf")
    change_tensors(tmp_path / "hf", change)
    for read in (model_port.load, lambda path, dtype: convert(path, tmp_path / "ckpt", dtype)):
        with pytest.raises(ValueError, match=rf"norm\S+ has the value (1e\+300|100000), which {dtype} cannot"):
            read(tmp_path / "hf", dtype)
