"""Attention by loops over pairs of query and key blocks, in plain XLA: O(T) memory on every platform.

Pairs that the mask separates are skipped: blocks in other segments, on other branches, or later in the row.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from model_port.attention.flash import even_blocks, flash_attention, neighbors, visible_blocks
from model_port.attention.rule import (
    Keys,
    Numbers,
    Queries,
    QueryRuns,
    SoftmaxCarry,
    add_to_softmax,
    empty_softmax,
    gradient_of_scores,
    masked_scores,
    mean_and_log_sum,
)

BLOCK_TOKENS = 512  # maximum


def block_tokens(num_tokens: int, queries_per_key: int) -> int:
    return even_blocks(num_tokens, BLOCK_TOKENS, 8)


def _forward(q: Queries, k: Keys, v: Keys, runs: QueryRuns) -> tuple[Queries, Numbers]:
    size, wide = block_tokens(q.shape[1], q.shape[3]), jnp.promote_types(q.dtype, jnp.float32)
    keys_of, num_keys_of = neighbors(visible_blocks(runs, size, size).any(axis=0))

    def mix_block(i: Array) -> tuple[Array, Array]:
        q_block = _block(q, i, size)

        def add(n: Array, carry: SoftmaxCarry) -> SoftmaxCarry:
            j = keys_of[i, n]
            scores = masked_scores(q_block, _block(k, j, size), _runs(runs, j, size), i * size)
            return add_to_softmax(carry, scores, _block(v, j, size), "BKRTS,BSKH->BKRTH")

        rows, _, kv_heads, queries, head_dim = q_block.shape
        start = empty_softmax((rows, kv_heads, queries, size), head_dim, wide)
        mean, log_sum = mean_and_log_sum(lax.fori_loop(0, num_keys_of[i], add, start))
        return mean.astype(v.dtype), log_sum

    mixed, log_sum = lax.map(mix_block, jnp.arange(q.shape[1] // size))
    return jnp.einsum("nBKRtH->BntKRH", mixed).reshape(q.shape), _joined(log_sum)


def _backward(
    q: Queries, k: Keys, v: Keys, runs: QueryRuns, log_sum: Numbers, shared: Numbers, d_out: Queries
) -> tuple[Queries, Keys, Keys]:
    size, wide = block_tokens(q.shape[1], q.shape[3]), log_sum.dtype
    queries_of, num_queries_of = neighbors(visible_blocks(runs, size, size).any(axis=0).T)

    def block_gradients(d_q: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        k_block, v_block = _block(k, j, size), _block(v, j, size)

        def add(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = carry
            i = queries_of[j, n]
            q_block, d_block = _block(q, i, size), _block(d_out, i, size)
            log_sum_block, shared_block = (_block(numbers, i, size, axis=3) for numbers in (log_sum, shared))
            weights, d_scores = gradient_of_scores(
                q_block, k_block, v_block, _runs(runs, j, size), i * size, log_sum_block, shared_block, d_block
            )
            d_k += jnp.einsum("BKRTS,BTKRH->BSKH", d_scores, q_block, preferred_element_type=wide)
            d_v += jnp.einsum("BKRTS,BTKRH->BSKH", weights, d_block, preferred_element_type=wide)
            new = jnp.einsum("BKRTS,BSKH->BTKRH", d_scores, k_block, preferred_element_type=wide)
            d_q = lax.dynamic_update_slice_in_dim(d_q, _block(d_q, i, size) + new, i * size, axis=1)
            return d_q, d_k, d_v

        nothing = jnp.zeros(k_block.shape, wide)
        d_q, d_k, d_v = lax.fori_loop(0, num_queries_of[j], add, (d_q, nothing, nothing))
        return d_q, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    d_q, gradients = lax.scan(block_gradients, jnp.zeros(q.shape, wide), jnp.arange(k.shape[1] // size))
    d_k, d_v = (jnp.moveaxis(d, 0, 1).reshape(k.shape) for d in gradients)
    return d_q.astype(q.dtype), d_k, d_v


def _block(x: Array, number: Array, size: int, axis: int = 1) -> Array:
    return lax.dynamic_slice_in_dim(x, number * size, size, axis)


def _runs(runs: QueryRuns, j: Array, size: int) -> QueryRuns:
    return QueryRuns(*(_block(side, j, size) for side in runs))


def _joined(blocks: Float[Array, "n B K R t"]) -> Float[Array, "B K R T"]:
    return jnp.moveaxis(blocks, 0, 3).reshape(*blocks.shape[1:4], -1)


scanned_attention = flash_attention(_forward, _backward, block_tokens)
