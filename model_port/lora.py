"""Projections of both towers. Those in the language layers may have low-rank adapters (LoRA, arXiv 2106.09685).

A projection computes W x, and its adapter adds alpha / rank · B (A x); the product B A is never computed. A is
initialized randomly and B with zeros, so a new adapter does not change the model's output. A and B are stacked over
layers like the kernel and named by their axes: for the kernel `q_kernel_nhd`, A is `q_lora.kernel_zd` and B is
`q_lora.kernel_nhz`.

For sampling on GPUs, the projections of an input and their adapters are joined into two matrix products.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.linalg import block_diag
from jaxtyping import Array, Float

from model_port.architecture import TextConfig, VisionConfig
from model_port.layers import at_least_float32, cast, gated_silu, normal, zeros
from model_port.sharding import constrain


class LowRank(nnx.Module):
    """The matrices A and B of one stacked kernel."""

    def __init__(self, layout: str, a: Any, b: Any, scale: float):
        """`layout` has the kernel's axes, for example "nhd"."""
        self.written, self.read = layout_sides(layout)
        self.scale = scale
        setattr(self, f"kernel_z{self.read}", nnx.LoRAParam(a))
        setattr(self, f"kernel_{self.written}z", nnx.LoRAParam(b))

    @property
    def pair(self) -> tuple[nnx.Param, nnx.Param]:
        return getattr(self, f"kernel_z{self.read}"), getattr(self, f"kernel_{self.written}z")

    def __call__(self, x: Float[Array, "B T *read"]) -> Float[Array, "B T *written"]:
        read, written = self.read.upper(), self.written.upper()
        a, b = self.pair
        inner = constrain(jnp.einsum(f"BT{read},Z{read}->BTZ", x, cast(a, x)), "btz")
        return jnp.einsum(f"BTZ,{written}Z->BT{written}", self.scale * inner, cast(b, x))


def layout_sides(layout: str) -> tuple[str, str]:
    """Splits a kernel's layout into its output axes and its input axes. One side is always the width."""
    return ("d", layout[1:]) if layout.startswith("d") else (layout[:-1], layout[-1])


class Projection(nnx.Module):
    """A stacked kernel with an optional bias and an optional adapter."""

    lora: LowRank | None = None
    joined: "Joined | None" = None

    def __init__(self, layout: str, shape: tuple[int, ...], scale: float, rngs: nnx.Rngs, *, bias: bool = False):
        """`layout` names the axes after the layer axis, outputs first, for example "nhd"."""
        self.layout = layout
        setattr(self, f"kernel_{layout}", normal(rngs, shape, scale))
        if bias:
            self.bias = zeros(shape[: -len(layout_sides(layout)[1])])

    def __call__(self, x: Float[Array, "B T *inputs"]) -> Float[Array, "B T *outputs"]:
        outputs, inputs = (side.upper() for side in layout_sides(self.layout))
        kernel = cast(getattr(self, f"kernel_{self.layout}"), x)
        # `project` saves x for the kernel's gradient, which a frozen kernel does not need.
        product = (project if self.lora is None else _product)(inputs, outputs, x, kernel)
        product = self.add_bias(product)
        return product if self.lora is None else product + self.lora(x)

    def add_bias(self, product: Float[Array, "B T *outputs"]) -> Float[Array, "B T *outputs"]:
        return product + cast(self.bias, product)[None, None] if hasattr(self, "bias") else product


