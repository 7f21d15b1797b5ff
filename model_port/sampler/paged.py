"""Attention of new tokens to a paged key/value cache.

A row's token number s is in slot s % S of page table[row, s // S], and a query attends to the tokens up to its own.
The plain form loops over blocks of pages, up to the longest row. A block beyond a row's end changes its result by
exactly nothing, so a row's result depends neither on other rows nor on the cache's size. On accelerators, kernels read
only each row's own pages: gpu.py, and in decoding jax's for TPUs. The sampler checks them first (check.py).
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from model_port.attention.rule import MASKED, SoftmaxCarry, add_to_softmax, empty_softmax
from model_port.sharding import per_device, platform

TABLE_PAGES = 16  # a table's width is a multiple of this, so that kernels can split it
BLOCK_PAGES = 4  # pages of a block of the plain form in decoding; divides TABLE_PAGES
KERNEL_HEAD_DIM = 128  # the kernels only support multiples of this

Attend = Callable[[Array, Array, Array, Array, Array], Array]  # queries, keys, values, page table, slots -> outputs


def decode_attention(attend: Attend) -> Callable[..., tuple[Array, Array, Array]]:
    """Returns a function of new queries, keys and values, the cache's keys and values, the page table and the slots.

    The function returns the attention outputs and the updated cache.
    """
    return per_device(
        partial(_decode, attend), ("rnh", "rkh", "rkh", "kpsh", "kpsh", "rm", "r"), ("rnh", "kpsh", "kpsh")
    )


def on_each_device(attend: Attend) -> Attend:
    """Returns the function for arrays whose heads are split over the current mesh."""
    split = per_device(lambda *inputs: (attend(*inputs),), ("rtnh", "kpsh", "kpsh", "rm", "rt"), ("rtnh",))
    return lambda *inputs: split(*inputs)[0]


def _decode(
    attend: Attend,
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    keys: Float[Array, "K LP S H"],
    values: Float[Array, "K LP S H"],
    table: Int[Array, "B W"],
    slots: Int[Array, " B"],
) -> tuple[Float[Array, "B N H"], Array, Array]:
    """Writes one new token per row into the cache, and computes its attention."""
    page_tokens = keys.shape[2]
    page = jnp.take_along_axis(table, slots[:, None] // page_tokens, axis=1)[:, 0]
    # Also index the heads: then TPUs write the cache in the layout that the kernel reads, and do not transpose it.
    to = jnp.arange(len(keys))[None], page[:, None], (slots % page_tokens)[:, None]
    keys, values = keys.at[to].set(k), values.at[to].set(v)
    return attend(q[:, None], keys, values, table, slots[:, None])[:, 0], keys, values


def gpu_kernel(q: Array, keys: Array, values: Array, table: Array, slots: Array) -> Array:
    from model_port.sampler.gpu import gpu_attention  # imported late, because Pallas takes a while

    return gpu_attention(q, keys, values, table, slots)


def tpu_kernel(q: Array, keys: Array, values: Array, table: Array, slots: Array) -> Array:
    if q.shape[1] > 1:  # the kernel only decodes
        return walked(q, keys, values, table, slots)
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    scaled = q[:, 0] * q.shape[3] ** -0.5
    return paged_attention(scaled, keys, values, slots[:, 0] + 1, table, pages_per_compute_block=8)[:, None]


KERNELS: dict[str, Attend] = {"gpu": gpu_kernel, "tpu": tpu_kernel}


def kernel_of(head_dim: int) -> Attend | None:
    """Returns this platform's kernel, or None if it has none for this head dim."""
    return KERNELS.get(platform()) if head_dim % KERNEL_HEAD_DIM == 0 else None


def walked(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "K LP S H"],
    values: Float[Array, "K LP S H"],
    table: Int[Array, "B W"],
    slots: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """Computes attention block by block of pages, with a running softmax. More than one query is a chunk of pages."""
    rows, num_queries, heads, head_dim = q.shape
    kv_heads, _, page_tokens, _ = keys.shape
    block_pages = BLOCK_PAGES if num_queries == 1 else num_queries // page_tokens
    block_tokens, group = block_pages * page_tokens, heads // kv_heads
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = jnp.einsum("BTKRH->KBRTH", q.reshape(rows, num_queries, kv_heads, group, head_dim))

    def add(i: Array, carry: SoftmaxCarry) -> SoftmaxCarry:
        pages = lax.dynamic_slice_in_dim(table, i * block_pages, block_pages, axis=1)
        k, v = (cache[:, pages].reshape(kv_heads, rows, block_tokens, head_dim) for cache in (keys, values))
        visible = i * block_tokens + jnp.arange(block_tokens)[None, None] <= slots[:, :, None]
        scores = jnp.einsum("KBRTH,KBSH->KBRTS", grouped, k, preferred_element_type=wide) * head_dim**-0.5
        return add_to_softmax(carry, jnp.where(visible[None, :, None], scores, MASKED), v, "KBRTS,KBSH->KBRTH")

    start = empty_softmax(grouped.shape[:-1], head_dim, wide)
    _, total, mixed = lax.fori_loop(0, jnp.max(slots) // block_tokens + 1, add, start)
    return jnp.einsum("KBRTH->BTKRH", mixed / total[..., None]).reshape(q.shape).astype(values.dtype)
