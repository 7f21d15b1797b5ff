"""The model on this host's devices, for programs that a single host runs.

Each host samples its own episodes. All hosts would have to start a program on the whole mesh together and in the same
order; a host runs programs on its own part of the mesh independently.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from model_port.model import Qwen3VL
from model_port.sharding import MESH_AXES, over_hosts


def local_mesh(mesh: Mesh | None) -> Mesh | None:
    """This host's part of the mesh."""
    return mesh if mesh is None or not mesh.is_multi_process else mesh.local_mesh


def local_model(model: Qwen3VL, dtype: str, mesh: Mesh | None) -> Qwen3VL:
    """A view of the model's arrays if this host has all of them, else a copy in `dtype`. All hosts must call this."""
    if mesh is None or not mesh.is_multi_process:
        return model
    graphdef, state = nnx.split(model)
    if mesh.local_mesh.shape["fsdp"] < mesh.shape["fsdp"]:
        state = _gather_over_hosts(state, dtype, mesh)
    return nnx.merge(graphdef, jax.tree.map(partial(_local_array, mesh.local_mesh), state))


def _gather_over_hosts(state: Any, dtype: str, mesh: Mesh) -> Any:
    """Gathers parameters that fsdp shards across hosts; they stay sharded within each host."""
    data, fsdp, tensor = (mesh.shape[axis] for axis in MESH_AXES)
    over_data, over_fsdp = over_hosts(data, fsdp, tensor, jax.process_count())
    # The same devices in the same order, but axes that span hosts are split into an inter-host and an intra-host axis.
    shape = (over_data, data // over_data, over_fsdp, fsdp // over_fsdp, tensor)
    by_host = Mesh(mesh.devices.reshape(shape), ("data_hosts", "data", "fsdp_hosts", "fsdp", "tensor"))
    shardings = jax.tree.map(lambda leaf: NamedSharding(by_host, leaf.sharding.spec), state)
    return jax.jit(_cast, static_argnums=1, out_shardings=shardings)(state, dtype)


def _cast(state: Any, dtype: str) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), state)


def _local_array(mesh: Mesh, leaf: jax.Array) -> jax.Array:
    assert isinstance(leaf.sharding, NamedSharding)
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(mesh, leaf.sharding.spec), shards)