class Joined(nnx.Module):
    """A layer's projections of the same input, and their adapters, as two matrix products.

    The kernel has the rows of all kernels and then all A matrices. B is block-diagonal and includes the scale. If
    tensor splits the outputs, each of its `parts` has its own rows of the kernels and of B, and all of A.
    """

    def __init__(self, projections: Sequence[Projection], parts: int):
        """Moves the kernels and adapters out of the projections of a single layer."""
        self.read = layout_sides(projections[0].layout)[1]
        self.parts, axis = (parts, "n") if self.read == "d" else (1, "p")  # n is split over tensor
        self.layout = f"l{axis}r{self.read}"
        kernels = [getattr(projection, f"kernel_{projection.layout}")[...] for projection in projections]
        self.shapes = tuple(kernel.shape[1 : -len(self.read)] for kernel in kernels)
        rank = sum(lora.pair[0].shape[1] for lora in _adapters(projections))
        self.kernel = nnx.Param(_with_room(kernels, rank, self.parts, self.layout))
        self.load(projections, 0)
        for projection in projections:
            delattr(projection, f"kernel_{projection.layout}")
            projection.lora = None
        projections[0].joined = self

    def load(self, projections: Sequence[Projection], layer: int) -> None:
        """Takes the adapters of a layer of `projections`. Overwrites the kernel's array."""
        adapters = _adapters(projections)
        a, b = zip(*([matrix[...] for matrix in lora.pair] for lora in adapters), strict=True)
        kernel, b = _with_adapters(self.kernel[...], a, b, adapters[0].scale, layer, self.layout)
        self.kernel, self.b = nnx.Param(kernel), nnx.Param(b)

    def __call__(self, x: Float[Array, "B T *read"]) -> list[Float[Array, "B T *written"]]:
        read = self.read.upper()
        product = jnp.einsum(f"BT{read},PR{read}->BTPR", x, cast(self.kernel, x))
        product = constrain(product, "bt" + self.layout[1:3])
        *ends, rows = accumulate(prod(shape) // self.parts for shape in self.shapes)
        outputs = product[..., :rows] + jnp.einsum("BTPZ,PRZ->BTPR", product[..., rows:], cast(self.b, x))
        separate = zip(jnp.split(outputs, ends, axis=-1), self.shapes, strict=True)
        return [output.reshape(*x.shape[:2], *shape) for output, shape in separate]


def _adapters(projections: Sequence[Projection]) -> list[LowRank]:
    return [projection.lora for projection in projections if projection.lora is not None]


@partial(jax.jit, static_argnums=(1, 2, 3))
def _with_room(kernels: Sequence[Array], rank: int, parts: int, layout: str) -> Array:
    """Concatenates kernels, with room for matrices A of this total rank."""
    read = kernels[0].shape[3 - len(layout) :]
    rows = [kernel.reshape(1, parts, -1, *read) for kernel in kernels]
    return constrain(jnp.concatenate([*rows, jnp.zeros((1, parts, rank, *read), rows[0].dtype)], axis=2), layout)


@partial(jax.jit, static_argnums=5, donate_argnums=0)
def _with_adapters(
    kernel: Array, a: Sequence[Array], b: Sequence[Array], scale: float, layer: int, layout: str
) -> tuple[Array, Array]:
    """Writes the matrices A of a layer into the kernel, and returns it and B."""
    rows = jnp.concatenate([matrix[layer] for matrix in a]).astype(kernel.dtype)
    rows = jnp.broadcast_to(rows, (1, kernel.shape[1], *rows.shape))
    kernel = jax.lax.dynamic_update_slice_in_dim(kernel, rows, kernel.shape[2] - rows.shape[2], axis=2)
    scaled = [(scale * at_least_float32(matrix[layer])).astype(kernel.dtype) for matrix in b]
    blocks = jax.vmap(block_diag)(*(matrix.reshape(kernel.shape[1], -1, matrix.shape[-1]) for matrix in scaled))
    return constrain(kernel, layout), constrain(blocks[None], layout[:3] + "z")


def project_all(x: Float[Array, "B T *inputs"], *projections: Projection) -> list[Float[Array, "B T *outputs"]]:
    """Applies all projections to an input that has no other projections."""
    joined = projections[0].joined
    if joined is None:
        return [projection(x) for projection in projections]
    return [projection.add_bias(output) for projection, output in zip(projections, joined(x), strict=True)]


class GatedMlp(nnx.Module):
    """The dense MLPs of a stack's layers: down(silu(gate) * up)."""

    def __init__(self, config: TextConfig | VisionConfig, scale: float, rngs: nnx.Rngs, *, bias: bool = False):
        layers, width, ffn = config.num_layers, config.width, config.ffn_width
        self.gate = Projection("fd", (layers, ffn, width), scale, rngs, bias=bias)
        self.up = Projection("fd", (layers, ffn, width), scale, rngs, bias=bias)
        self.down = Projection("df", (layers, width, ffn), scale, rngs, bias=bias)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = constrain(x, "btd")
        gate, up = (constrain(output, "btf") for output in project_all(x, self.gate, self.up))
        return project_all(gated_silu(gate, up), self.down)[0]


def _product(inputs: str, outputs: str, x: Array, kernel: Array) -> Array:
    return jnp.einsum(f"BT{inputs},{outputs}{inputs}->BT{outputs}", x, kernel)


project = jax.custom_vjp(_product, nondiff_argnums=(0, 1))


def _project_forward(inputs: str, outputs: str, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(inputs, outputs, x, kernel), (x, kernel)


def _project_backward(inputs: str, outputs: str, saved: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, kernel = saved
    d_x = jnp.einsum(f"BT{outputs},{outputs}{inputs}->BT{inputs}", d_out, kernel)
    # In this order, XLA on a CPU transposes x, which is in memory. Otherwise it would compute d_out column by column.
    d_kernel = jnp.einsum(f"BT{inputs},BT{outputs}->{inputs}{outputs}", x, d_out)
    order = range(d_kernel.ndim)
    return d_x, jnp.transpose(d_kernel, (*order[len(inputs) :], *order[: len(inputs)]))


project.defvjp(_project_forward, _project_backward)


@jax.jit
def merged(
    kernel: Float[Array, "out in"], a: Float[Array, "z in"], b: Float[Array, "out z"], scale: Float[Array, ""] | float
) -> Float[Array, "out in"]:
    """Computes W + scale · B A for one tensor, in at least float32."""
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    return kernel.astype(wide) + scale * jnp.matmul(b, a, precision="highest").astype(wide)
