"""How parameters and activations lie on a mesh with the axes data, fsdp and tensor.

A parameter's name ends in its axis letters (`q_kernel_nhd`), each letter has one mesh axis, so the name is the spec.
Batches split over data and fsdp together; fsdp also splits every kernel along the model width, tensor along heads, ffn
and vocabulary. Scales and biases are small and live on every device.
"""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

PARAM_AXES: dict[str, str | None] = {
    "v": "tensor",  # vocabulary
    "n": "tensor",  # query heads
    "k": "tensor",  # key/value heads
    "f": "tensor",  # ffn
    "d": "fsdp",  # width
    "h": None,  # head dim
    "c": None,  # values of a patch; also the three of q, k, v
    "s": None,  # learned positions
}
ACTIVATION_AXES: dict[str, tuple[str, ...] | str | None] = {
    "b": ("data", "fsdp"),
    "n": "tensor",
    "k": "tensor",
    "f": "tensor",
    "v": "tensor",
}
_LAYOUT = re.compile(r"(?:kernel|table)_([a-z]+)$")


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Any = None) -> Mesh:
    """A mesh whose axes XLA propagates through (Auto); our constraints name only what it must not guess."""
    devices = jax.devices() if devices is None else devices
    wanted = data * fsdp * tensor
    if wanted > len(devices):
        raise ValueError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} needs {wanted} devices, there are {len(devices)}"
        )
    return jax.make_mesh((data, fsdp, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:wanted])


def on_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Puts a mesh in scope, for this thread; nothing for None."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def platform_in_scope() -> str:
    """That of the mesh in scope, which may be of devices that are not here; without one, that of this process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


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


def per_device(work: Callable[..., Any], takes: Sequence[str], gives: Sequence[str]) -> Callable[..., Any]:
    """`work` on each device's own part of its arguments: for what needs nothing of another row or head.

    A layout, such as "btd", is that of all arrays of an argument; those of the results have no other letters.
    """

    def placed(*arguments: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return work(*arguments)
        sizes: dict[str, int] = {}
        for letters, argument in zip(takes, arguments, strict=True):
            sizes |= zip(letters, jax.tree.leaves(argument)[0].shape, strict=True)
        in_specs, out_specs = (
            tuple(_spec(mesh, letters, [sizes[letter] for letter in letters]) for letters in side)
            for side in (takes, gives)
        )
        return jax.shard_map(work, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*arguments)

    return placed


def _spec(mesh: AbstractMesh, letters: str, shape: Sequence[int]) -> PartitionSpec:
    """An axis that its mesh axes do not divide stays whole: one prompt being prefilled is no batch to split."""
    axes = [ACTIVATION_AXES.get(letter) for letter in letters]
    parts = [math.prod(mesh.shape[name] for name in _names(names)) for names in axes]
    return PartitionSpec(
        *(names if size % number == 0 else None for names, size, number in zip(axes, shape, parts, strict=True))
    )


def flat_params(state: nnx.State) -> dict[str, Any]:
    """{dotted path: array} of a model's parameters, the form that the weight table and checkpoints speak."""
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry
