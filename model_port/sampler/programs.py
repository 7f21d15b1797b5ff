"""The sampler's compiled programs. Their shapes depend only on the sampler's settings, not on requests.

Only encoding also depends on the size of the frames, which is rounded up to a power of two.

The cache of all layers is one array of pages, in which a layer's pages follow the previous layer's. A page of any layer
can therefore be indexed directly, and no program copies a layer's part of the cache.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from model_port.config import ModelConfig
from model_port.inputs import VisionBatch
from model_port.layers import Index
from model_port.model import VLModel
from model_port.sampler.paged import Attend, decode_attention, on_each_device
from model_port.sharding import constrain, replicate
from model_port.text import Visual

GraphDef = nnx.GraphDef[VLModel]


@flax.struct.dataclass
class Cache:
    """Keys and values in pages. LP is the number of pages of all layers together."""

    keys: Float[Any, "K LP S H"]
    values: Float[Any, "K LP S H"]


@flax.struct.dataclass
class Chunk:
    """Tokens of one prompt that are prefilled together, in whole pages."""

    tokens: Int[Any, "1 T"]
    positions: Int[Any, "1 T 3"]
    visual_index: Int[Any, "1 T"]  # in the table of frames
    slots: Int[Any, "1 T"]
    table: Int[Any, "1 W"]  # the prompt's pages
    pages: Int[Any, " C"]  # the pages to write


@flax.struct.dataclass
class Rows:
    """The running requests, one per row. `tokens` has each row's last token, which is not in the cache yet."""

    tokens: Int[Any, " B"]
    slots: Int[Any, " B"]
    positions: Int[Any, " B"]
    table: Int[Any, "B W"]
    seeds: UInt32[Any, "B 2"]
    num_sampled: Int[Any, " B"]
    max_new: Int[Any, " B"]
    temperatures: Float[Any, " B"]
    stop_ids: Int[Any, "B stops"]
    running: Bool[Any, " B"]


