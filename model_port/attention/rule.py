"""Who may attend to whom in packed rows, branches, decoding and vision: what every form of attention has in common.

A row holds several sequences (segments). A sequence may be a trunk followed by branches that share it: a branch token
sees the trunk and its own branch, never a sibling.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ATTENTION_OUT = "attention_out"  # how a remat policy knows what the backward pass reads
MASKED = -1e30  # finite, so that a padding query with no key gets a meaningless mean instead of NaN


class Layout(NamedTuple):
    """What the rule needs to know of each token of a row."""

    segment_ids: Int[Array, "B T"]  # 0 = padding
    branch_ids: Int[Array, "B T"]  # 0 = trunk
    order: Int[Array, "B T"]  # causal order within the row


class Seen(NamedTuple):
    """The same for rows that attend to themselves, in two numbers of each key: which run of queries sees it."""

    first: Int[Array, "B T"]
    last: Int[Array, "B T"]  # before `first` where no query does


def scores_of(q: Float[Array, "B T K R H"], k: Float[Array, "B S K H"]) -> Float[Array, "B K R T S"]:
    """At least in float32, whoever may see whom; `q` by the key/value head that it shares."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return jnp.einsum("BTKRH,BSKH->BKRTS", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5


def attend_mask(query: Layout, key: Layout, *, causal: bool) -> Bool[Array, "B T S"]:
    """True where a query token may look at a key token."""
    segment = query.segment_ids[:, :, None] == key.segment_ids[:, None, :]
    real = (key.segment_ids != 0)[:, None, :]
    if not causal:
        return segment & real
    branch = key.branch_ids[:, None, :]
    visible_branch = (branch == 0) | (branch == query.branch_ids[:, :, None])
    return segment & real & visible_branch & (key.order[:, None, :] <= query.order[:, :, None])


def seen_by(layout: Layout, *, causal: bool) -> Seen:
    """Of rows in causal order whose segments, and the branches in them, are runs, as packing makes them.

    A trunk is seen to the end of its segment, a branch to its own end; without causality a segment sees itself.
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
    return Seen(jnp.where(real, first, segment.shape[1]), jnp.where(real, last, -1))


def _changes(ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True where a run begins."""
    return jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)


def _last_of_run(own: Int[Array, "B T"], begins: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    ends = jnp.concatenate([begins[:, 1:], jnp.ones_like(begins[:, :1])], axis=1)
    return jax.lax.cummin(jnp.where(ends, own, own.shape[1]), axis=1, reverse=True)
