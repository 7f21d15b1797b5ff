"""Attention by one pair of query and key blocks after the other, in plain XLA: O(T) memory on every platform.

Skips pairs of blocks that the mask separates: in another segment, on another branch, or later in the row.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from model_port.attention.flash import TINY, even_blocks, flash_attention, neighbors, visible_blocks
from model_port.attention.rule import MASKED, QueryRuns, SoftmaxCarry, add_to_softmax, empty_softmax, scores_of

BLOCK_TOKENS = 512  # maximum


def block_tokens(num_tokens: int, queries_per_key: int) -> int:
    return even_blocks(num_tokens, BLOCK_TOKENS, 8)


def _forward(
    q: Float[Array, "B T K R H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], runs: QueryRuns
) -> tuple[Float[Array, "B T K R H"], Float[Array, "B K R T"]]:
    size, wide = block_tokens(q.shape[1], q.shape[3]), jnp.promote_types(q.dtype, jnp.float32)
    keys_of, num_keys_of = neighbors(visible_blocks(runs, size, size).any(axis=0))

    def of_queries(i: Array) -> tuple[Array, Array]:
        q_block = _block(q, i, size)

        def add(n: Array, carry: SoftmaxCarry) -> SoftmaxCarry:
            j = keys_of[i, n]
            scores = jnp.where(_visible(runs, i, j, size), scores_of(q_block, _block(k, j, size)), MASKED)
            return add_to_softmax(carry, scores, _block(v, j, size), "BKRTS,BSKH->BKRTH")

        rows, _, kv_heads, queries, head_dim = q_block.shape
        start = empty_softmax((rows, kv_heads, queries, size), head_dim, wide)
        peak, total, mixed = lax.fori_loop(0, num_keys_of[i], add, start)
        total = jnp.maximum(total, TINY)
        return (mixed / total[..., None]).astype(v.dtype), peak + jnp.log(total)

    mixed, log_sum = lax.map(of_queries, jnp.arange(q.shape[1] // size))
    return jnp.einsum("nBKRtH->BntKRH", mixed).reshape(q.shape), _joined(log_sum)


def _backward(
    q: Float[Array, "B T K R H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    runs: QueryRuns,
    log_sum: Float[Array, "B K R T"],
    shared: Float[Array, "B K R T"],
    d_out: Float[Array, "B T K R H"],
) -> tuple[Float[Array, "B T K R H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """dS = P * (dP - sum(dO * O)), with P recomputed from the log-sum-exp."""
    size, wide = block_tokens(q.shape[1], q.shape[3]), log_sum.dtype
    queries_of, num_queries_of = neighbors(visible_blocks(runs, size, size).any(axis=0).T)

    def of_keys(d_q: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        k_block, v_block = _block(k, j, size), _block(v, j, size)

        def add(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = carry
            i = queries_of[j, n]
            q_block, d_block = _block(q, i, size), _block(d_out, i, size)
            weights = jnp.exp(scores_of(q_block, k_block) - _block(log_sum, i, size, axis=3)[..., None])
            weights = jnp.where(_visible(runs, i, j, size), weights, 0.0)
            d_weights = jnp.einsum("BTKRH,BSKH->BKRTS", d_block, v_block, preferred_element_type=wide)
            d_scores = weights * (d_weights - _block(shared, i, size, axis=3)[..., None]) * q.shape[-1] ** -0.5
            d_scores, weights = d_scores.astype(q.dtype), weights.astype(q.dtype)
            d_k += jnp.einsum("BKRTS,BTKRH->BSKH", d_scores, q_block, preferred_element_type=wide)
            d_v += jnp.einsum("BKRTS,BTKRH->BSKH", weights, d_block, preferred_element_type=wide)
            new = jnp.einsum("BKRTS,BSKH->BTKRH", d_scores, k_block, preferred_element_type=wide)
            d_q = lax.dynamic_update_slice_in_dim(d_q, _block(d_q, i, size) + new, i * size, axis=1)
            return d_q, d_k, d_v

        nothing = jnp.zeros(k_block.shape, wide)
        d_q, d_k, d_v = lax.fori_loop(0, num_queries_of[j], add, (d_q, nothing, nothing))
        return d_q, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    d_q, of_blocks = lax.scan(of_keys, jnp.zeros(q.shape, wide), jnp.arange(k.shape[1] // size))
    d_k, d_v = (jnp.moveaxis(d, 0, 1).reshape(k.shape) for d in of_blocks)
    return d_q.astype(q.dtype), d_k, d_v


def _block(x: Array, number: Array, size: int, axis: int = 1) -> Array:
    return lax.dynamic_slice_in_dim(x, number * size, size, axis)


def _visible(runs: QueryRuns, i: Array, j: Array, size: int) -> Bool[Array, "B 1 1 t s"]:
    query = (i * size + jnp.arange(size))[None, :, None]
    first, last = (_block(side, j, size)[:, None] for side in runs)
    return ((first <= query) & (query <= last))[:, None, None]


def _joined(blocks: Float[Array, "n B K R t"]) -> Float[Array, "B K R T"]:
    return jnp.moveaxis(blocks, 0, 3).reshape(*blocks.shape[1:4], -1)


scanned_attention = flash_attention(_forward, _backward, block_tokens)
