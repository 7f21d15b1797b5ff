"""One rule of who may attend to whom, for packed rows, branches, decoding and vision, and the implementations of it.

A row holds several sequences (segments). A sequence may be a trunk followed by branches that share it: a branch token
sees the trunk and its own branch, never a sibling. Every kernel behind `attention` must equal the `xla` one, which
spells the rule out as a mask.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30  # finite, so that a padding query with no key gets a meaningless mean instead of NaN


class Layout(NamedTuple):
    """What the rule needs to know of each token of a row."""

    segment_ids: Int[Array, "B T"]  # 0 = padding
    branch_ids: Int[Array, "B T"]  # 0 = trunk
    order: Int[Array, "B T"]  # causal order within the row


def attend_mask(query: Layout, key: Layout, *, causal: bool) -> Bool[Array, "B T S"]:
    """True where a query token may look at a key token."""
    segment = query.segment_ids[:, :, None] == key.segment_ids[:, None, :]
    real = (key.segment_ids != 0)[:, None, :]
    if not causal:
        return segment & real
    branch = key.branch_ids[:, None, :]
    visible_branch = (branch == 0) | (branch == query.branch_ids[:, :, None])
    return segment & real & visible_branch & (key.order[:, None, :] <= query.order[:, :, None])


def xla_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    query: Layout,
    key: Layout,
    causal: bool,
) -> Float[Array, "B T N H"]:
    """The oracle: explicit mask, softmax in float32."""
    rows, num_tokens, num_heads, head_dim = q.shape
    grouped = q.reshape(rows, num_tokens, k.shape[2], -1, head_dim)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("BTKRH,BSKH->BKRTS", grouped, k, preferred_element_type=wide) * head_dim**-0.5
    mask = attend_mask(query, key, causal=causal)[:, None, None]
    weights = _softmax(jnp.where(mask, scores, MASKED)).astype(v.dtype)
    return jnp.einsum("BKRTS,BSKH->BTKRH", weights, v).reshape(rows, num_tokens, num_heads, head_dim)


def _softmax(scores: Float[Array, "B K R T S"]) -> Float[Array, "B K R T S"]:
    shifted = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return shifted / jnp.sum(shifted, axis=-1, keepdims=True)


Attention = Callable[[Array, Array, Array, Layout, Layout, bool], Array]
IMPLEMENTATIONS: dict[str, Attention] = {"xla": xla_attention}
