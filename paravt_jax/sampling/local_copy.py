"""The weights that a host samples from: in the activations' dtype, split over tensor on all devices of the host.

The learner's float32 masters are split over fsdp, so that every token would gather and cast them. Each host samples its
own episodes: all hosts would have to start a program on the whole mesh together and in the same order; a host runs
programs on its own devices independently.

XLA for GPUs copies a layer that a loop takes from a stack, so there each layer has separate arrays. Without another
mesh, a copy exists only during rollouts: a device that is not split lacks memory during updates.
"""

from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from model_port.layers import split
from model_port.model import VLModel
from model_port.sharding import MESH_AXES, flat_params, on_mesh, over_hosts, platform, sampling_axes, sampling_tensor

SPLIT_AXES = ("data_hosts", "data", "fsdp_hosts", "fsdp", "tensor")  # of the mesh, in and between hosts


class LocalCopy:
    """Makes the copies. A frozen base of adapters moves to another mesh once."""

    def __init__(self, model: VLModel, mesh: Mesh | None, *, beside_update: bool = False):
        """`beside_update`: sampling continues while updates donate the learner's arrays."""
        self._learner_mesh, self._beside_update = mesh, beside_update
        self._dtype = jnp.dtype(model.compute.dtype)
        self._axes, self.mesh = ((), None) if mesh is None else _sampling_mesh(model, mesh)
        self._moves = self.mesh != mesh
        differs = _stacked_on_gpu(model, self.mesh) or {leaf.dtype for leaf in jax.tree.leaves(model)} != {self._dtype}
        self.is_temporary = differs and not self._moves and not beside_update  # deleted before updates
        self._is_own = not (differs or self._moves or beside_update)
        self._base: tuple[list[jax.Array], VLModel] | None = None  # frozen arrays, and a copy with adapters

    def of(self, model: VLModel) -> VLModel:
        """All hosts must call this."""
        if self._is_own:
            return model
        graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam if model.lora.rank else nnx.Param, ...)
        arrays = jax.tree.leaves(frozen)
        if not arrays or self.is_temporary:
            return self._copy_all(graphdef, trained, frozen)
        if self._base is None or any(new is not old for new, old in zip(arrays, self._base[0], strict=True)):
            self._base = arrays, self._copy_all(graphdef, trained, frozen)
            return self._base[1]
        copy, adapters = nnx.clone(self._base[1]), self._copy(trained, donated=True)
        if isinstance(copy.text.layers, nnx.List):
            stacked, numbers = adapters["text"]["layers"], range(len(copy.text.layers))
            layers = {n: jax.tree.map(itemgetter(slice(n, n + 1)), stacked) for n in numbers}
            adapters["text"]["layers"] = nnx.State(layers)
        nnx.update(copy, adapters)
        return copy

    def _copy_all(self, graphdef: nnx.GraphDef[VLModel], trained: nnx.State, frozen: nnx.State) -> VLModel:
        return by_layer(
            nnx.merge(graphdef, self._copy(trained, donated=True), self._copy(frozen, donated=False)), self.mesh
        )

    def _copy(self, state: nnx.State, *, donated: bool) -> nnx.State:
        """`donated` arrays are those that updates overwrite."""
        if not self._moves:
            copy = donated and self._beside_update
            return jax.tree.map(lambda leaf: jnp.array(leaf, self._dtype, copy=copy), state)
        mesh = self._learner_mesh
        assert mesh is not None
        sizes = [mesh.shape[axis] for axis in MESH_AXES]
        over_data, over_fsdp = over_hosts(*sizes, num_hosts=jax.process_count() if mesh.is_multi_process else 1)
        # The same devices in the same order, but axes that span hosts are split into two.
        shape = over_data, sizes[0] // over_data, over_fsdp, sizes[1] // over_fsdp, sizes[2]
        by_host = Mesh(mesh.devices.reshape(shape), SPLIT_AXES)
        shardings = jax.tree.map(lambda leaf: NamedSharding(by_host, self._spec(leaf, self._axes)), state)
        with on_mesh(by_host):  # the caller's mesh has this host's devices only
            copies = jax.jit(_cast, static_argnums=1, out_shardings=shardings)(state, self._dtype)
        return jax.tree.map(self._on_this_host, copies, state)

    def _spec(self, leaf: jax.Array, tensor: Any) -> PartitionSpec:
        assert isinstance(leaf.sharding, NamedSharding)
        return PartitionSpec(*(tensor if axis == "tensor" else None for axis in leaf.sharding.spec))

    def _on_this_host(self, copy: jax.Array, leaf: jax.Array) -> jax.Array:
        assert self.mesh is not None
        shards = [shard.data for shard in copy.addressable_shards]
        sharding = NamedSharding(self.mesh, self._spec(leaf, "tensor"))
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def by_layer(model: VLModel, mesh: Mesh | None = None) -> VLModel:
    """On GPUs, gives each layer separate arrays; takes the stacked ones out of the model."""
    if _stacked_on_gpu(model, mesh):
        model.text.layers = split(model.text.layers, [1] * model.config.text.num_layers)
    return model


def _stacked_on_gpu(model: VLModel, mesh: Mesh | None) -> bool:
    with on_mesh(mesh):
        return platform() == "gpu" and not isinstance(model.text.layers, nnx.List)


def _sampling_mesh(model: VLModel, mesh: Mesh) -> tuple[tuple[str, ...], Mesh]:
    """This host's devices, and the axes that become tensor; devices that tensor cannot use have copies."""
    local = mesh.local_mesh if mesh.is_multi_process else mesh
    shapes = {path: leaf.shape for path, leaf in flat_params(nnx.state(model)).items()}
    axes = sampling_axes(shapes, local.shape)
    tensor = sampling_tensor(shapes, local.shape)
    return axes, Mesh(local.devices.reshape(-1, 1, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def _cast(state: Any, dtype: jnp.dtype) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), state)
