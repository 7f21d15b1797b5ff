"""Each host of a mesh has the whole model on its own devices, to sample independently."""

import hosts as several
import jax
import numpy as np
import pytest

import model_port
from model_port.sharding import make_mesh
from paravt_jax.sampling.local_model import local_mesh, local_model

pytestmark = pytest.mark.slow


def hold_all(hosts, tiny_hf):
    expected = jax.tree.leaves(model_port.load(tiny_hf))
    for axes, is_view in (({"data": 2, "tensor": 2}, True), ({"fsdp": 4}, False), ({"data": 2, "fsdp": 2}, True)):
        mesh = make_mesh(**axes)
        model = model_port.load(tiny_hf, mesh=mesh)
        local = jax.tree.leaves(local_model(model, "float32", mesh))
        assert {device.process_index for device in local_mesh(mesh).devices.flat} == {hosts.index}
        for array, other, leaf in zip(local, expected, jax.tree.leaves(model), strict=True):
            assert array.is_fully_addressable and array.sharding.device_set == {*local_mesh(mesh).devices.flat}
            assert np.asarray(array).tobytes() == np.asarray(other).tobytes()
            shares = array.addressable_shards[0].data.unsafe_buffer_pointer() in {
                shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards
            }
            assert shares == is_view


def test_each_host_has_the_whole_model_without_a_copy_if_fsdp_stays_within_the_host(tiny_hf, tmp_path):
    several.run_work(tmp_path, hold_all, 2, tiny_hf, devices=2)
