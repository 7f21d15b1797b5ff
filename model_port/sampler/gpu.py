"""The decode kernel for NVIDIA GPUs, lowered through Triton.

A program owns one key/value head and one of a row's SPLITS groups of consecutive pages, because with one program per
head, a few rows would leave most of the GPU idle. It loops over the pages that have tokens, with a running softmax. The
softmaxes of a row's groups are merged afterwards.
"""

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
WARPS, STAGES = 4, 2


def gpu_decode(
    q: Float[Array, "B N H"],
    keys: Float[Array, "K LP S H"],
    values: Float[Array, "K LP S H"],
    table: Int[Array, "B W"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B N H"]:
    """Computes the attention of each row's last token to the row's first `lengths` tokens. `q` is scaled."""
    rows, heads, head_dim = q.shape
    kv_heads, num_pages, page_tokens, _ = keys.shape
    shared, wide = heads // kv_heads, jnp.promote_types(q.dtype, jnp.float32)
    tile, split_pages = max(SMALLEST_TILE, pl.next_power_of_2(shared)), table.shape[1] // SPLITS
    grouped = jnp.pad(q.reshape(rows, kv_heads, shared, head_dim), ((0, 0), (0, 0), (0, tile - shared), (0, 0)))
    cache = pl.BlockSpec((None, num_pages, page_tokens, head_dim), lambda b, k, i: (k, 0, 0, 0))
    numbers = pl.BlockSpec((None, None, None, tile), lambda b, k, i: (b, i, k, 0))
    parts = rows, SPLITS, kv_heads, tile
    peak, total, mixed = pl.pallas_call(
        _attend,
        grid=(rows, kv_heads, SPLITS),
        in_specs=[
            pl.BlockSpec((None, None, tile, head_dim), lambda b, k, i: (b, k, 0, 0)),
            cache,
            cache,
            pl.BlockSpec((None, None, split_pages), lambda b, k, i: (b, i, 0)),
            pl.BlockSpec((1,), lambda b, k, i: (b,)),
        ],
        out_specs=[numbers, numbers, pl.BlockSpec((None, None, None, tile, head_dim), lambda b, k, i: (b, i, k, 0, 0))],
        out_shape=[
            *(jax.ShapeDtypeStruct(parts, wide) for _ in range(2)),
            jax.ShapeDtypeStruct((*parts, head_dim), q.dtype),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
    )(grouped, keys, values, table.reshape(rows, SPLITS, split_pages), lengths)
    share = jnp.exp(peak - peak.max(axis=1, keepdims=True))  # 0 for a group without tokens
    merged = (mixed * share[..., None]).sum(axis=1) / (total * share).sum(axis=1)[..., None]
    return merged[:, :, :shared].reshape(q.shape).astype(q.dtype)


def _attend(q: Any, keys: Any, values: Any, table: Any, length: Any, peak: Any, total: Any, mixed: Any) -> None:
    queries, num_tokens, (split_pages,), page_tokens = q[...], length[0], table.shape, keys.shape[1]
    first = pl.program_id(2) * split_pages

    def add(n: Array, carry: SoftmaxCarry) -> SoftmaxCarry:
        page = table[n]
        token = (first + n) * page_tokens + jnp.arange(page_tokens, dtype=jnp.int32)
        scores = product(queries, keys[page, :, :], NT, wide)
        scores = jnp.where((token < num_tokens)[None], scores, MASKED)
        return add_weighted(carry, scores, lambda w: product(w.astype(values.dtype), values[page, :, :], NN, wide))

    wide = peak.dtype
    start = empty_softmax(peak.shape, mixed.shape[-1], wide)
    num_pages = jnp.clip(pl.cdiv(num_tokens, page_tokens) - first, 0, split_pages)
    peak[...], total[...], sums = lax.fori_loop(0, num_pages, add, start)
    mixed[...] = sums.astype(mixed.dtype)
