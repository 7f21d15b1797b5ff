"""Shared parts of the attention forms with O(T) memory: the custom gradient, padding to blocks, and sharding.

No scores are saved. The forward pass saves the log-sum-exp of each query's scores, from which the backward pass
recomputes the attention weights. Rows and heads are independent, so each device computes its own. Both passes have
explicit shardings, so XLA does not have to derive the backward pass's sharding by transposing the forward pass.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Int

from model_port.attention.rule import ATTENTION_OUT, Layout, QueryRuns, query_runs
from model_port.sharding import per_device

Forward = Callable[[Array, Array, Array, QueryRuns], tuple[Array, Array]]  # q, k, v -> mixed values, log-sum-exp
Backward = Callable[..., tuple[Array, Array, Array]]  # q, k, v, runs, log-sum-exp, shared, d_out -> d_q, d_k, d_v
Attention = Callable[[Array, Array, Array, Layout, bool], Array]


def flash_attention(forward: Forward, backward: Backward, block_tokens: Callable[[int, int], int]) -> Attention:
    """Wraps `forward` and `backward`, which run on one device and receive rows of complete blocks.

    `block_tokens` returns the block size for a row length and a number of query heads per key/value head.
    """
    place_forward = per_device(forward, ("btkrh", "btkh", "btkh", "bt"), ("btkrh", "bkrt"))
    place_backward = per_device(
        backward, ("btkrh", "btkh", "btkh", "bt", "bkrt", "bkrt", "btkrh"), ("btkrh", "btkh", "btkh")
    )

    @jax.custom_vjp
    def mix(q: Array, k: Array, v: Array, runs: QueryRuns) -> Array:
        return save(q, k, v, runs)[0]

    def save(q: Array, k: Array, v: Array, runs: QueryRuns) -> tuple[Array, Any]:
        # Named so that a remat policy can save both, because the backward pass reads them.
        out, log_sum = (checkpoint_name(x, ATTENTION_OUT) for x in place_forward(q, k, v, runs))
        return out, (q, k, v, runs, out, log_sum)

    def differentiate(saved: Any, d_out: Array) -> tuple[Array | None, ...]:
        q, k, v, runs, out, log_sum = saved
        shared = jnp.einsum("BTKRH,BTKRH->BKRT", d_out, out, preferred_element_type=log_sum.dtype)
        return *place_backward(q, k, v, runs, log_sum, shared, d_out), None

    mix.defvjp(save, differentiate)

    def attention(q: Array, k: Array, v: Array, layout: Layout, causal: bool) -> Array:
        num_tokens = q.shape[1]
        missing = -num_tokens % block_tokens(num_tokens, q.shape[2] // k.shape[2])
        grouped, k, v = (_lengthened(x, missing) for x in (q.reshape(*k.shape[:3], -1, k.shape[3]), k, v))
        layout = Layout(*(_lengthened(part, missing) for part in layout))
        mixed: Array = mix(grouped, k, v, query_runs(layout, causal=causal))
        return mixed[:, :num_tokens].reshape(q.shape)

    return attention


def even_blocks(num_tokens: int, most: int, multiple_of: int) -> int:
    """Returns the size of the fewest equal blocks of at most `most` tokens, rounded up to a multiple."""
    return -(-num_tokens // (-(-num_tokens // most) * multiple_of)) * multiple_of


def visible_blocks(runs: QueryRuns, query_tokens: int, key_tokens: int) -> Bool[Array, "B n m"]:
    """True if a query in block i may attend to a key in block j. May also be True for some masked pairs of blocks."""
    rows, num_tokens = runs.first.shape
    lowest = runs.first.reshape(rows, -1, key_tokens).min(axis=2)[:, None]
    highest = runs.last.reshape(rows, -1, key_tokens).max(axis=2)[:, None]
    begin = jnp.arange(0, num_tokens, query_tokens)[None, :, None]
    return (lowest < begin + query_tokens) & (highest >= begin)


def neighbors(needed: Bool[Array, "*b n m"]) -> tuple[Int[Array, "*b n m"], Int[Array, "*b n"]]:
    """Returns for each block all block numbers, needed blocks first and in order, and the number of needed blocks."""
    return jnp.argsort(~needed, axis=-1, stable=True).astype(jnp.int32), needed.sum(axis=-1, dtype=jnp.int32)


def _lengthened(x: Array, missing: int) -> Array:
    """Adds padding tokens at the end."""
    return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2))) if missing else x
