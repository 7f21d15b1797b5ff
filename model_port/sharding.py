"""How parameters and activations lie on a mesh with the axes data, fsdp and tensor.

A parameter's name ends in its axis letters (`q_kernel_nhd`), each letter has one mesh axis, so the name is the spec.
Batches split over data and fsdp together; fsdp also splits every kernel along the model width, tensor along heads, ffn
and vocabulary. Scales and biases are small and live on every device.

Of several hosts each has devices next to each other, so that each has rows of its own: tensor stays within a host.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, combinations
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

MESH_AXES = ("data", "fsdp", "tensor")

PARAM_AXES: dict[str, str | None] = {
    "v": "tensor",  # vocabulary
    "n": "tensor",  # query heads
    "k": "tensor",  # key/value heads
    "f": "tensor",  # ffn
    "d": "fsdp",  # width
    "h": None,  # head dim
    "z": None,  # rank of an adapter
    "c": None,  # values of a patch; also the three of q, k, v
    "s": None,  # learned positions
}
ACTIVATION_AXES: dict[str, tuple[str, ...] | str | None] = {
    "b": ("data", "fsdp"),
    "n": "tensor",
    "k": "tensor",
    "f": "tensor",
    "v": "tensor",
    "o": "tensor",  # tokens of a long row, between the products: there each token is on its own
    "e": "data",  # rows that every device of fsdp has …
    "w": "fsdp",  # … with a part of the width each
}
_PROJECTION = re.compile(r"(\b(?:attn|mlp)\.[a-z]+)\.(?=kernel_|lora\.)")
_LAYOUT = re.compile(r"(?:kernel|table)_([a-z]+)$")


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Any = None) -> Mesh:
    """A mesh whose axes XLA propagates through (Auto); our constraints name only what it must not guess."""
    devices = jax.devices() if devices is None else devices
    place = _places if len({device.process_index for device in devices}) == 1 else _places_on_hosts
    try:
        placed = place(data, fsdp, tensor, devices)
    except NotImplementedError:  # jax's word for links that are not there
        raise ValueError(
            f"mesh.data={data} x mesh.fsdp={fsdp} x mesh.tensor={tensor} does not lie along the links of these "
            f"{len(devices)} {devices[0].device_kind}: what a host has of each of the three must be a side of its part "
            f"of the slice, or a product of sides"
        ) from None
    return Mesh(placed, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def _places(data: int, fsdp: int, tensor: int, devices: Any) -> np.ndarray:
    wanted = data * fsdp * tensor
    if wanted > len(devices):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} needs {wanted} devices, there are {len(devices)}"
        )
    return jax.make_mesh((data, fsdp, tensor), MESH_AXES, devices=devices[:wanted]).devices


def _places_on_hosts(data: int, fsdp: int, tensor: int, devices: Any) -> np.ndarray:
    """All devices of all hosts; the outer axes go over the hosts."""
    each = Counter(device.process_index for device in devices)
    num_hosts = len(each)
    if data * fsdp * tensor != len(devices):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} must be all {len(devices)} devices of the {num_hosts} "
            f"hosts: each of them computes a part"
        )
    if len(set(each.values())) > 1:
        told = ", ".join(f"host {host} {count}" for host, count in sorted(each.items()))
        raise ValueError(f"all hosts must have as many devices, and they have: {told}")
    over_data, over_fsdp = over_hosts(data, fsdp, tensor, num_hosts)
    within = (data // over_data, fsdp // over_fsdp, tensor)
    return mesh_utils.create_hybrid_device_mesh(within, (over_data, over_fsdp, 1), devices, process_is_granule=True)


def over_hosts(data: int, fsdp: int, tensor: int, num_hosts: int) -> tuple[int, int]:
    """Into how many parts hosts split data, and fsdp; a mesh that they do not split is refused."""
    over_data = math.gcd(data, num_hosts)
    over_fsdp = num_hosts // over_data
    if fsdp % over_fsdp:
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} does not split over {num_hosts} hosts: each has rows of its own, and "
            f"tensor={tensor} stays within a host"
        )
    return over_data, over_fsdp


def add_up_once(mesh: Mesh) -> None:
    """Something along every combination of axes: then all groups of devices that will compute together are known."""
    axes = [axis for axis in MESH_AXES if mesh.shape[axis] > 1]
    for group in chain.from_iterable(combinations(axes, number) for number in range(1, len(axes) + 1)):
        sum_of_places = partial(_sum_of_places, group)
        summed = jax.shard_map(sum_of_places, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False)
        jax.block_until_ready(jax.jit(summed)())


def _sum_of_places(axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.psum(jax.lax.axis_index(axes), axes)


def from_rows(array: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """The rows of all hosts as one array; each gives its own, equally many."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), array)


