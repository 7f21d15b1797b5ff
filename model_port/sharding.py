"""Shardings of parameters and activations on a mesh with the axes data, fsdp and tensor.

A parameter's name ends in its axis letters (`q_kernel_nhd`), and each letter maps to one mesh axis, so the name defines
the sharding. Batches are split over data and fsdp together. fsdp also splits every kernel along the model width or
along experts, and tensor splits kernels along heads, ffn and vocabulary. Scales and biases are small and replicated.

With several hosts, each host has neighboring devices and its own rows, and the tensor axis never spans hosts.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, combinations
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

MESH_AXES = ("data", "fsdp", "tensor")
AXIS_TYPES = (AxisType.Auto,) * len(MESH_AXES)

PARAM_AXES: dict[str, str | None] = {
    "v": "tensor",  # vocabulary
    "n": "tensor",  # query heads
    "k": "tensor",  # key/value heads
    "f": "tensor",  # ffn
    "d": "fsdp",  # width
    "h": None,  # head dim
    "x": "fsdp",  # experts
    "m": None,  # width of experts
    "z": None,  # rank of an adapter
    "c": None,  # values of a patch; also the axis over q, k and v, and over gate and up
    "s": None,  # learned positions
}
ACTIVATION_AXES: dict[str, tuple[str, ...] | str | None] = {
    "b": ("data", "fsdp"),
    "n": "tensor",
    "k": "tensor",
    "f": "tensor",
    "v": "tensor",
    "o": "tensor",  # tokens of a long row in the residual stream, where tokens are independent
    "e": "data",  # rows that are replicated over fsdp, because fsdp splits the width (w)
    "w": "fsdp",  # width, together with e
}
_PROJECTION = re.compile(r"(\b(?:attn|mlp)\.[a-z]+|mergers?\.(?:up|down))\.(?=kernel_|bias$|lora\.)")
_LAYOUT = re.compile(r"(?:kernel|table)_([a-z]+)$")


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Any = None) -> Mesh:
    """Makes a mesh of the first of `devices` (default: all devices); over several hosts, it must have all of them.

    Its axes are Auto: XLA propagates shardings, and we only constrain where it would choose badly.
    """
    devices = jax.devices() if devices is None else devices
    arrange = _arrange if len({device.process_index for device in devices}) == 1 else _arrange_on_hosts
    try:
        arranged = arrange(data, fsdp, tensor, devices)
    except NotImplementedError:  # jax raises this if the devices lack the links
        raise ValueError(
            f"mesh.data={data} x mesh.fsdp={fsdp} x mesh.tensor={tensor} does not fit the links between these "
            f"{len(devices)} {devices[0].device_kind}: each host's part of each axis must be a side of its part of the "
            f"slice, or a product of sides"
        ) from None
    return Mesh(arranged, MESH_AXES, axis_types=AXIS_TYPES)


def with_all_axes(mesh: Mesh) -> Mesh:
    """Converts a mesh with some of our axes, of any types and order, to a mesh with all axes, like `make_mesh`'s."""
    if unknown := [name for name in mesh.axis_names if name not in MESH_AXES]:
        raise ValueError(
            f"the mesh has an axis {unknown[0]!r}, expected some of {', '.join(MESH_AXES)}; use "
            f"model_port.make_mesh(fsdp={mesh.size})"
        )
    own = [name for name in MESH_AXES if name in mesh.axis_names]
    devices = mesh.devices.transpose([mesh.axis_names.index(name) for name in own])
    return Mesh(devices.reshape([mesh.shape.get(name, 1) for name in MESH_AXES]), MESH_AXES, axis_types=AXIS_TYPES)


def _arrange(data: int, fsdp: int, tensor: int, devices: Any) -> np.ndarray:
    num_wanted = data * fsdp * tensor
    if not 1 <= num_wanted <= len(devices):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} needs {num_wanted} devices, but there are {len(devices)}"
        )
    return jax.make_mesh((data, fsdp, tensor), MESH_AXES, devices=devices[:num_wanted]).devices


def _arrange_on_hosts(data: int, fsdp: int, tensor: int, devices: Any) -> np.ndarray:
    """Arranges all devices of all hosts, so that the outer axes span hosts."""
    each = Counter(device.process_index for device in devices)
    num_hosts = len(each)
    if data * fsdp * tensor != len(devices):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} must equal the {len(devices)} devices of all "
            f"{num_hosts} hosts, because each host computes a part"
        )
    if len(set(each.values())) > 1:
        counts = ", ".join(f"host {host} {count}" for host, count in sorted(each.items()))
        raise ValueError(f"all hosts must have the same number of devices, but they have: {counts}")
    over_data, over_fsdp = over_hosts(data, fsdp, tensor, num_hosts)
    within = (data // over_data, fsdp // over_fsdp, tensor)
    return mesh_utils.create_hybrid_device_mesh(within, (over_data, over_fsdp, 1), devices, process_is_granule=True)


def over_hosts(data: int, fsdp: int, tensor: int, num_hosts: int) -> tuple[int, int]:
    """Returns the number of parts into which hosts split data and fsdp. Raises if the mesh does not split evenly."""
    over_data = math.gcd(data, num_hosts)
    over_fsdp = num_hosts // over_data
    if fsdp % over_fsdp:
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} does not split over {num_hosts} hosts: each host has its own rows, and "
            f"tensor={tensor} must stay within a host"
        )
    return over_data, over_fsdp


