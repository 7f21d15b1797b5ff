"""An adapter's tensors go to servers under their kernels' names, with all that is needed to merge them."""

import json

import numpy as np
import pytest

import model_port
from model_port.adapters import AdapterBase, AdapterInfo, add_adapter, new_adapter, read_adapter, read_adapter_info
from model_port.config import FAMILIES, LoraConfig
from model_port.safetensors_io import HfTensors
from model_port.tiny import make_tiny, tiny_config
from paravt_jax.sampling.weights import AdapterWeights, ModelWeights
from rollout.engine.publishing import ADAPTER_INFO

INFO = AdapterInfo(LoraConfig(rank=3, alpha=6.0), AdapterBase("org/base", "bfloat16", "abc"))


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf") / request.param
    make_tiny(directory, config=tiny_config(request.param))
    return directory


@pytest.fixture(scope="module")
def weights(model_dir):
    model = model_port.load(model_dir)
    add_adapter(model, INFO.lora, new_adapter(model.config, INFO.lora, seed=1))
    return AdapterWeights(model, INFO)


def test_an_adapter_is_sent_as_matrices_with_merge_information(weights, model_dir):
    tensors = dict(weights.tensors())
    merging = json.loads(tensors.pop(ADAPTER_INFO).tobytes())
    expected = {"scale": 2.0, "base": "org/base", "dtype": "bfloat16", "sum": "abc"}
    assert {key: merging[key] for key in expected} == expected
    with HfTensors(model_dir) as files:
        assert sorted(merging["names"]) == sorted(files.shapes)
        projections = {name for name in files.shapes if "_proj.weight" in name and "visual" not in name}
    kernels = {f"base_model.model.{name.removesuffix('weight')}" for name in projections}
    assert tensors.keys() == {f"{kernel}lora_{side}.weight" for kernel in kernels for side in "AB"}
    assert {tensor.dtype.name for tensor in tensors.values()} == {"float32"}


def test_an_adapter_has_the_bytes_of_its_matrices_not_of_its_model(weights):
    sent = sum(tensor.nbytes for name, tensor in weights.tensors() if name != ADAPTER_INFO)
    assert weights.num_bytes == sent < 0.05 * ModelWeights(weights.model, np.dtype(np.float32)).num_bytes


def test_a_written_adapter_loads_in_peft(weights, tmp_path):
    weights.write(tmp_path)
    written = read_adapter(tmp_path, weights.model.config, INFO.lora.rank)
    assert read_adapter_info(tmp_path) == INFO
    for path, array in new_adapter(weights.model.config, INFO.lora, seed=1).items():
        np.testing.assert_array_equal(written[path], array)
