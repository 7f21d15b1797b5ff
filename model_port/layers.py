"""Parts that both towers share: norms, initialization, and running a stack of layers.

A stack is one module whose parameters have a leading layer axis. `lax.scan` runs over it, so only one layer is
compiled. Parameters keep their own dtype (float32 masters in training) and are cast where they are used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from model_port.attention import ATTENTION_OUT, Form

Carry = TypeVar("Carry")
Index = int | jax.Array

LAYER_INPUT = "layer_input"
LAYER_NORM_EPS = 1e-6

ComputeDtype = Literal["float32", "bfloat16", "float16", "float64"]
Remat = Literal["none", "full", "dots", "attention", "offload"]

_save_attention = jax.checkpoint_policies.save_only_these_names(ATTENTION_OUT)
# The activations saved for the backward pass; all others are recomputed.
REMAT_POLICIES: dict[Remat, Callable[..., Any] | None] = {
    "none": None,  # no recomputation: everything is saved
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _save_attention
    ),
    "attention": _save_attention,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
LIGHTER: dict[Remat, Remat] = {"full": "attention", "attention": "dots"}  # the next that repeats fewer products


@dataclass(frozen=True)
class Compute:
    """How the model is computed. None of these fields changes a result beyond rounding."""

    dtype: ComputeDtype = "float32"  # of activations; parameters keep their own
    attention: Form = "auto"
    remat: Remat = "none"
    lighter_layers: int = 0  # of the first language layers, which recompute less: as LIGHTER[remat]


DEFAULT_COMPUTE = Compute()


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float) -> nnx.Param:
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape, jnp.float32))


def ones(shape: tuple[int, ...]) -> nnx.Param:
    return nnx.Param(jnp.ones(shape, jnp.float32))


def zeros(shape: tuple[int, ...]) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, jnp.float32))


def cast(param: nnx.Param, like: Array) -> Array:
    return param[...].astype(like.dtype)


def along_last(param: nnx.Param, like: Array) -> Array:
    """A vector, cast, with the rank of `like`, because implicit rank promotion is an error in this project."""
    return cast(param, like).reshape((1,) * (like.ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    def __init__(self, shape: tuple[int, ...], eps: float):
        self.scale = ones(shape)
        self.eps = eps

    def __call__(self, x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        wide = at_least_float32(x)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return along_last(self.scale, x) * normed.astype(x.dtype)


class LayerNorm(nnx.Module):
    def __init__(self, shape: tuple[int, ...]):
        self.scale = ones(shape)
        self.bias = zeros(shape)

    def __call__(self, x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        wide = at_least_float32(x)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + LAYER_NORM_EPS)
        return (normed * along_last(self.scale, wide) + along_last(self.bias, wide)).astype(x.dtype)


@jax.custom_vjp
def gated_silu(gate: Float[Array, "B T F"], up: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
    """silu(gate) * up, with only the two inputs saved for the backward pass."""
    return jax.nn.silu(gate) * up


def _gated_silu_forward(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return gated_silu(gate, up), (gate, up)


def _gated_silu_backward(saved: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    gate, up = saved
    opened = jax.nn.sigmoid(gate)
    return d_out * up * opened * (1 + gate * (1 - opened)), d_out * gate * opened


gated_silu.defvjp(_gated_silu_forward, _gated_silu_backward)


def run_layers(
    stack: nnx.Module | nnx.List,
    num_layers: int,
    step: Callable[[Any, Index, Carry], tuple[Carry, Any]],
    carry: Carry,
    compute: Compute,
) -> tuple[Carry, Any]:
    """Applies `carry, out = step(layer, index, carry)` to all layers; the outputs are returned stacked.

    Layers that are `unstacked`, which is for sampling, run unrolled and without rematerialization.
    """
    if isinstance(stack, nnx.List):
        outs = []
        for index, layer in enumerate(stack):  # a Python number, so that conditions on it are resolved while tracing
            carry, out = step(layer, index, carry)
            outs.append(out)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)
    graphdef, params = nnx.split(stack)

    def body(carry: Carry, layer: tuple[Any, Index]) -> tuple[Carry, Any]:
        layer_params, index = layer
        return step(nnx.merge(graphdef, layer_params), index, carry)

    return _scan_parts(body, carry, (params, jnp.arange(num_layers)), compute)


def _scan_parts(body: Callable[..., Any], carry: Any, layers: Any, compute: Compute) -> tuple[Any, Any]:
    """One scan over all layers, or one over those that recompute less and one over the others."""
    num_lighter = compute.lighter_layers
    if not num_lighter:
        return jax.lax.scan(_remat(body, compute.remat), carry, layers)
    first, rest = (jax.tree.map(itemgetter(part), layers) for part in (slice(num_lighter), slice(num_lighter, None)))
    carry, outs = jax.lax.scan(_remat(body, LIGHTER[compute.remat]), carry, first)
    carry, more = jax.lax.scan(_remat(body, compute.remat), carry, rest)
    return carry, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), outs, more)


def unstacked(stack: nnx.Module, num_layers: int) -> nnx.List:
    """A module per layer, with arrays of its own: for GPUs, where a program copies each slice of stacked parameters.

    The arrays of one parameter are made together, so the parameters that exist twice are never more than that.
    """
    graphdef, params = nnx.split(stack)
    leaves, structure = jax.tree.flatten(params)
    sliced = [_slices(leaf) for leaf in leaves]
    return nnx.List(
        nnx.merge(graphdef, jax.tree.unflatten(structure, [slices[index] for slices in sliced]))
        for index in range(num_layers)
    )


@jax.jit
def _slices(stacked: Array) -> tuple[Array, ...]:
    return tuple(stacked)


def only_if(condition: bool | jax.Array, change: Callable[[Carry], Carry], value: Carry) -> Carry:
    """`change(value)` if the condition holds, else `value`; skips the change even if the condition is traced."""
    if isinstance(condition, jax.Array):
        return jax.lax.cond(condition, change, lambda same: same, value)
    return change(value) if condition else value


def _remat(body: Callable[..., Any], name: Remat) -> Callable[..., Any]:
    if name == "none":
        return body
    return partial(jax.checkpoint, policy=REMAT_POLICIES[name], prevent_cse=False)(body)


def at_least_float32(x: Array) -> Array:
    """Casts 16-bit floats to float32 for sums and exponentials; wider dtypes stay."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