def warm_up_collectives(mesh: Mesh) -> None:
    """Runs one all-reduce along every combination of mesh axes, which connects all groups of devices."""
    axes = [axis for axis in MESH_AXES if mesh.shape[axis] > 1]
    for group in chain.from_iterable(combinations(axes, number) for number in range(1, len(axes) + 1)):
        sum_indices = partial(_sum_indices, group)
        summed = jax.shard_map(sum_indices, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False)
        jax.block_until_ready(jax.jit(summed)())


def _sum_indices(axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(jax.lax.axis_index(axes), axes)


def own_rows(array: jax.Array) -> np.ndarray:
    """Returns this host's rows of an array that is split only along its first axis."""
    if array.is_fully_addressable:
        return np.asarray(array)
    shards = {shard.index[0].start or 0: shard for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start].data) for start in sorted(shards)])


def on_host(array: jax.Array) -> np.ndarray:
    """Copies the complete array to this host's memory. If several hosts hold parts of it, all must call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def num_row_parts(mesh: Mesh | None) -> int:
    axes = ACTIVATION_AXES["b"]
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in _names(axes))


def on_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Sets the current mesh of this thread; does nothing for None."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def shapes_of(tree: Any, memory: str | None = None) -> Any:
    """Replaces the arrays of a tree by their shapes, in the memory kind `memory` if given."""

    def shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = array.sharding if memory is None else array.sharding.with_memory_kind(memory)
        return placed(array, sharding if array.committed else None)

    return jax.tree.map(shape_of, tree)


def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def platform() -> str:
    """Returns the platform of the program that is being traced: cpu, tpu, gpu (NVIDIA) or another.

    The current mesh may have devices of another machine. Without a mesh, the program is for this machine.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    nvidia = device.device_kind.startswith("NVIDIA")
    return "rocm" if device.platform == "gpu" and not nvidia else device.platform


def param_spec(path: str, num_axes: int) -> PartitionSpec:
    """Returns the spec of a parameter from its path. Leading axes without a letter (stacked layers) are not split."""
    layout = _LAYOUT.search(path)
    if layout is None:
        return PartitionSpec()
    letters = layout.group(1)
    return PartitionSpec(*[None] * (num_axes - len(letters)), *(PARAM_AXES[letter] for letter in letters))


def check_divisible(path: str, shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: dict[str, int]) -> None:
    for axis, names in enumerate(spec):
        parts = math.prod(axis_sizes[name] for name in _names(names))
        if shape[axis] % parts:
            raise ValueError(
                f"{path} {shape}: axis {axis} of size {shape[axis]} does not split over {names}={parts}; "
                f"choose a mesh whose {names} divides {shape[axis]}"
            )


