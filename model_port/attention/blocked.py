"""Attention by blocks of queries, each against only the keys up to the block's end.

Saves no T x S array for the gradient. The blocks are independent, so a CPU computes them in parallel, but the compiler
also keeps all their scores at the same time. Use it for short rows.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from model_port.attention.rule import ATTENTION_OUT, MASKED, Layout, attend_mask, scores_of

BLOCK_TOKENS = 128  # a multiple of every chip's tile; smaller blocks skip more of the causal triangle …
MAX_BLOCKS = 16  # … but each block is compiled separately


def blocked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    query: Layout,
    key: Layout,
    causal: bool,
) -> Float[Array, "B T N H"]:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    mixed: Array = _blocked(grouped, k, v, query, key, causal)  # pyright: ignore[reportAssignmentType]
    return mixed.reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _blocked(q: Array, k: Array, v: Array, query: Layout, key: Layout, causal: bool) -> Array:
    return _blocked_forward(q, k, v, query, key, causal)[0]


def _blocked_forward(q: Array, k: Array, v: Array, query: Layout, key: Layout, causal: bool) -> tuple[Array, Any]:
    outs, log_sums = [], []
    for block, end in score_blocks(q.shape[1], k.shape[1], causal):
        scores = _block_scores(q[:, block], k[:, :end], query, key, block, end, causal)
        peak = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        mixed = jnp.einsum(
            "BKRTS,BSKH->BKRTH", weights.astype(v.dtype), v[:, :end], preferred_element_type=scores.dtype
        )
        outs.append((mixed / total).transpose(0, 3, 1, 2, 4).astype(v.dtype))
        log_sums.append(peak + jnp.log(total))
    both = jnp.concatenate(outs, axis=1), jnp.concatenate(log_sums, axis=3)
    out, log_sum = (checkpoint_name(x, ATTENTION_OUT) for x in both)
    return out, (q, k, v, query, key, out, log_sum)


def _blocked_backward(causal: bool, saved: Any, d_out: Array) -> tuple[Array | None, ...]:
    """dS = P * (dP - sum(dO * O)), with P recomputed from the saved log-sum-exp."""
    q, k, v, query, key, out, log_sums = saved
    d_q, d_k, d_v = [], jnp.zeros_like(k), jnp.zeros_like(v)
    for block, end in score_blocks(q.shape[1], k.shape[1], causal):
        scores = _block_scores(q[:, block], k[:, :end], query, key, block, end, causal)
        weights = jnp.exp(scores - log_sums[:, :, :, block])
        d_block = d_out[:, block]
        shared = jnp.einsum("BTKRH,BTKRH->BKRT", d_block, out[:, block], preferred_element_type=scores.dtype)
        d_weights = jnp.einsum("BTKRH,BSKH->BKRTS", d_block, v[:, :end], preferred_element_type=scores.dtype)
        d_scores = (weights * (d_weights - shared[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
        d_q.append(jnp.einsum("BKRTS,BSKH->BTKRH", d_scores, k[:, :end]))
        d_k = d_k.at[:, :end].add(jnp.einsum("BKRTS,BTKRH->BSKH", d_scores, q[:, block]))
        d_v = d_v.at[:, :end].add(jnp.einsum("BKRTS,BTKRH->BSKH", weights.astype(v.dtype), d_block))
    return jnp.concatenate(d_q, axis=1), d_k, d_v, None, None


_blocked.defvjp(_blocked_forward, _blocked_backward)


def score_blocks(num_queries: int, num_keys: int, causal: bool) -> Iterator[tuple[slice, int]]:
    """(queries, end of the keys they may attend to); rows that attend to themselves are in causal order."""
    size = BLOCK_TOKENS * max(1, -(-num_queries // (BLOCK_TOKENS * MAX_BLOCKS)))
    for first in range(0, num_queries, size):
        last = min(first + size, num_queries)
        yield slice(first, last), last if causal and num_queries == num_keys else num_keys


def _block_scores(
    q: Array, k: Array, query: Layout, key: Layout, block: slice, end: int, causal: bool
) -> Float[Array, "B K R t s"]:
    rows, columns = (Layout(*(part[:, where] for part in side)) for side, where in ((query, block), (key, slice(end))))
    return jnp.where(attend_mask(rows, columns, causal=causal)[:, None, None], scores_of(q, k), MASKED)
