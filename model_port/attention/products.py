"""Products of two tiles in a kernel, by the axis of each that is summed over, and what all of them cost."""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

NN, NT, TN = ((((a,), (b,)), ((), ())) for a, b in ((1, 0), (1, 1), (0, 0)))  # a @ b, a @ b.T, a.T @ b
FORWARD, BY_QUERIES, BY_KEYS = 2, 3, 4  # products of a pair of blocks, in the kernel of that name


def product(a: Float[Array, "_ _"], b: Float[Array, "_ _"], axes: Any, wide: Any) -> Float[Array, "_ _"]:
    """Summed up in the dtype `wide`, whatever those of the factors are."""
    return lax.dot_general(a, b, axes, preferred_element_type=wide)


def causal_cost(
    num_products: int, *, num_heads: int, num_tokens: int, block_tokens: int, values: int, arrays: Sequence[Array]
) -> pl.CostEstimate:
    """What a compiler cannot see of a kernel, with rows of one causal sequence each: those of several cost less.

    `num_heads` are those of all rows, `values` those of a head.
    """
    pairs = num_heads * num_tokens * (num_tokens + block_tokens) // 2
    num_bytes = sum(array.size * array.dtype.itemsize for array in arrays)
    return pl.CostEstimate(flops=2 * num_products * values * pairs, transcendentals=pairs, bytes_accessed=num_bytes)
