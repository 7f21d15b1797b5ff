"""A host samples from a copy of the weights on its own devices, split over tensor as far as the heads allow."""

from dataclasses import replace

import hosts as several
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import model_port
from model_port.adapters import add_adapter, new_adapter
from model_port.config import LoraConfig
from model_port.sharding import flat_params, make_mesh
from paravt_jax.sampling import local_copy
from paravt_jax.sampling.local_copy import LocalCopy

pytestmark = pytest.mark.slow


def copy_on_each_host(hosts, tiny_hf):
    expected = jax.tree.leaves(model_port.load(tiny_hf))
    for axes, tensor in (({"data": 2, "tensor": 2}, 2), ({"fsdp": 4}, 2), ({"data": 2, "fsdp": 2}, 2)):
        mesh = make_mesh(**axes)
        model = model_port.load(tiny_hf, mesh=mesh)
        copy = LocalCopy(model, mesh)
        assert {device.process_index for device in copy.mesh.devices.flat} == {hosts.index}
        assert dict(copy.mesh.shape) == {"data": 1, "fsdp": 1, "tensor": tensor}
        with jax.set_mesh(copy.mesh):
            copied = jax.tree.leaves(copy.of(model))
        for array, other in zip(copied, expected, strict=True):
            assert array.is_fully_addressable and array.sharding.device_set == {*copy.mesh.devices.flat}
            assert np.asarray(array).tobytes() == np.asarray(other).tobytes()


def test_each_host_has_the_whole_model(tiny_hf, tmp_path):
    several.run_work(tmp_path, copy_on_each_host, 2, tiny_hf, devices=2)


def test_a_copy_is_made_only_if_weights_change_or_move(tiny_hf):
    model = model_port.load(tiny_hf)
    arrays = jax.tree.leaves(model)
    for beside_update in (False, True):
        copies = jax.tree.leaves(LocalCopy(model, None, beside_update=beside_update).of(model))
        assert [copy is array for copy, array in zip(copies, arrays, strict=True)] == [not beside_update] * len(arrays)
    mesh = make_mesh(fsdp=2)
    model = model_port.load(tiny_hf, mesh=mesh)
    model.compute = replace(model.compute, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(LocalCopy(model, mesh).of(model))} == {jnp.dtype("bfloat16")}
    assert [LocalCopy(model, None, beside_update=beside).is_temporary for beside in (False, True)] == [True, False]


def test_replicas_over_data_alone_sample_from_the_learners_arrays(tiny_hf):
    mesh = make_mesh(data=2, tensor=2)
    model = model_port.load(tiny_hf, mesh=mesh)
    copy = LocalCopy(model, mesh)
    assert copy.mesh == mesh and copy.mesh.shape["tensor"] == 2
    arrays = (jax.tree.leaves(each) for each in (copy.of(model), model))
    assert all(own is array for own, array in zip(*arrays, strict=True))


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_base_of_an_adapter_is_copied_once(tiny_hf, monkeypatch, platform):
    monkeypatch.setattr(local_copy, "platform", lambda: platform)
    mesh = make_mesh(fsdp=4, tensor=2)
    model, lora = model_port.load(tiny_hf, mesh=mesh), LoraConfig(rank=4)
    add_adapter(model, lora, new_adapter(model.config, lora, seed=0), mesh)
    copy = LocalCopy(model, mesh)
    first = flat_params(nnx.state(copy.of(model)))
    nnx.update(model, jax.tree.map(lambda leaf: leaf + 1, nnx.state(model, nnx.LoRAParam)))
    second = flat_params(nnx.state(copy.of(model)))
    assert all((first[path] is second[path]) == ("lora" not in path) for path in first)
    layers = [f"layers.{n}" for n in range(model.config.text.num_layers)] if platform == "gpu" else ["layers"]
    for path, adapter in flat_params(nnx.state(model, nnx.LoRAParam)).items():
        copied = [second[path.replace("layers", layer)] for layer in layers]
        np.testing.assert_array_equal(np.concatenate(copied), adapter)
