"""The attention mask of packed rows, branches, decoding and vision, which every form of attention implements.

A row holds several sequences (segments). A sequence may be a trunk followed by branches that share it: a branch token
attends to the trunk and its own branch, never to another branch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ATTENTION_OUT = "attention_out"  # the name by which a remat policy saves what the backward pass reads
MASKED = -1e30  # finite, so that a padding query with no key gets a meaningless mean instead of NaN


class Layout(NamedTuple):
    """The mask's inputs for each token of a row."""

    segment_ids: Int[Array, "B T"]  # 0 = padding
    branch_ids: Int[Array, "B T"]  # 0 = trunk
    order: Int[Array, "B T"]  # causal order within the row


class QueryRuns(NamedTuple):
    """The mask of rows that attend to themselves, as the run of queries that attend to each key."""

    first: Int[Array, "B T"]
    last: Int[Array, "B T"]  # less than `first` if no query does


def scores_of(q: Float[Array, "B T K R H"], k: Float[Array, "B S K H"]) -> Float[Array, "B K R T S"]:
    """Unmasked scores in at least float32; `q` is grouped by key/value head."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return jnp.einsum("BTKRH,BSKH->BKRTS", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5


SoftmaxCarry = tuple[Array, Array, Array]  # highest score, sum of weights, mean of values times that sum


def empty_softmax(shape: tuple[int, ...], head_dim: int, dtype: jnp.dtype) -> SoftmaxCarry:
    """For queries in an array of `shape`, before any key."""
    return jnp.full(shape, MASKED, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, head_dim), dtype)


def add_to_softmax(carry: SoftmaxCarry, scores: Array, v: Array, equation: str) -> SoftmaxCarry:
    """Adds a block of keys to a running softmax; `equation` is einsum's, of weights with values."""
    peak, total, mixed = carry
    higher = jnp.maximum(peak, scores.max(axis=-1))
    weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(peak - higher)
    new = jnp.einsum(equation, weights.astype(v.dtype), v, preferred_element_type=mixed.dtype)
    return higher, total * shrink + weights.sum(axis=-1), mixed * shrink[..., None] + new


def attend_mask(query: Layout, key: Layout, *, causal: bool) -> Bool[Array, "B T S"]:
    """True where a query token may attend to a key token."""
    segment = query.segment_ids[:, :, None] == key.segment_ids[:, None, :]
    real = (key.segment_ids != 0)[:, None, :]
    if not causal:
        return segment & real
    branch = key.branch_ids[:, None, :]
    visible_branch = (branch == 0) | (branch == query.branch_ids[:, :, None])
    return segment & real & visible_branch & (key.order[:, None, :] <= query.order[:, :, None])


def query_runs(layout: Layout, *, causal: bool) -> QueryRuns:
    """The runs of rows in causal order in which every segment and every branch is contiguous, as packing lays them out.

    Queries attend to a trunk's key until the end of the segment, and to a branch's key until the end of the branch.
    Without causality, a segment attends to itself.
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
    """True where a run starts."""
    return jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)


def _last_of_run(own: Int[Array, "B T"], begins: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    ends = jnp.concatenate([begins[:, 1:], jnp.ones_like(begins[:, :1])], axis=1)
    return jax.lax.cummin(jnp.where(ends, own, own.shape[1]), axis=1, reverse=True)