def sampling_axes(shapes: dict[str, tuple[int, ...]], local: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes over which the sampler splits heads, ffn and vocabulary within a host.

    These are as many axes as possible whose size divides all split dimensions. `local` has the sizes of the learner's
    mesh within one host.
    """
    placed = (zip(shape, param_spec(path, len(shape)), strict=False) for path, shape in shapes.items())
    split_sizes = [size for axes in placed for size, axis in axes if axis == "tensor"]
    for first in range(len(MESH_AXES) - 1):
        axes = MESH_AXES[first:]
        if math.gcd(*split_sizes) % math.prod(local[axis] for axis in axes) == 0:
            return axes
    return MESH_AXES[-1:]


def sampling_tensor(shapes: dict[str, tuple[int, ...]], local: Mapping[str, int]) -> int:
    """Returns over how many devices of a host the sampler splits the heads."""
    return math.prod(local[axis] for axis in sampling_axes(shapes, local))


def shard_abstract(abstract: dict[str, jax.ShapeDtypeStruct], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Adds each parameter's sharding on `mesh` to the shapes. Raises if a parameter does not split evenly."""
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    placed = {}
    for path, leaf in abstract.items():
        spec = param_spec(path, len(leaf.shape))
        check_divisible(path, leaf.shape, spec, sizes)
        placed[path] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
    return placed


def constrain(x: jax.Array, letters: str) -> jax.Array:
    """Constrains an activation's sharding, for example "btd", on the current mesh (`jax.set_mesh`), if any."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, _spec(mesh, letters, x.shape))


def constrain_params(state: nnx.State) -> nnx.State:
    """Shards arrays like the parameters at their paths, on the current mesh, if any."""
    mesh = jax.sharding.get_abstract_mesh()

    def placed(path: tuple[Any, ...], leaf: nnx.Variable[jax.Array]) -> nnx.Variable[jax.Array]:
        spec = param_spec(param_name(path), leaf.get_value().ndim)
        return leaf.replace(jax.lax.with_sharding_constraint(leaf.get_value(), spec))

    return state if mesh.empty else nnx.map_state(placed, state)


def replicate(x: jax.Array) -> jax.Array:
    """Replicates a small result, so that every host can read it."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, PartitionSpec())


def per_device(work: Callable[..., Any], takes: Sequence[str], gives: Sequence[str]) -> Callable[..., Any]:
    """Wraps `work` to run on each device's part of its arguments. The work must be independent across rows and heads.

    A layout such as "btd" applies to all arrays of an argument; results use the same letters. A layout such as
    "kernel_vd" belongs to a parameter: `work` gets its shard, and returns the shard's gradient, which it makes with
    `scattered` and `sum_over_data`.
    """

    def placed(*arguments: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return work(*arguments)
        sizes: dict[str, int] = {}
        for layout, argument in zip(takes, arguments, strict=True):
            sizes |= zip(_letters(layout), jax.tree.leaves(argument)[0].shape, strict=True)

        def spec(layout: str) -> PartitionSpec:
            letters = _letters(layout)
            if letters != layout:
                return param_spec(layout, len(letters))
            return _spec(mesh, letters, [sizes[letter] for letter in letters])

        in_specs, out_specs = (tuple(map(spec, side)) for side in (takes, gives))
        return jax.shard_map(work, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*arguments)

    return placed


def gathered(shard: jax.Array, letters: str) -> jax.Array:
    """All-gathers a parameter over fsdp, inside `per_device`. Axes that are split over tensor stay split."""
    return jax.lax.all_gather(shard, "fsdp", axis=_over_fsdp(letters), tiled=True) if _is_per_device() else shard


def scattered(gradient: jax.Array, letters: str) -> jax.Array:
    """Reduce-scatters a parameter's gradient over fsdp, inside `per_device`."""
    if not _is_per_device():
        return gradient
    return jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=_over_fsdp(letters), tiled=True)


def sum_over_data(gradient: jax.Array) -> jax.Array:
    return jax.lax.psum(gradient, "data") if _is_per_device() else gradient


def _over_fsdp(letters: str) -> int:
    """Returns the axis of a parameter that is split over fsdp."""
    return [PARAM_AXES[letter] for letter in letters].index("fsdp")


def sum_over_tensor(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "tensor") if _is_per_device() else x


def max_over_tensor(x: jax.Array) -> jax.Array:
    return jax.lax.pmax(x, "tensor") if _is_per_device() else x


def tensor_part() -> Int[Array, ""] | int:
    """Returns this device's index along the tensor axis, inside `per_device`."""
    return jax.lax.axis_index("tensor") if _is_per_device() else 0


def _is_per_device() -> bool:
    """Returns whether the current code is traced inside `per_device` on a mesh."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _letters(layout: str) -> str:
    parameter = _LAYOUT.search(layout)
    return layout if parameter is None else parameter.group(1)


def _spec(mesh: AbstractMesh, letters: str, shape: Sequence[int]) -> PartitionSpec:
    """Returns an activation's spec. An axis that its mesh axes do not divide, such as a single row, is not split."""
    axes = [ACTIVATION_AXES.get(letter) for letter in letters]
    parts = [math.prod(mesh.shape[name] for name in _names(names)) for names in axes]
    return PartitionSpec(
        *(names if size % number == 0 else None for names, size, number in zip(axes, shape, parts, strict=True))
    )


def flat_params(state: nnx.State) -> dict[str, Any]:
    """Returns a model's parameters by their names in the weight table and in checkpoints."""
    return {param_name(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def param_name(path: Iterable[Any]) -> str:
    """Returns the dotted name of a parameter at this path in a state.

    Checkpoints keep the names from before `Projection` and `VocabTable` existed: `attn.q.kernel_nhd` is stored as
    `attn.q_kernel_nhd`, `attn.q.lora.kernel_zd` as `attn.q_lora.kernel_zd`, and the head's table as its kernel.
    """
    name = _PROJECTION.sub(r"\1_", ".".join(map(str, path)))
    return name.replace("text.head.table_vd", "text.head.kernel_vd")


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
