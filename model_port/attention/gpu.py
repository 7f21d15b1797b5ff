"""Attention as Pallas kernels for NVIDIA GPUs, lowered through Triton and wrapped by `flash`.

A program owns one block of queries or keys. It loops over the unmasked blocks of the other side, which are listed in
memory, so masked pairs are never loaded. Keys and values are indexed by key/value head, not repeated for each query
head, and one program sums a key's gradient over all query heads that share it. There are three kernels:

    kernel    one program per block of        loops over                        accumulates
    forward   queries of a query head         keys, values                      mixed values, peak and sum
    queries   queries of a query head         keys, values                      gradient of the queries
    keys      keys of a key/value head        queries, gradient of the output   gradients of keys and values

A tile is one block of queries against one block of keys. Tile sizes are chosen so that the accumulators and two blocks
of the other side, one in use and one being loaded, fit into the smallest supported chip: an A100 with 163 KiB of shared
memory (H100 and B200 have 227). Of 23 combinations of tile and warps in bfloat16, this one was within 6 % of each
kernel's fastest on an H200.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float

from model_port.attention.flash import flash_attention, neighbors, visible_blocks
from model_port.attention.products import BY_KEYS, BY_QUERIES, FORWARD, NN, NT, TN, causal_cost, product
from model_port.attention.rule import (
    MASKED,
    Keys,
    Numbers,
    Queries,
    QueryRuns,
    SoftmaxCarry,
    add_weighted,
    empty_softmax,
    mean_and_log_sum,
)


@dataclass(frozen=True)
class Tile:
    queries: int
    keys: int
    warps: int


TILES = {2: Tile(64, 64, warps=4), 4: Tile(64, 32, warps=4)}  # by bytes per value
BLOCK_TOKENS = 128  # a multiple of every tile
STAGES = 2
SMALLEST_HEAD_DIM = 16  # the smallest head dim that Triton's dot accepts; larger ones must be powers of two


def block_tokens(num_tokens: int, queries_per_key: int) -> int:
    return BLOCK_TOKENS


def forward(q: Queries, k: Keys, v: Keys, runs: QueryRuns) -> tuple[Queries, Numbers]:
    programs = _Programs.of(q, by_keys=False)
    inputs, results = [("queries", q), ("keys", k), ("keys", v)], [("queries", q.dtype), ("numbers", programs.wide)]
    return programs(_forward, FORWARD, inputs, runs, results)


def backward(
    q: Queries, k: Keys, v: Keys, runs: QueryRuns, log_sum: Numbers, shared: Numbers, d_out: Queries
) -> tuple[Queries, Keys, Keys]:
    """Computes the gradients by dS = P * (dP - sum(dO * O)); each kernel recomputes P from the log-sum-exp."""
    inputs = [("queries", q), ("keys", k), ("keys", v), ("queries", d_out), ("numbers", log_sum), ("numbers", shared)]
    programs = _Programs.of(q, by_keys=False)
    (d_q,) = programs(_by_queries, BY_QUERIES, inputs, runs, [("queries", q.dtype)])
    programs = _Programs.of(q, by_keys=True)
    return d_q, *programs(_by_keys, BY_KEYS, inputs, runs, [("keys", k.dtype), ("keys", v.dtype)])


gpu_attention = flash_attention(forward, backward, block_tokens)


def _forward(tile: Tile, scale: float, *refs: Any) -> None:
    keys_of, num_keys, q, k, v, first, last, out, log_sum = refs
    queries, i, wide = q[...], pl.program_id(0), log_sum.dtype

    def add(n: Array, carry: SoftmaxCarry) -> SoftmaxCarry:
        at = pl.ds(keys_of[n] * tile.keys, tile.keys)
        scores = product(queries, k[at, :], NT, wide) * scale
        scores = jnp.where(_visible(i, tile.queries, first[at], last[at]), scores, MASKED)
        return add_weighted(carry, scores, lambda weights: product(weights.astype(v.dtype), v[at, :], NN, wide))

    start = empty_softmax((tile.queries,), queries.shape[-1], wide)
    mean, log_sum[...] = mean_and_log_sum(lax.fori_loop(0, num_keys[0], add, start))
    out[...] = mean.astype(out.dtype)


def _by_queries(tile: Tile, scale: float, *refs: Any) -> None:
    keys_of, num_keys, q, k, v, d_out, log_sum, shared, first, last, d_q = refs
    own, i = (q[...], d_out[...], log_sum[...], shared[...]), pl.program_id(0)

    def add(n: Array, total: Array) -> Array:
        at = pl.ds(keys_of[n] * tile.keys, tile.keys)
        keys = k[at, :]
        visible = _visible(i, tile.queries, first[at], last[at])
        _, d_scores = _d_scores(*own, keys, v[at, :], visible, scale)
        return total + product(d_scores.astype(k.dtype), keys, NN, total.dtype)

    d_q[...] = lax.fori_loop(0, num_keys[0], add, jnp.zeros(d_q.shape, log_sum.dtype)).astype(d_q.dtype)


def _by_keys(tile: Tile, scale: float, *refs: Any) -> None:
    queries_of, num_queries, q, k, v, d_out, log_sum, shared, first, last, d_k, d_v = refs
    keys, values, run, heads = k[...], v[...], (first[...], last[...]), q.shape[1]

    def add(n: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        total_k, total_v = totals
        i, head = queries_of[lax.div(n, heads)], lax.rem(n, heads)
        at = pl.ds(i * tile.queries, tile.queries)
        queries, d_mixed = q[at, head, :], d_out[at, head, :]
        visible = _visible(i, tile.queries, *run)
        weights, d_scores = _d_scores(
            queries, d_mixed, log_sum[head, at], shared[head, at], keys, values, visible, scale
        )
        total_k += product(d_scores.astype(q.dtype), queries, TN, total_k.dtype)
        total_v += product(weights.astype(q.dtype), d_mixed, TN, total_v.dtype)
        return total_k, total_v

    nothing = jnp.zeros(keys.shape, log_sum.dtype)
    total_k, total_v = lax.fori_loop(0, num_queries[0] * heads, add, (nothing, nothing))
    d_k[...] = total_k.astype(d_k.dtype)
    d_v[...] = total_v.astype(d_v.dtype)


def _d_scores(
    q: Float[Array, "t H"],
    d_out: Float[Array, "t H"],
    log_sum: Float[Array, " t"],
    shared: Float[Array, " t"],
    k: Float[Array, "s H"],
    v: Float[Array, "s H"],
    visible: Bool[Array, "t s"],
    scale: float,
) -> tuple[Float[Array, "t s"], Float[Array, "t s"]]:
    """Returns the attention weights and the gradient of the scores."""
    scores = product(q, k, NT, log_sum.dtype) * scale
    weights = jnp.where(visible, jnp.exp(scores - log_sum[:, None]), 0.0)
    return weights, weights * (product(d_out, v, NT, log_sum.dtype) - shared[:, None]) * scale


def _visible(i: Array, num_queries: int, first: Array, last: Array) -> Bool[Array, "t s"]:
    query = (i * num_queries + jnp.arange(num_queries, dtype=jnp.int32))[:, None]
    return (first[None] <= query) & (query <= last[None])


@dataclass(frozen=True)
class _Programs:
    """Launches a kernel, with a program for each block of a query head's queries or of a key/value head's keys."""

    rows: int
    num_tokens: int
    kv_heads: int
    shared: int  # query heads per key/value head
    values: int  # per head
    wide: Any
    tile: Tile
    by_keys: bool

    @classmethod
    def of(cls, q: Queries, *, by_keys: bool) -> "_Programs":
        rows, num_tokens, kv_heads, shared, values = q.shape
        wide, tile = jnp.promote_types(q.dtype, jnp.float32), TILES[min(4, q.dtype.itemsize)]
        return cls(rows, num_tokens, kv_heads, shared, values, wide, tile, by_keys)

    @property
    def head_dim(self) -> int:
        return max(SMALLEST_HEAD_DIM, pl.next_power_of_2(self.values))

    def __call__(
        self,
        kernel: Callable[..., None],
        num_products: int,
        inputs: Sequence[tuple[str, Array]],
        runs: QueryRuns,
        results: Sequence[tuple[str, Any]],
    ) -> Any:
        """Runs the kernel. `inputs` are pairs of a kind and an array, `results` are pairs of a kind and a dtype."""
        needed = visible_blocks(runs, self.tile.queries, self.tile.keys)
        neighbor_ids, num_neighbors = neighbors(needed.swapaxes(1, 2) if self.by_keys else needed)
        specs, shapes = self._specs(neighbor_ids.shape[2]), self._shapes()
        outputs = pl.pallas_call(
            partial(kernel, self.tile, self.values**-0.5),
            grid=(neighbor_ids.shape[1], 1 if self.by_keys else self.shared, self.kv_heads, self.rows),
            in_specs=[specs[name] for name in ("others", "number", *(name for name, _ in inputs), "runs", "runs")],
            out_specs=[specs[name] for name, _ in results],
            out_shape=[jax.ShapeDtypeStruct(shapes[name], dtype) for name, dtype in results],
            compiler_params=plgpu.CompilerParams(num_warps=self.tile.warps, num_stages=STAGES),
            cost_estimate=causal_cost(num_products, [x for _, x in inputs], self.tile.keys),
        )(neighbor_ids, num_neighbors[..., None], *(self._padded(name, x) for name, x in inputs), *runs)
        return tuple(
            x if name == "numbers" else x[..., : self.values] for (name, _), x in zip(results, outputs, strict=True)
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        tokens = self.rows, self.num_tokens, self.kv_heads
        return {
            "queries": (*tokens, self.shared, self.head_dim),
            "keys": (*tokens, self.head_dim),
            "numbers": (self.rows, self.kv_heads, self.shared, self.num_tokens),
        }

    def _specs(self, most_others: int) -> dict[str, pl.BlockSpec]:
        """Returns the part of each kind of array that a program receives: its own block, or all of the other side."""
        queries, keys, tokens, values = self.tile.queries, self.tile.keys, self.num_tokens, self.head_dim
        specs = {
            "others": pl.BlockSpec((None, None, most_others), lambda i, r, h, b: (b, i, 0)),
            "number": pl.BlockSpec((None, None, 1), lambda i, r, h, b: (b, i, 0)),
        }
        if self.by_keys:
            return specs | {
                "keys": pl.BlockSpec((None, keys, None, values), lambda j, r, h, b: (b, j, h, 0)),
                "runs": pl.BlockSpec((None, keys), lambda j, r, h, b: (b, j)),
                "queries": pl.BlockSpec((None, tokens, None, self.shared, values), lambda j, r, h, b: (b, 0, h, 0, 0)),
                "numbers": pl.BlockSpec((None, None, self.shared, tokens), lambda j, r, h, b: (b, h, 0, 0)),
            }
        return specs | {
            "keys": pl.BlockSpec((None, tokens, None, values), lambda i, r, h, b: (b, 0, h, 0)),
            "runs": pl.BlockSpec((None, tokens), lambda i, r, h, b: (b, 0)),
            "queries": pl.BlockSpec((None, queries, None, None, values), lambda i, r, h, b: (b, i, h, r, 0)),
            "numbers": pl.BlockSpec((None, None, None, queries), lambda i, r, h, b: (b, h, r, i)),
        }

    def _padded(self, name: str, x: Array) -> Array:
        missing = 0 if name == "numbers" else self.head_dim - self.values
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, missing)]) if missing else x
