"""A host samples from a copy of the weights on its own devices, split over tensor as far as the heads allow."""

import math
from dataclasses import replace

import hosts as several
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import model_port
from model_port import loading
from model_port.adapters import add_adapter, new_adapter
from model_port.config import LoraConfig
from model_port.sharding import flat_params, make_mesh
from paravt_jax.config.schema import MeshConfig
from paravt_jax.plan.memory import sampled_adapter_values, values_on
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
def test_the_base_of_an_adapter_is_copied_once_and_its_program_is_compiled_once(tiny_hf, monkeypatch, platform):
    monkeypatch.setattr(local_copy, "platform", lambda: platform)
    mesh, ids, lora = make_mesh(fsdp=4, tensor=2), np.arange(5, 44), LoraConfig(rank=4)
    model = model_port.load(tiny_hf, mesh=mesh)
    add_adapter(model, lora, new_adapter(model.config, lora, seed=0), mesh)
    copies, params, programs = LocalCopy(model, mesh), [], []
    for _ in range(3):
        nnx.update(model, jax.tree.map(lambda leaf: leaf + 0.1, nnx.state(model, nnx.LoRAParam)))
        expected, copy = model_port.logits(model, ids), copies.of(model)
        with jax.set_mesh(copies.mesh):
            logits = model_port.logits(copy, ids)
        programs.append(loading._logits._cache_size())
        params.append(flat_params(nnx.state(copy)))
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    first, *_, last = params
    assert programs[0] == programs[2]
    assert all((first[path] is last[path]) == ("lora" not in path and "joined" not in path) for path in first)
    shards = [array.sharding.shard_shape(array.shape) for array in last.values()]
    adapters = sampled_adapter_values(model.config, lora.rank, 2, platform)
    assert sum(map(math.prod, shards)) == values_on(MeshConfig(1, 1, 2), model.config) + adapters
