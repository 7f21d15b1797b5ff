"""Attention to pages on NVIDIA GPUs, lowered through Triton.

A program owns a tile of queries that share a key/value head: all query heads of one token in decoding, or of several
tokens in prefill. It loops over the pages that the tile's last token sees, with a running softmax. In decoding, one
program per row and head would leave most of the GPU idle, so it only loops over every SPLITS-th page, and the softmaxes
of a row's programs are merged afterwards.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from model_port.attention.products import NN, NT, product
from model_port.attention.rule import MASKED, SoftmaxCarry, add_weighted, empty_softmax

SPLITS = 8  # divides TABLE_PAGES
SMALLEST_TILE = 16  # the fewest queries that Triton's dot accepts
LARGEST_TILE = {2: 128, 4: 32}  # by bytes per value; in float32, 64 do not fit the shared memory of an L4
WARPS, STAGES = 4, 2


def gpu_attention(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "K LP S H"],
    values: Float[Array, "K LP S H"],
    table: Int[Array, "B W"],
    slots: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Computes each token's attention to its row's tokens up to its own slot."""
    rows, num_tokens, heads, head_dim = q.shape
    kv_heads, num_pages, page_tokens, _ = keys.shape
    shared, wide = heads // kv_heads, jnp.promote_types(q.dtype, jnp.float32)
    num_queries, splits = num_tokens * shared, SPLITS if num_tokens == 1 else 1
    tile = min(max(SMALLEST_TILE, pl.next_power_of_2(num_queries)), LARGEST_TILE[min(4, q.dtype.itemsize)])
    split_pages = table.shape[1] // splits
    grouped = jnp.einsum("BTKRH->BKTRH", q.reshape(rows, num_tokens, kv_heads, shared, head_dim))
    grouped = grouped.reshape(rows, kv_heads, num_queries, head_dim)
    cache = pl.BlockSpec((None, num_pages, page_tokens, head_dim), lambda b, k, i, j: (k, 0, 0, 0))
    numbers = pl.BlockSpec((None, None, None, tile), lambda b, k, i, j: (b, i, k, j))
    parts = rows, splits, kv_heads, num_queries
    peak, total, mixed = pl.pallas_call(
        partial(_attend, head_dim**-0.5, splits, num_queries),
        grid=(rows, kv_heads, splits, pl.cdiv(num_queries, tile)),
        in_specs=[
            pl.BlockSpec((None, None, tile, head_dim), lambda b, k, i, j: (b, k, j, 0)),
            cache,
            cache,
            pl.BlockSpec((None, None, split_pages), lambda b, k, i, j: (b, i, 0)),
            pl.BlockSpec((None, tile), lambda b, k, i, j: (b, j)),
        ],
        out_specs=[
            numbers,
            numbers,
            pl.BlockSpec((None, None, None, tile, head_dim), lambda b, k, i, j: (b, i, k, j, 0)),
        ],
        out_shape=[
            *(jax.ShapeDtypeStruct(parts, wide) for _ in range(2)),
            jax.ShapeDtypeStruct((*parts, head_dim), q.dtype),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
    )(
        grouped,
        keys,
        values,
        table.reshape(rows, split_pages, splits).swapaxes(1, 2),
        jnp.repeat(slots, shared, axis=1),
    )
    share = jnp.exp(peak - peak.max(axis=1, keepdims=True))  # 0 for a program without tokens
    merged = (mixed * share[..., None]).sum(axis=1) / (total * share).sum(axis=1)[..., None]
    merged = merged.reshape(rows, kv_heads, num_tokens, shared, head_dim)
    return jnp.einsum("BKTRH->BTKRH", merged).reshape(q.shape).astype(q.dtype)


def _attend(scale: float, splits: int, num_queries: int, *refs: Any) -> None:
    q, keys, values, table, slots, peak, total, mixed = refs
    tile, page_tokens, first = q.shape[0], keys.shape[1], pl.program_id(2)
    real = jnp.arange(tile) < num_queries - pl.program_id(3) * tile  # a token's queries are fewer than a tile's
    queries, last = plgpu.load(q, mask=real[:, None], other=0), plgpu.load(slots, mask=real, other=0)

    def add(n: Array, carry: SoftmaxCarry) -> SoftmaxCarry:
        page = table[n]
        token = (first + n * splits) * page_tokens + jnp.arange(page_tokens, dtype=jnp.int32)
        scores = product(queries, keys[page, :, :], NT, wide) * scale
        scores = jnp.where(token[None] <= last[:, None], scores, MASKED)
        return add_weighted(carry, scores, lambda w: product(w.astype(values.dtype), values[page, :, :], NN, wide))

    wide = peak.dtype
    start = empty_softmax(peak.shape, mixed.shape[-1], wide)
    num_pages = lax.div(last.max(), page_tokens) + 1
    carry = lax.fori_loop(0, pl.cdiv(num_pages - first, splits), add, start)
    for ref, numbers, mask in zip((peak, total, mixed), carry, (real, real, real[:, None]), strict=True):
        plgpu.store(ref, numbers.astype(ref.dtype), mask=mask)
