"""Copies the weights for sampling: in the activations' dtype, sharded over tensor on all devices of one host.

The learner's float32 masters are sharded over fsdp, so sampling from them would gather and cast them for every token.
Each host samples its own episodes on its own devices, because hosts would have to start programs on the whole mesh
together and in the same order.

XLA for GPUs copies a layer that a loop takes from a stack, so on GPUs each layer has separate arrays. It also has its
adapters joined with the kernels, because as separate products they are many small programs. Merging them would round
small updates away. If the sampling mesh is the learner's, the copy exists only during rollouts, because an unsharded
device lacks memory during updates. If rollouts continue during updates, it stays. If the weights need no change, they
are not copied.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from model_port.layers import split
from model_port.model import VLModel
from model_port.sharding import MESH_AXES, flat_params, on_mesh, over_hosts, platform, sampling_axes, sampling_tensor

SPLIT_AXES = ("data_hosts", "data", "fsdp_hosts", "fsdp", "tensor")  # mesh axes, between and within hosts


class LocalCopy:
    """Makes copies of a model. The frozen base of adapters is copied to another mesh only once."""

    def __init__(self, model: VLModel, mesh: Mesh | None, *, beside_update: bool = False):
        """Chooses how to copy. With `beside_update`, sampling continues while updates donate the learner's arrays."""
        self._learner_mesh, self._beside_update = mesh, beside_update
        self._dtype = jnp.dtype(model.compute.dtype)
        self._axes, self.mesh = ((), None) if mesh is None else _sampling_mesh(model, mesh)
        self._moves = self.mesh != mesh
        differs = _stacked_on_gpu(model, self.mesh) or {leaf.dtype for leaf in jax.tree.leaves(model)} != {self._dtype}
        self.is_temporary = differs and not self._moves and not beside_update  # the copy is deleted before updates
        self._is_own = not (differs or self._moves or beside_update)
        self._base: tuple[list[jax.Array], VLModel] | None = None  # the frozen arrays, and a copied model with adapters

    def of(self, model: VLModel) -> VLModel:
        """Returns the model's copy on this host, or the model if it needs none. All hosts must call it together.

        A copy with adapters becomes invalid with the next call.
        """
        if self._is_own:
            return model
        graphdef, trained, frozen = nnx.split(model, nnx.LoRAParam if model.lora.rank else nnx.Param, ...)
        arrays = jax.tree.leaves(frozen)
        if not arrays or self.is_temporary:
            return self._copy_all(graphdef, trained, frozen)
        if self._base is None or any(new is not old for new, old in zip(arrays, self._base[0], strict=True)):
            self._base = arrays, self._copy_all(graphdef, trained, frozen)
            return self._base[1]
        copy, adapters = self._base[1], self._copy(trained, donated=True)
        if isinstance(copy.text.layers, nnx.List):
            stacked = nnx.merge(graphdef, adapters, frozen).text.layers
            with on_mesh(self.mesh):
                for number, layer in enumerate(copy.text.layers):
                    layer.load_adapters(stacked, number)
        else:
            nnx.update(copy, adapters)
        return copy

    def _copy_all(self, graphdef: nnx.GraphDef[VLModel], trained: nnx.State, frozen: nnx.State) -> VLModel:
        return by_layer(
            nnx.merge(graphdef, self._copy(trained, donated=True), self._copy(frozen, donated=False)), self.mesh
        )

    def _copy(self, state: nnx.State, *, donated: bool) -> nnx.State:
        """Copies parameters. `donated` means that updates overwrite the arrays."""
        if not self._moves:
            copy = donated and self._beside_update
            return jax.tree.map(lambda leaf: jnp.array(leaf, self._dtype, copy=copy), state)
        mesh = self._learner_mesh
        assert mesh is not None
        sizes = [mesh.shape[axis] for axis in MESH_AXES]
        over_data, over_fsdp = over_hosts(*sizes, num_hosts=jax.process_count() if mesh.is_multi_process else 1)
        # The same devices in the same order, with each axis that spans hosts split into two.
        shape = over_data, sizes[0] // over_data, over_fsdp, sizes[1] // over_fsdp, sizes[2]
        by_host = Mesh(mesh.devices.reshape(shape), SPLIT_AXES)
        shardings = jax.tree.map(lambda leaf: NamedSharding(by_host, self._spec(leaf, self._axes)), state)
        with on_mesh(by_host):  # the caller's mesh has only this host's devices
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
    """On GPUs, replaces a model's stacked layers by separate arrays for each layer, in which adapters are joined."""
    if _stacked_on_gpu(model, mesh):
        model.text.layers = split(model.text.layers, [1] * model.config.text.num_layers)
        with on_mesh(mesh):
            for layer in model.text.layers if model.lora.rank else ():
                layer.join(1 if mesh is None else mesh.shape["tensor"])
    return model


def _stacked_on_gpu(model: VLModel, mesh: Mesh | None) -> bool:
    with on_mesh(mesh):
        return platform() == "gpu" and not isinstance(model.text.layers, nnx.List)


def _sampling_mesh(model: VLModel, mesh: Mesh) -> tuple[tuple[str, ...], Mesh]:
    """The axes that become tensor, and the mesh of this host's devices. The first axis replicates over the rest."""
    local = mesh.local_mesh if mesh.is_multi_process else mesh
    shapes = {path: leaf.shape for path, leaf in flat_params(nnx.state(model)).items()}
    axes = sampling_axes(shapes, local.shape)
    tensor = sampling_tensor(shapes, local.shape)
    return axes, Mesh(local.devices.reshape(-1, 1, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def _cast(state: Any, dtype: jnp.dtype) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), state)
