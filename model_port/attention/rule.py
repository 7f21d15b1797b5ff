"""The attention mask, which every form of attention implements, for packed rows, branches, decoding and vision.

A row has several sequences (segments). A sequence may be a trunk followed by branches that share it: a branch token
attends to the trunk and its own branch, but never to another branch.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ATTENTION_OUT = "attention_out"  # the name by which a remat policy saves the arrays that the backward pass reads
MASKED = -1e30  # finite, so that a padding query, which has no key, gets a meaningless mean instead of NaN
TINY = 1e-37  # the divisor for a query that attends to no key

# Arrays grouped by key/value head: queries or outputs, keys or values, and one number per query.
Queries = Float[Array, "B T K R H"]
Keys = Float[Array, "B S K H"]
Numbers = Float[Array, "B K R T"]


class Layout(NamedTuple):
    """The inputs of the mask for each token of a row."""

    segment_ids: Int[Array, "B T"]  # 0 = padding
    branch_ids: Int[Array, "B T"]  # 0 = trunk
    order: Int[Array, "B T"]  # causal order within the row


class QueryRuns(NamedTuple):
    """The mask in another form: for each key of a row, the first and last of the consecutive queries that see it."""

    first: Int[Array, "B T"]
    last: Int[Array, "B T"]  # less than `first` if no query attends to the key


def scores_of(q: Queries, k: Keys) -> Float[Array, "B K R T S"]:
    """Computes the unmasked scores in at least float32."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return jnp.einsum("BTKRH,BSKH->BKRTS", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5


def masked_scores(q: Queries, k: Keys, runs: QueryRuns, begin: Array | int) -> Float[Array, "B K R T S"]:
    """Computes the scores of consecutive queries that start at number `begin`. `runs` belong to the keys `k`."""
    return jnp.where(_visible(runs, begin, q.shape[1]), scores_of(q, k), MASKED)


def gradient_of_scores(
    q: Queries, k: Keys, v: Keys, runs: QueryRuns, begin: Array | int, log_sum: Numbers, shared: Numbers, d_out: Queries
) -> tuple[Float[Array, "B K R T S"], Float[Array, "B K R T S"]]:
    """Returns the weights P, recomputed from the log-sum-exp, and dS = P * (dP - sum(dO * O)), in the dtype of `q`."""
    weights = jnp.exp(scores_of(q, k) - log_sum[..., None])
    weights = jnp.where(_visible(runs, begin, q.shape[1]), weights, 0.0)
    d_weights = jnp.einsum("BTKRH,BSKH->BKRTS", d_out, v, preferred_element_type=log_sum.dtype)
    d_scores = weights * (d_weights - shared[..., None]) * q.shape[-1] ** -0.5
    return weights.astype(q.dtype), d_scores.astype(q.dtype)


def _visible(runs: QueryRuns, begin: Array | int, num_queries: int) -> Bool[Array, "B 1 1 T S"]:
    query = (begin + jnp.arange(num_queries))[None, :, None]
    first, last = (side[:, None] for side in runs)
    return ((first <= query) & (query <= last))[:, None, None]


SoftmaxCarry = tuple[Array, Array, Array]  # highest score, sum of weights, weighted sum of values


def empty_softmax(shape: tuple[int, ...], head_dim: int, dtype: jnp.dtype) -> SoftmaxCarry:
    """Returns the initial state of a running softmax, for queries in an array of `shape`."""
    return jnp.full(shape, MASKED, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, head_dim), dtype)


def add_to_softmax(carry: SoftmaxCarry, scores: Array, v: Array, equation: str) -> SoftmaxCarry:
    """Adds a block of keys to a running softmax. `equation` is the einsum of weights and values."""
    mix = partial(jnp.einsum, equation, preferred_element_type=carry[2].dtype)
    return add_weighted(carry, scores, lambda weights: mix(weights.astype(v.dtype), v))


def add_weighted(carry: SoftmaxCarry, scores: Array, mix: Callable[[Array], Array]) -> SoftmaxCarry:
    """Adds a block of keys to a running softmax. `mix` returns the sum of its values with these weights."""
    peak, total, mixed = carry
    higher = jnp.maximum(peak, scores.max(axis=-1))
    weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(peak - higher)
    new = mix(weights)
    return higher, total * shrink + weights.sum(axis=-1), mixed * shrink[..., None] + new


def mean_and_log_sum(carry: SoftmaxCarry) -> tuple[Array, Array]:
    peak, total, mixed = carry
    total = jnp.maximum(total, TINY)
    return mixed / total[..., None], peak + jnp.log(total)


def attend_mask(layout: Layout, *, causal: bool) -> Bool[Array, "B T S"]:
    """True where a query token may attend to a key token."""
    segment, branch, order = ((part[:, :, None], part[:, None, :]) for part in layout)
    visible = (segment[0] == segment[1]) & (segment[1] != 0)
    if not causal:
        return visible
    return visible & ((branch[1] == 0) | (branch[1] == branch[0])) & (order[1] <= order[0])


def query_runs(layout: Layout, *, causal: bool) -> QueryRuns:
    """Computes the query runs of rows in causal order whose segments and branches are contiguous, as packed rows' are.

    Queries attend to a trunk's key until the end of the segment, and to a branch's key until the end of the branch.
    Without `causal`, all queries of a segment attend to all its keys.
    """
    segment, branch = layout.segment_ids, layout.branch_ids
    own = jnp.broadcast_to(jnp.arange(segment.shape[1]), segment.shape)
    new_segment = _changes(segment)
    last = _last_of_run(own, new_segment)
    if causal:
        first, last = own, jnp.where(branch == 0, last, _last_of_run(own, new_segment | _changes(branch)))
    else:
        first = jax.lax.cummax(jnp.where(new_segment, own, 0), axis=1)
    real = segment != 0
    return QueryRuns(jnp.where(real, first, segment.shape[1]), jnp.where(real, last, -1))


def _changes(ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True where a run of equal ids starts."""
    return jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)


def _last_of_run(own: Int[Array, "B T"], begins: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    ends = jnp.concatenate([begins[:, 1:], jnp.ones_like(begins[:, :1])], axis=1)
    return jax.lax.cummin(jnp.where(ends, own, own.shape[1]), axis=1, reverse=True)
