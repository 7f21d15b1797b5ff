"""Attention as Pallas kernels for TPU, wrapped by `flash`.

The grid covers rows, key/value heads and the unmasked pairs of blocks (`tpu_walk`). All pairs of a block are
consecutive, so the accumulators stay on the chip.

A tile of scores has one line per key and one lane per query. The queries of all heads that share the key are side by
side, so keys and values are loaded once for these heads, and one value per query, such as its peak score, takes one
lane. There are three kernels:

    kernel    all pairs of a block of   loads for each pair               accumulates
    forward   queries                   keys, values                      mixed values, peak and sum
    queries   queries                   keys, values                      gradient of the queries
    keys      keys                      queries, gradient of the output   gradients of keys and values
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from model_port.attention.flash import flash_attention
from model_port.attention.products import BY_KEYS, BY_QUERIES, FORWARD, NN, NT, TN, product
from model_port.attention.rule import MASKED, TINY, Keys, Numbers, Queries, QueryRuns
from model_port.attention.tpu_walk import Pair, Walk, block_tokens


def forward(q: Queries, k: Keys, v: Keys, runs: QueryRuns) -> tuple[Queries, Numbers]:
    walk = Walk.of(q, runs, by_keys=False)
    inputs, results = [("queries", q), ("keys", k), ("keys", v)], [("queries", q.dtype), ("numbers", walk.wide)]
    return walk(_forward, FORWARD, inputs, results, [(1, walk.lanes), (1, walk.lanes), (walk.head_dim, walk.lanes)])


def backward(
    q: Queries, k: Keys, v: Keys, runs: QueryRuns, log_sum: Numbers, shared: Numbers, d_out: Queries
) -> tuple[Queries, Keys, Keys]:
    inputs = [("queries", q), ("keys", k), ("keys", v), ("queries", d_out), ("numbers", log_sum), ("numbers", shared)]
    walk = Walk.of(q, runs, by_keys=False)
    (d_q,) = walk(_backward_of_queries, BY_QUERIES, inputs, [("queries", q.dtype)], [(walk.lanes, walk.head_dim)])
    walk = Walk.of(q, runs, by_keys=True)
    results = [("keys", k.dtype), ("keys", v.dtype)]
    return d_q, *walk(_backward_of_keys, BY_KEYS, inputs, results, [(walk.keys, walk.head_dim)] * 2)


tpu_attention = flash_attention(forward, backward, block_tokens)


def _forward(pair: Pair, *refs: Any) -> None:
    q, k, v, runs, out, log_sum, peak, total, mixed = refs

    @pl.when(pair.begins)
    def _() -> None:
        peak[...] = jnp.full_like(peak, MASKED)
        _zero(total, mixed)

    @pl.when(pair.works)
    def _() -> None:
        scores = jnp.where(pair.visible(runs, peak.shape[1]), _scores(pair, q, k, peak.dtype), MASKED)
        higher = jnp.maximum(peak[...], scores.max(axis=0, keepdims=True))
        weights, shrink = jnp.exp(scores - higher), jnp.exp(peak[...] - higher)
        peak[...] = higher
        total[...] = total[...] * shrink + weights.sum(axis=0, keepdims=True)
        mixed[...] = mixed[...] * shrink + product(v[...], weights.astype(v.dtype), TN, mixed.dtype)

    @pl.when(pair.ends)
    def _() -> None:
        divisor = jnp.maximum(total[...], TINY)
        out[...] = (mixed[...] / divisor).T.reshape(out.shape).astype(out.dtype)
        log_sum[...] = peak[...] + jnp.log(divisor)


def _d_scores(
    pair: Pair, q: Any, k: Any, v: Any, d_out: Any, log_sum: Any, shared: Any, runs: Any
) -> tuple[Float[Array, "s r"], Float[Array, "s r"]]:
    weights = jnp.exp(_scores(pair, q, k, log_sum.dtype) - log_sum[...])
    weights = jnp.where(pair.visible(runs, log_sum.shape[1]), weights, 0.0)
    d_weights = product(v[...], _lanes(d_out), NT, log_sum.dtype)
    return weights, weights * (d_weights - shared[...]) * pair.scale


def _backward_of_queries(pair: Pair, *refs: Any) -> None:
    *inputs, d_q, total = refs

    pl.when(pair.begins)(partial(_zero, total))

    @pl.when(pair.works)
    def _() -> None:
        _, k, *_ = inputs
        _, d_scores = _d_scores(pair, *inputs)
        total[...] += product(d_scores.astype(k.dtype), k[...], TN, total.dtype)

    @pl.when(pair.ends)
    def _() -> None:
        d_q[...] = total[...].reshape(d_q.shape).astype(d_q.dtype)


def _backward_of_keys(pair: Pair, *refs: Any) -> None:
    *inputs, d_k, d_v, total_k, total_v = refs

    pl.when(pair.begins)(partial(_zero, total_k, total_v))

    @pl.when(pair.works)
    def _() -> None:
        q, _, _, d_out, *_ = inputs
        weights, d_scores = _d_scores(pair, *inputs)
        total_k[...] += product(d_scores.astype(q.dtype), _lanes(q), NN, total_k.dtype)
        total_v[...] += product(weights.astype(d_out.dtype), _lanes(d_out), NN, total_v.dtype)

    @pl.when(pair.ends)
    def _() -> None:
        d_k[...] = total_k[...].astype(d_k.dtype)
        d_v[...] = total_v[...].astype(d_v.dtype)


def _scores(pair: Pair, q: Any, k: Any, wide: Any) -> Float[Array, "s r"]:
    return product(k[...], _lanes(q), NT, wide) * pair.scale


def _lanes(queries: Any) -> Float[Array, "r H"]:
    """Concatenates the queries of all heads in a block."""
    return queries[...].reshape(-1, queries.shape[-1])


def _zero(*sums: Any) -> None:
    for total in sums:
        total[...] = jnp.zeros_like(total)