def own_rows(array: jax.Array) -> np.ndarray:
    """The rows of this host, of an array whose first axis alone is split."""
    if array.is_fully_addressable:
        return np.asarray(array)
    shards = {shard.index[0].start or 0: shard for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start].data) for start in sorted(shards)])


def on_host(array: jax.Array) -> np.ndarray:
    """The whole array in this host's memory. Where hosts share it, all of them must ask for it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    assert isinstance(array.sharding, NamedSharding)
    whole = NamedSharding(array.sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(_same, out_shardings=whole)(array).addressable_data(0))


def _same(array: jax.Array) -> jax.Array:
    """One function, so that XLA compiles it once for each shape and not at every publish."""
    return array


def num_row_parts(mesh: Mesh | None) -> int:
    """How many parts the rows of a batch are split into."""
    axes = ACTIVATION_AXES["b"]
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in _names(axes))


def on_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Puts a mesh in scope, for this thread; nothing for None."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def platform() -> str:
    """What the program that is being traced is for: cpu, tpu, gpu (NVIDIA's) or another.

    The devices of a mesh in scope may be of another machine than this one; without a mesh it runs here.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    nvidia = device.device_kind.startswith("NVIDIA")
    return "rocm" if device.platform == "gpu" and not nvidia else device.platform


def param_spec(path: str, num_axes: int) -> PartitionSpec:
    """The spec of a parameter by its path; leading axes without a letter (stacked layers) are not split."""
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


def shard_abstract(abstract: dict[str, jax.ShapeDtypeStruct], mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """The same shapes with the sharding each parameter gets on `mesh`; an indivisible one is named."""
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    placed = {}
    for path, leaf in abstract.items():
        spec = param_spec(path, len(leaf.shape))
        check_divisible(path, leaf.shape, spec, sizes)
        placed[path] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
    return placed


def constrain(x: jax.Array, letters: str) -> jax.Array:
    """Pins an activation's layout, e.g. "btd", on the mesh in scope (`jax.set_mesh`); does nothing without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, _spec(mesh, letters, x.shape))


def everywhere(x: jax.Array) -> jax.Array:
    """Pins a small result to all devices, so that every host can read it."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, PartitionSpec())


def per_device(work: Callable[..., Any], takes: Sequence[str], gives: Sequence[str]) -> Callable[..., Any]:
    """`work` on each device's own part of its arguments: for what needs nothing of another row or head.

    A layout, such as "btd", is that of all arrays of an argument; those of the results have no other letters. One such
    as "kernel_vd" is that of a parameter: `work` gets its shard, and gives what `sum_of_rows` makes of its gradient.
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
    """A parameter with all of its width, inside of `per_device`; what tensor splits stays split."""
    return jax.lax.all_gather(shard, "fsdp", axis=letters.index("d"), tiled=True) if _placed() else shard


def sum_of_rows(gradient: jax.Array, letters: str) -> jax.Array:
    """The shard of a parameter's gradient, inside of `per_device`, from what each device's rows add to it."""
    if not _placed():
        return gradient
    shard = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=letters.index("d"), tiled=True)
    return jax.lax.psum(shard, "data")


def sum_over_tensor(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "tensor") if _placed() else x


def max_over_tensor(x: jax.Array) -> jax.Array:
    return jax.lax.pmax(x, "tensor") if _placed() else x


def tensor_part() -> Int[Array, ""] | int:
    """The number of this device along tensor, inside of `per_device`."""
    return jax.lax.axis_index("tensor") if _placed() else 0


def _placed() -> bool:
    """Whether each device computes by itself: inside of `per_device`, on a mesh."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _letters(layout: str) -> str:
    parameter = _LAYOUT.search(layout)
    return layout if parameter is None else parameter.group(1)


def _spec(mesh: AbstractMesh, letters: str, shape: Sequence[int]) -> PartitionSpec:
    """An axis that its mesh axes do not divide stays whole: one prompt being prefilled is no batch to split."""
    axes = [ACTIVATION_AXES.get(letter) for letter in letters]
    parts = [math.prod(mesh.shape[name] for name in _names(names)) for names in axes]
    return PartitionSpec(
        *(names if size % number == 0 else None for names, size, number in zip(axes, shape, parts, strict=True))
    )


def flat_params(state: nnx.State) -> dict[str, Any]:
    """A model's parameters by their names in the weight table and in checkpoints."""
    return {param_name(path): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def param_name(path: Iterable[Any]) -> str:
    """The dotted name of a parameter at this path of a state.

    Checkpoints keep the names from before `Projection` and `VocabTable`: `attn.q.kernel_nhd` is stored as
    `attn.q_kernel_nhd`, `attn.q.lora.kernel_zd` as `attn.q_lora.kernel_zd`, and the head's table as its kernel.
    """
    name = _PROJECTION.sub(r"\1_", ".".join(map(str, path)))
    return name.replace("text.head.table_vd", "text.head.kernel_vd")


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
