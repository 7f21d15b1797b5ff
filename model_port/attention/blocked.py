"""Attention in blocks of queries, each against only the keys up to the block's end.

The blocks are independent, so a CPU computes them in parallel, but the compiler also keeps all their scores in memory
at the same time. Use this form for short rows.
"""

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from model_port.attention.flash import flash_attention
from model_port.attention.rule import (
    Keys,
    Layout,
    Numbers,
    Queries,
    QueryRuns,
    add_to_softmax,
    empty_softmax,
    gradient_of_scores,
    masked_scores,
    mean_and_log_sum,
)

BLOCK_TOKENS = 128  # a multiple of every chip's tile; smaller blocks would skip more of the causal triangle
MAX_BLOCKS = 16  # because each block is compiled separately


def blocked_attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], layout: Layout, causal: bool
) -> Float[Array, "B T N H"]:
    return (_causal if causal else _full)(q, k, v, layout, causal)


def _forward(q: Queries, k: Keys, v: Keys, runs: QueryRuns, *, causal: bool) -> tuple[Queries, Numbers]:
    means, log_sums = [], []
    for block, end in score_blocks(q.shape[1], causal):
        scores = masked_scores(q[:, block], k[:, :end], _cut(runs, end), block.start)
        start = empty_softmax(scores.shape[:-1], q.shape[-1], scores.dtype)
        softmax = add_to_softmax(start, scores, v[:, :end], "BKRTS,BSKH->BKRTH")
        mean, log_sum = mean_and_log_sum(softmax)
        means.append(mean.astype(v.dtype))
        log_sums.append(log_sum)
    return jnp.einsum("BKRTH->BTKRH", jnp.concatenate(means, axis=3)), jnp.concatenate(log_sums, axis=3)


def _backward(
    q: Queries, k: Keys, v: Keys, runs: QueryRuns, log_sum: Numbers, shared: Numbers, d_out: Queries, *, causal: bool
) -> tuple[Queries, Keys, Keys]:
    d_q, d_k, d_v = [], jnp.zeros_like(k), jnp.zeros_like(v)
    for block, end in score_blocks(q.shape[1], causal):
        block_inputs = log_sum[..., block], shared[..., block], d_out[:, block]
        weights, d_scores = gradient_of_scores(
            q[:, block], k[:, :end], v[:, :end], _cut(runs, end), block.start, *block_inputs
        )
        d_q.append(jnp.einsum("BKRTS,BSKH->BKRTH", d_scores, k[:, :end]))
        d_k = d_k.at[:, :end].add(jnp.einsum("BKRTS,BTKRH->BSKH", d_scores, q[:, block]))
        d_v = d_v.at[:, :end].add(jnp.einsum("BKRTS,BTKRH->BSKH", weights, d_out[:, block]))
    # Transposed at the end, because in the products XLA on a CPU would transpose the scores and compute them twice.
    return jnp.einsum("BKRTH->BTKRH", jnp.concatenate(d_q, axis=3)), d_k, d_v


def _cut(runs: QueryRuns, end: int) -> QueryRuns:
    return QueryRuns(*(side[:, :end] for side in runs))


def score_blocks(num_tokens: int, causal: bool) -> Iterator[tuple[slice, int]]:
    """Yields each block of queries, and the end of the keys that it may attend to."""
    size = BLOCK_TOKENS * max(1, -(-num_tokens // (BLOCK_TOKENS * MAX_BLOCKS)))
    for first in range(0, num_tokens, size):
        last = min(first + size, num_tokens)
        yield slice(first, last), last if causal else num_tokens


_causal, _full = (
    flash_attention(partial(_forward, causal=causal), partial(_backward, causal=causal), lambda *_: 1)
    for causal in (True, False)
)
