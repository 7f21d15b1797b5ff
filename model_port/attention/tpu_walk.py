"""The order in which a TPU kernel visits the unmasked pairs of blocks, and the array layout that it needs.

The pairs of a row are a list in scalar memory, in which the pairs of a block are consecutive. A grid step computes one
pair, whose inputs are prefetched during the previous step. The grid is as long as the longest list, so masked pairs
cost no loads, and idle steps only occur in rows with shorter lists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int

from model_port.attention.flash import even_blocks, neighbors, visible_blocks
from model_port.attention.products import causal_cost
from model_port.attention.rule import Queries, QueryRuns

LANES = 128  # a head's values are padded to a multiple of this
BLOCK_TOKENS = 512  # maximum for keys; with smaller blocks, the list of a 131,072-token row overflows scalar memory
BLOCK_STEP = 256  # block sizes are multiples of this, so that a block of queries can be half as long
TILE_QUERIES = 2048  # maximum over all heads that share a key; the scores of a tile then take 4 MiB
VMEM_BYTES = 48 * 2**20  # the backward pass holds several tiles of scores; chips have 64 MiB or more


def block_tokens(num_tokens: int, queries_per_key: int) -> int:
    return even_blocks(num_tokens, BLOCK_TOKENS, BLOCK_STEP)


@dataclass(frozen=True)
class Pair:
    """One pair of blocks: its position in the list, and its mask."""

    first_query: Array
    begins: Array  # True for the first pair of a block
    works: Array  # True for a pair of this row's list, False for padding
    ends: Array  # True for the last pair of a block
    num_queries: int  # per head
    scale: float

    def visible(self, runs: Any, lanes: int) -> Bool[Array, "s r"]:
        first, last = (runs[...].T[:, side : side + 1] for side in (0, 1))
        head_queries = self.first_query + lax.broadcasted_iota(jnp.int32, (1, self.num_queries), 1)
        query = jnp.tile(head_queries, (1, lanes // self.num_queries))
        return (first <= query) & (query <= last)


@dataclass(frozen=True)
class Walk:
    """Launches a kernel over all unmasked pairs of blocks, grouped by the block of queries or of keys."""

    rows: int
    num_tokens: int
    kv_heads: int
    shared: int  # query heads per key/value head
    values: int  # per head
    wide: Any
    runs: QueryRuns
    by_keys: bool

    @classmethod
    def of(cls, q: Queries, runs: QueryRuns, *, by_keys: bool) -> "Walk":
        rows, num_tokens, kv_heads, shared, values = q.shape
        wide = jnp.promote_types(q.dtype, jnp.float32)
        return cls(rows, num_tokens, kv_heads, shared, values, wide, runs, by_keys)

    @property
    def head_dim(self) -> int:
        return self.values + -self.values % LANES

    @property
    def keys(self) -> int:
        """The number of keys per block."""
        return block_tokens(self.num_tokens, self.shared)

    @property
    def queries(self) -> int:
        return self.keys // 2 if self.shared * self.keys > TILE_QUERIES else self.keys

    @property
    def lanes(self) -> int:
        return self.shared * self.queries

    @property
    def num_others(self) -> int:
        """The maximum number of pairs of one block."""
        return self.num_tokens // (self.queries if self.by_keys else self.keys)

    @property
    def most_pairs(self) -> int:
        return self.num_tokens // self.queries * (self.num_tokens // self.keys)

    def __call__(
        self,
        kernel: Callable[..., None],
        num_products: int,
        inputs: Sequence[tuple[str, Array]],
        results: Sequence[tuple[str, Any]],
        keeps: Sequence[tuple[int, ...]],
    ) -> Any:
        """Runs the kernel. `inputs` and `results` pair a kind with an array or dtype; `keeps` has scratch shapes."""
        specs, shapes, (pairs, counts) = self._specs(), self._shapes(), self._pairs()
        outputs = pl.pallas_call(
            partial(self._run, kernel),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(self.rows, self.kv_heads, counts.max()),
                in_specs=[*(specs[name] for name, _ in inputs), specs["runs"]],
                out_specs=[specs[name] for name, _ in results],
                scratch_shapes=[pltpu.VMEM(shape, self.wide) for shape in keeps],
            ),
            out_shape=[jax.ShapeDtypeStruct(shapes[name], dtype) for name, dtype in results],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
            ),
            cost_estimate=causal_cost(num_products, [x for _, x in inputs], self.keys),
        )(pairs, counts, *(self._laid_out(name, x) for name, x in inputs), jnp.stack(self.runs, axis=1))
        return tuple(self._given_back(name, x) for (name, _), x in zip(results, outputs, strict=True))

    def _pairs(self) -> tuple[Int[Array, " pairs"], Int[Array, " B"]]:
        """Returns the pairs of each row and their number. A pair is one integer, `own * num_others + other`.

        Every block has at least one pair, so that its output is written. Lists are padded by repeating the last pair.
        """
        needed = visible_blocks(self.runs, self.queries, self.keys)
        needed = needed.swapaxes(1, 2) if self.by_keys else needed
        needed = needed.at[:, :, 0].set(needed[:, :, 0] | ~needed.any(axis=2))
        order, counts = neighbors(needed.reshape(self.rows, -1))
        step = jnp.minimum(jnp.arange(self.most_pairs)[None], counts[:, None] - 1)
        return jnp.take_along_axis(order, step, axis=1).reshape(-1), counts

    def _at(self, pairs: Any, row: Any, step: Any) -> tuple[Array, Array]:
        pair = pairs[row * self.most_pairs + step]
        return lax.div(pair, self.num_others), lax.rem(pair, self.num_others)

    def _run(self, kernel: Callable[..., None], pairs: Any, counts: Any, *refs: Any) -> None:
        row, step = pl.program_id(0), pl.program_id(2)
        previous, following = jnp.maximum(step - 1, 0), jnp.minimum(step + 1, self.most_pairs - 1)
        own, other = self._at(pairs, row, step)
        kernel(
            Pair(
                first_query=(other if self.by_keys else own) * self.queries,
                begins=(step == 0) | (own != self._at(pairs, row, previous)[0]),
                works=step < counts[row],
                ends=(step == counts[row] - 1) | (own != self._at(pairs, row, following)[0]),
                num_queries=self.queries,
                scale=self.values**-0.5,
            ),
            *refs,
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        heads = self.rows, self.kv_heads
        return {
            "queries": (*heads, self.shared, self.num_tokens, self.head_dim),
            "keys": (*heads, self.num_tokens, self.head_dim),
            "numbers": (*heads, self.num_tokens // self.queries, 1, self.lanes),
        }

    def _specs(self) -> dict[str, pl.BlockSpec]:
        def block(shape: tuple[int | None, ...], index: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
            def at(row: Any, head: Any, step: Any, pairs: Any, counts: Any) -> tuple[Any, ...]:
                own, other = self._at(pairs, row, step)
                return index(row, head, *((other, own) if self.by_keys else (own, other)))

            return pl.BlockSpec(shape, at)

        return {
            "queries": block(
                (None, None, self.shared, self.queries, self.head_dim), lambda b, h, i, j: (b, h, 0, i, 0)
            ),
            "keys": block((None, None, self.keys, self.head_dim), lambda b, h, i, j: (b, h, j, 0)),
            "numbers": block((None, None, None, 1, self.lanes), lambda b, h, i, j: (b, h, i, 0, 0)),
            "runs": block((None, 2, self.keys), lambda b, h, i, j: (b, 0, j)),
        }

    def _laid_out(self, name: str, x: Array) -> Array:
        """Moves the token and value axes to the end, where they become a tile's lines and lanes."""
        if name == "numbers":
            return jnp.moveaxis(x.reshape(*x.shape[:3], -1, self.queries), 2, 3).reshape(self._shapes()[name])
        return jnp.moveaxis(jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, self.head_dim - self.values)]), 1, -2)

    def _given_back(self, name: str, x: Array) -> Array:
        if name == "numbers":
            blocks = x.reshape(self.rows, self.kv_heads, -1, self.shared, self.queries)
            return jnp.moveaxis(blocks, 2, 3).reshape(self.rows, self.kv_heads, self.shared, self.num_tokens)
        return jnp.moveaxis(x, -2, 1)[..., : self.values]