def no_rows(num_rows: int, table_pages: int, num_stop_ids: int) -> Rows:
    """Returns rows without requests, in writable arrays. They use page 0."""
    tokens, slots, positions, num_sampled, max_new = np.zeros((5, num_rows), np.int32)
    table, seeds = np.zeros((num_rows, table_pages), np.int32), np.zeros((num_rows, 2), np.uint32)
    temperatures, stop_ids = np.zeros(num_rows, np.float32), np.full((num_rows, num_stop_ids), -1, np.int32)
    running = np.zeros(num_rows, bool)
    return Rows(tokens, slots, positions, table, seeds, num_sampled, max_new, temperatures, stop_ids, running)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def empty_cache(config: ModelConfig, dtype: str, num_pages: int, page_tokens: int) -> Cache:
    text = config.text
    shape = (text.num_kv_heads, text.num_layers * num_pages, page_tokens, text.head_dim)
    return Cache(*(constrain(jnp.zeros(shape, dtype), "kpsh") for _ in range(2)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def empty_frames(config: ModelConfig, dtype: str, num_tokens: int) -> Visual:
    shape = (1, num_tokens, config.text.width)
    return Visual(jnp.zeros(shape, dtype), jnp.zeros((config.vision.num_deepstack, *shape), dtype))


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def encode(graphdef: GraphDef, params: nnx.State, batch: VisionBatch, frames: Visual, to: Int[Array, " M"]) -> Visual:
    """Adds a batch of frames to the table. `to` has the table row of each feature, past the end for padding."""
    new = nnx.merge(graphdef, params).encode_vision(batch)
    table = frames.table.at[:, to].set(new.table.astype(frames.table.dtype), mode="drop")
    deepstack = frames.deepstack.at[:, :, to].set(new.deepstack.astype(frames.deepstack.dtype), mode="drop")
    return Visual(replicate(table), replicate(deepstack))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def prefill(
    graphdef: GraphDef, attend_pages: Attend, params: nnx.State, cache: Cache, frames: Visual, chunk: Chunk
) -> Cache:
    model = nnx.merge(graphdef, params)
    chunk, num_pages = jax.tree.map(jnp.asarray, chunk), cache.keys.shape[1] // model.config.text.num_layers

    def write(pages: Array, new: Array, index: Index) -> Array:
        blocks = jnp.moveaxis(new[0], 1, 0).reshape(len(pages), len(chunk.pages), *pages.shape[2:])
        return pages.at[:, index * num_pages + chunk.pages].set(blocks)

    def attend(q: Array, k: Array, v: Array, index: Index, cache: Cache) -> tuple[Array, Cache]:
        cache = Cache(write(cache.keys, k, index), write(cache.values, v, index))
        table = index * num_pages + chunk.table
        return on_each_device(attend_pages)(q, cache.keys, cache.values, table, chunk.slots), cache

    _, cache, _ = model.text(chunk.tokens, chunk.positions, chunk.visual_index, frames, attend, cache, model.compute)
    return cache


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def copy_page(cache: Cache, num_layers: int, source: Int[Array, ""], target: Int[Array, ""]) -> Cache:
    offsets = jnp.arange(num_layers) * (cache.keys.shape[1] // num_layers)
    return jax.tree.map(lambda pages: pages.at[:, offsets + target].set(pages[:, offsets + source]), cache)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def decode(
    graphdef: GraphDef, num_steps: int, attend_pages: Attend, params: nnx.State, cache: Cache, rows: Rows
) -> tuple[Cache, Int[Array, "B n"], Float[Array, "B n"], Int[Array, " B"]]:
    """Samples up to `num_steps` tokens in every running row. Also returns the number of new tokens in each row."""
    model = nnx.merge(graphdef, params)
    num_pages = cache.keys.shape[1] // model.config.text.num_layers
    rows = jax.tree.map(jnp.asarray, rows)
    no_visual, attend_new = jnp.full((len(rows.tokens), 1), -1), decode_attention(attend_pages)

    def one_token(carry: tuple[Cache, Rows], _: None) -> tuple[tuple[Cache, Rows], tuple[Array, Array]]:
        cache, rows = carry

        def attend(q: Array, k: Array, v: Array, index: Index, cache: Cache) -> tuple[Array, Cache]:
            table = index * num_pages + rows.table
            mixed, *new = attend_new(q[:, 0], k[:, 0], v[:, 0], cache.keys, cache.values, table, rows.slots)
            return mixed[:, None], Cache(*new)

        positions = jnp.broadcast_to(rows.positions[:, None, None], (len(rows.tokens), 1, 3))
        inputs = rows.tokens[:, None], positions, no_visual, None
        hidden, cache = model.text(*inputs, attend, cache, model.compute)[:2]
        token, logp = _sample(model.text.logits(hidden)[:, 0], rows.seeds, rows.num_sampled, rows.temperatures)
        advance = rows.running.astype(jnp.int32)
        num_sampled = rows.num_sampled + advance
        stopped = jnp.any(token[:, None] == rows.stop_ids, axis=1) | (num_sampled >= rows.max_new)
        rows = replace(
            rows,
            tokens=jnp.where(rows.running, token, rows.tokens),
            slots=rows.slots + advance,
            positions=rows.positions + advance,
            num_sampled=num_sampled,
            running=rows.running & ~stopped,
        )
        return (cache, rows), (token, logp)

    (cache, after), (tokens, logp) = jax.lax.scan(one_token, (cache, rows), None, length=num_steps)
    return cache, replicate(tokens.T), replicate(logp.T), replicate(after.num_sampled - rows.num_sampled)


def _sample(
    logits: Float[Array, "B V"], seeds: UInt32[Array, "B 2"], number: Int[Array, " B"], temperatures: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Samples by the Gumbel-max trick. Each row's noise depends only on its seed and the token's number."""

    def noise(seed: UInt32[Array, "2"], number: Int[Array, ""]) -> Float[Array, " V"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), number)
        return jax.random.gumbel(key, logits.shape[1:])

    warm = (temperatures > 0)[:, None]
    scaled = logits / jnp.where(warm, temperatures[:, None], 1.0)
    token = first_of_highest(jnp.where(warm, scaled + jax.vmap(noise)(seeds, number), scaled))
    logp = jnp.take_along_axis(jax.nn.log_softmax(scaled, axis=-1), token[:, None], axis=1)[:, 0]
    return token.astype(jnp.int32), logp


def first_of_highest(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Computes argmax faster on a CPU, where XLA computes jnp.argmax one element at a time, fused with the noise."""
    highest = x.max(axis=-1, keepdims=True)
    return jnp.where(x < highest, x.shape[1], jnp.arange(x.shape[1])[None]).min(axis=-1)
