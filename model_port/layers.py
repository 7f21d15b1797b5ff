"""Parts that both towers share: norms, initialization, and running a stack of layers.

A stack is one module whose parameters have a leading layer axis. `lax.scan` runs over this axis, so only one layer is
compiled. Parameters keep their dtype (float32 masters in training) and are cast where they are used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
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
LIGHTER: dict[Remat, Remat] = {"full": "attention", "attention": "dots"}  # the next policy that recomputes less


@dataclass(frozen=True)
class Compute:
    """How to compute the model. These fields only change results by rounding.

    docs/model.md describes the forms of attention and `remat`.
    """

    dtype: ComputeDtype = "float32"  # of activations; parameters keep their dtype
    attention: Form = "auto"
    remat: Remat = "none"
    lighter_layers: int = 0  # this many of the first language layers use LIGHTER[remat] instead


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
    """Casts a vector and gives it the rank of `like`, because implicit rank promotion is an error in this project."""
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
        centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + LAYER_NORM_EPS)
        return (normed * along_last(self.scale, wide) + along_last(self.bias, wide)).astype(x.dtype)


@jax.custom_vjp
def gated_silu(gate: Float[Array, "B T F"], up: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
    """Computes silu(gate) * up, and saves only the two inputs for the backward pass."""
    return jax.nn.silu(gate) * up


def _gated_silu_backward(saved: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    gate, up = saved
    sigmoid = jax.nn.sigmoid(gate)
    return d_out * up * sigmoid * (1 + gate * (1 - sigmoid)), d_out * gate * sigmoid


gated_silu.defvjp(lambda gate, up: (gated_silu(gate, up), (gate, up)), _gated_silu_backward)


def run_layers(
    layers: nnx.Module | nnx.List,
    step: Callable[[Any, Index, Carry], tuple[Carry, Any]],
    carry: Carry,
    compute: Compute,
) -> tuple[Carry, Any]:
    """Applies `carry, out = step(layer, index, carry)` to all layers, and returns the carry and the stacked outputs.

    `layers` is a stack, or the list of stacks from `split`.
    """
    if not isinstance(layers, nnx.List):
        return _run_stack(layers, 0, step, carry, compute)
    outs, first, compute = [], 0, replace(compute, lighter_layers=0)
    for stack in layers:
        carry, out = (_run_layer if num_layers(stack) == 1 else _run_stack)(stack, first, step, carry, compute)
        outs.append(out)
        first += num_layers(stack)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs)


def num_layers(stack: nnx.Module) -> int:
    return len(jax.tree.leaves(nnx.state(stack, nnx.Param))[0])


def _run_layer(
    stack: nnx.Module, index: int, step: Callable[..., Any], carry: Any, compute: Compute
) -> tuple[Any, Any]:
    """Runs a single layer without a loop. Conditions on the Python index are resolved while tracing."""
    graphdef, params = nnx.split(stack)

    def body(carry: Any, params: Any) -> tuple[Any, Any]:
        return step(nnx.merge(graphdef, params), index, carry)

    carry, out = _remat(body, compute.remat)(carry, jax.tree.map(itemgetter(0), params))
    return carry, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], out)


def _run_stack(
    stack: nnx.Module, first: int, step: Callable[..., Any], carry: Any, compute: Compute
) -> tuple[Any, Any]:
    """Scans over the layers, whose indices start at `first`; with `lighter_layers`, in two scans."""
    graphdef, params = nnx.split(stack)

    def body(carry: Any, layer: tuple[Any, jax.Array]) -> tuple[Any, Any]:
        params, index = layer
        return step(nnx.merge(graphdef, params), index, carry)

    layers, num_lighter = (params, first + jnp.arange(num_layers(stack))), compute.lighter_layers
    if not num_lighter:
        return jax.lax.scan(_remat(body, compute.remat), carry, layers)
    lighter, rest = (jax.tree.map(itemgetter(part), layers) for part in (slice(num_lighter), slice(num_lighter, None)))
    carry, outs = jax.lax.scan(_remat(body, LIGHTER[compute.remat]), carry, lighter)
    carry, more = jax.lax.scan(_remat(body, compute.remat), carry, rest)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), outs, more)


def split(stack: nnx.Module, sizes: Sequence[int]) -> nnx.List:
    """Splits a stack into stacks of `sizes` layers with separate arrays. Removes the parameters from `stack`.

    On a GPU, a program copies each layer that a loop or an index takes from a stack, but it does not copy a stack of a
    single layer. One parameter at a time is in memory twice.
    """
    graphdef, taken = nnx.graphdef(stack), nnx.pop(stack, nnx.Param)
    leaves, structure = jax.tree.flatten(taken)
    del taken
    parts = []
    while leaves:
        parts.append(_slices(leaves.pop(0), tuple(sizes)))
    return nnx.List(nnx.merge(graphdef, jax.tree.unflatten(structure, leaves)) for leaves in zip(*parts, strict=True))


@partial(jax.jit, static_argnums=1)
def _slices(stacked: Array, sizes: tuple[int, ...]) -> list[Array]:
    return jnp.split(stacked, np.cumsum(sizes)[:-1])


def only_if(condition: bool | jax.Array, change: Callable[[Carry], Carry], value: Carry) -> Carry:
    """Returns `change(value)` if the condition holds, otherwise `value`. A traced condition also skips the change."""
    if isinstance(condition, jax.Array):
        return jax.lax.cond(condition, change, lambda same: same, value)
    return change(value) if condition else value


def _remat(body: Callable[..., Any], name: Remat) -> Callable[..., Any]:
    if name == "none":
        return body
    return partial(jax.checkpoint, policy=REMAT_POLICIES[name], prevent_cse=False)(body)


def at_least_float32(x: Array) -> Array:
    """Casts 16-bit floats to float32 for sums and exponentials; wider dtypes stay unchanged."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
