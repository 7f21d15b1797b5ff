"""Reading rows equals the safetensors package, and a damaged file is named before any read."""

import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model_port.safetensors_io import DTYPES, INDEX_FILE, HfTensors, check_finite

RANDOM = np.random.default_rng(3)
TENSORS = {
    "a": RANDOM.standard_normal((11, 5)).astype(ml_dtypes.bfloat16),
    "b": RANDOM.standard_normal((7, 3, 2)).astype(np.float16),
    "c": RANDOM.standard_normal(13).astype(np.float64),
    "d": np.array(2.5, np.float32),
}


@pytest.fixture
def sharded(tmp_path):
    weight_map = {"a": "x.safetensors", "b": "y.safetensors", "c": "x.safetensors", "d": "y.safetensors"}
    for shard in ("x.safetensors", "y.safetensors"):
        save_file({name: TENSORS[name] for name in TENSORS if weight_map[name] == shard}, tmp_path / shard)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_reading_rows_equals_slicing_the_tensor(sharded):
    with HfTensors(sharded) as tensors:
        assert tensors.shapes == {name: value.shape for name, value in TENSORS.items()}
        assert tensors.num_bytes == sum(value.nbytes for value in TENSORS.values())
        for name, value in TENSORS.items():
            assert tensors.read(name).tobytes() == value.tobytes() and tensors.read(name).dtype == value.dtype
        for rows in (slice(2, 5), slice(0, 0), slice(4, None), slice(-3, -1)):
            for name in ("a", "b", "c"):
                assert tensors.read(name, rows).tobytes() == TENSORS[name][rows].tobytes()


def test_several_threads_read_at_once(sharded):
    with HfTensors(sharded) as tensors, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: tensors.read("a", slice(row, row + 1)), [row % 11 for row in range(500)]))
    np.testing.assert_array_equal(np.concatenate(found[:11]), TENSORS["a"])
    assert all(found[n].tobytes() == found[n % 11].tobytes() for n in range(500))


def test_index_and_shards_must_agree(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"]["a"] = "y.safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names 1 tensors that are not in their shards: a \(y\.safetensors\)$"):
        HfTensors(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "key 'weight_map' is missing"),
        ("[]", "must hold a JSON object, got list"),
        ('{"weight_map": 3}', "weight_map=3 must be an object"),
        ('{"weight_map": {"a": ["x"]}}', r"weight_map\.a=\['x'\] must be text"),
        ('{"weight_map": {"a": "../x"}}', r"weight_map\.a='../x' must be the name of a file"),
        ('{"weight_map": {"a": ".."}}', r"weight_map\.a='\.\.' must be the name of a file"),
        ('{"weight_map": {"a": ""}}', r"weight_map\.a='' must be the name of a file"),
    ],
)
def test_an_invalid_index_is_named(sharded, text, message):
    (sharded / INDEX_FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{INDEX_FILE}:? {message}"):
        HfTensors(sharded)


def test_a_single_file_next_to_shards_is_rejected_as_ambiguous(sharded):
    save_file(TENSORS, sharded / "model.safetensors")
    with pytest.raises(ValueError, match=f"has model.safetensors and a {INDEX_FILE} of other files; remove the"):
        HfTensors(sharded)
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}))
    assert HfTensors(sharded).shapes == {name: value.shape for name, value in TENSORS.items()}


def test_a_tensor_in_two_shards_is_rejected(sharded):
    save_file({"a": TENSORS["a"], "b": TENSORS["b"], "d": TENSORS["d"]}, sharded / "y.safetensors")
    with pytest.raises(ValueError, match=r"tensor a is in x\.safetensors and in y\.safetensors"):
        HfTensors(sharded)


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_non_finite_value_is_detected_in_the_rows_that_are_read(name, value, tmp_path, monkeypatch):
    monkeypatch.setattr("model_port.safetensors_io.PART_BYTES", 16)  # makes several parts
    spoilt = {**TENSORS, name: TENSORS[name].copy()}
    spoilt[name][(-1,) * spoilt[name].ndim] = value
    save_file(spoilt, tmp_path / "model.safetensors")
    with HfTensors(tmp_path) as tensors:
        with pytest.raises(ValueError, match=f"tensor {name} of .*safetensors has values that are NaN or infinite"):
            tensors.read(name)
        if spoilt[name].ndim:
            assert tensors.read(name, slice(0, -1)).tobytes() == TENSORS[name][:-1].tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES.values()])
def test_the_largest_values_and_both_zeros_are_finite(dtype):
    info = ml_dtypes.finfo(dtype)
    check_finite(np.array([info.max, info.min, 0.0, -0.0, info.tiny], dtype), "x")


def entry(**changes):
    return {"dtype": "F32", "shape": [3], "data_offsets": [0, 12], **changes}


HOLE = {"a": entry(shape=[1], data_offsets=[0, 4]), "b": entry(shape=[1], data_offsets=[8, 12])}
DAMAGED = r"model\.safetensors is not a complete safetensors file \(Error while"


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        *((b"{nonsense", DAMAGED), (json.dumps(HOLE).encode(), DAMAGED)),  # two of the errors that the library detects
        (json.dumps({"a": entry(dtype="I32")}).encode(), "tensor a has dtype I32; supported are F64, F32, F16, BF16"),
    ],
)
def test_an_invalid_header_is_a_clear_error(header, problem, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(ValueError, match=problem):
        HfTensors(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 5, 9])
def test_a_truncated_file_is_rejected(num_bytes, tmp_path):
    save_file(TENSORS, tmp_path / "whole")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "whole").read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        HfTensors(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_detected(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    with HfTensors(tmp_path) as tensors:
        os.truncate(tmp_path / "model.safetensors", 200)
        last = max(tensors.infos, key=lambda name: tensors.infos[name].start_byte)
        with pytest.raises(ValueError, match=r"ended at byte \d+ while it was read; did another process"):
            tensors.read(last)


def test_readers_do_not_share_a_file_position(sharded):
    with HfTensors(sharded) as tensors:
        tensors.read("a")[:] = 0
    assert load_file(sharded / "x.safetensors")["a"].tobytes() == TENSORS["a"].tobytes()
