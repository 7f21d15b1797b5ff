"""Attention with an explicit mask and a softmax in float32: the reference for all other forms."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model_port.attention.rule import MASKED, Layout, attend_mask, scores_of


def xla_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    layout: Layout,
    causal: bool,
) -> Float[Array, "B T N H"]:
    rows, num_tokens, num_heads, head_dim = q.shape
    grouped = q.reshape(rows, num_tokens, k.shape[2], -1, head_dim)
    mask = attend_mask(layout, causal=causal)[:, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores_of(grouped, k), MASKED)).astype(v.dtype)
    return jnp.einsum("BKRTS,BSKH->BTKRH", weights, v).reshape(rows, num_tokens, num_heads, head_dim)
