"""What forms of attention with O(T) memory have in common: the rule of the gradient, whole blocks, a place on a mesh.

No scores are kept. The forward pass hands on the log-sum-exp of each query's scores, from which the backward pass
computes its weights again. Rows and heads need nothing of one another, so each device works on its own; both passes are
put on the mesh by themselves, and nothing is left for a transposition to guess.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Int

from model_port.attention.rule import ATTENTION_OUT, Layout, Seen, seen_by
from model_port.sharding import per_device

Forward = Callable[[Array, Array, Array, Seen], tuple[Array, Array]]  # q, k, v -> mixed values, log-sum-exp
Backward = Callable[..., tuple[Array, Array, Array]]  # q, k, v, seen, log-sum-exp, shared, d_out -> d_q, d_k, d_v
Attention = Callable[[Array, Array, Array, Layout, bool], Array]
TINY = 1e-37  # a divisor where a query sees no key at all


def flash_attention(forward: Forward, backward: Backward, block_tokens: Callable[[int, int], int]) -> Attention:
    """`forward` and `backward` get whole blocks, on one device.

    `block_tokens` says of how many tokens, for a row of so many and so many query heads that share a key.
    """
    place_forward = per_device(forward, ("btkrh", "btkh", "btkh", "bt"), ("btkrh", "bkrt"))
    place_backward = per_device(
        backward, ("btkrh", "btkh", "btkh", "bt", "bkrt", "bkrt", "btkrh"), ("btkrh", "btkh", "btkh")
    )

    @jax.custom_vjp
    def mix(q: Array, k: Array, v: Array, seen: Seen) -> Array:
        return save(q, k, v, seen)[0]

    def save(q: Array, k: Array, v: Array, seen: Seen) -> tuple[Array, Any]:
        # Named in here: what the backward pass reads is what a remat policy can save.
        out, log_sum = (checkpoint_name(x, ATTENTION_OUT) for x in place_forward(q, k, v, seen))
        return out, (q, k, v, seen, out, log_sum)

    def differentiate(saved: Any, d_out: Array) -> tuple[Array | None, ...]:
        q, k, v, seen, out, log_sum = saved
        shared = jnp.einsum("BTKRH,BTKRH->BKRT", d_out, out, preferred_element_type=log_sum.dtype)
        return *place_backward(q, k, v, seen, log_sum, shared, d_out), None

    mix.defvjp(save, differentiate)

    def attention(q: Array, k: Array, v: Array, layout: Layout, causal: bool) -> Array:
        num_tokens = q.shape[1]
        missing = -num_tokens % block_tokens(num_tokens, q.shape[2] // k.shape[2])
        grouped, k, v = (_lengthened(x, missing) for x in (q.reshape(*k.shape[:3], -1, k.shape[3]), k, v))
        layout = Layout(*(_lengthened(part, missing) for part in layout))
        mixed: Array = mix(grouped, k, v, seen_by(layout, causal=causal))  # pyright: ignore[reportAssignmentType]
        return mixed[:, :num_tokens].reshape(q.shape)

    return attention


def even_blocks(num_tokens: int, most: int, multiple_of: int) -> int:
    """The size of the fewest equal blocks of at most so many tokens, rounded up to a multiple."""
    return -(-num_tokens // (-(-num_tokens // most) * multiple_of)) * multiple_of


def seen_blocks(seen: Seen, query_tokens: int, key_tokens: int) -> Bool[Array, "B n m"]:
    """True where some query of the i-th block may see a key of the j-th, or may not: no two that see are left out."""
    rows, num_tokens = seen.first.shape
    lowest = seen.first.reshape(rows, -1, key_tokens).min(axis=2)[:, None]
    highest = seen.last.reshape(rows, -1, key_tokens).max(axis=2)[:, None]
    begin = jnp.arange(0, num_tokens, query_tokens)[None, :, None]
    return (lowest < begin + query_tokens) & (highest >= begin)


def partners(wanted: Bool[Array, "*b n m"]) -> tuple[Int[Array, "*b n m"], Int[Array, "*b n"]]:
    """For each block those that it needs, in order and before all others; and how many these are."""
    return jnp.argsort(~wanted, axis=-1, stable=True).astype(jnp.int32), wanted.sum(axis=-1, dtype=jnp.int32)


def _lengthened(x: Array, missing: int) -> Array:
    """By tokens of padding."""
    return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2))) if missing else x
