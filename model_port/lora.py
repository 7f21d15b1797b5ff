"""Projections of both towers. Those in the language layers may have low-rank adapters (LoRA, arXiv 2106.09685).

A projection computes W x, and its adapter adds alpha / rank · B (A x); the product B A is never computed. A is
initialized randomly and B with zeros, so a new adapter does not change the model's output. A and B are stacked over
layers like the kernel and named by their axes: for the kernel `q_kernel_nhd`, A is `q_lora.kernel_zd` and B is
`q_lora.kernel_nhz`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from model_port.architecture import TextConfig, VisionConfig
from model_port.layers import cast, gated_silu, normal, zeros
from model_port.sharding import constrain


class LowRank(nnx.Module):
    """The matrices A and B of one stacked kernel."""

    def __init__(self, layout: str, a: Any, b: Any, scale: float):
        """`layout` has the kernel's axes, for example "nhd"."""
        self.written, self.read = layout_sides(layout)
        self.scale = scale
        setattr(self, f"kernel_z{self.read}", nnx.LoRAParam(a))
        setattr(self, f"kernel_{self.written}z", nnx.LoRAParam(b))

    def __call__(self, x: Float[Array, "B T *read"]) -> Float[Array, "B T *written"]:
        read, written = self.read.upper(), self.written.upper()
        a, b = getattr(self, f"kernel_z{self.read}"), getattr(self, f"kernel_{self.written}z")
        inner = constrain(jnp.einsum(f"BT{read},Z{read}->BTZ", x, cast(a, x)), "btz")
        return jnp.einsum(f"BTZ,{written}Z->BT{written}", self.scale * inner, cast(b, x))


def layout_sides(layout: str) -> tuple[str, str]:
    """Splits a kernel's layout into its output axes and its input axes. One side is always the width."""
    return ("d", layout[1:]) if layout.startswith("d") else (layout[:-1], layout[-1])


class Projection(nnx.Module):
    """A stacked kernel with an optional bias and an optional adapter."""

    lora: LowRank | None = None

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
        if hasattr(self, "bias"):
            product = product + cast(self.bias, x)[None, None]
        return product if self.lora is None else product + self.lora(x)


class GatedMlp(nnx.Module):
    """The dense MLPs of a stack's layers: down(silu(gate) * up)."""

    def __init__(self, config: TextConfig | VisionConfig, scale: float, rngs: nnx.Rngs, *, bias: bool = False):
        layers, width, ffn = config.num_layers, config.width, config.ffn_width
        self.gate = Projection("fd", (layers, ffn, width), scale, rngs, bias=bias)
        self.up = Projection("fd", (layers, ffn, width), scale, rngs, bias=bias)
        self.down = Projection("df", (layers, width, ffn), scale, rngs, bias=bias)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = constrain(x, "btd")
        gate, up = (constrain(projection(x), "btf") for projection in (self.gate, self.up))
        return self.down(gated_silu(gate, up))


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
