"""Products of two tiles in a kernel, named by the axes that they sum over, and a kernel's cost."""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

NN, NT, TN = ((((a,), (b,)), ((), ())) for a, b in ((1, 0), (1, 1), (0, 0)))  # a @ b, a @ b.T, a.T @ b
FORWARD, BY_QUERIES, BY_KEYS = 2, 3, 4  # number of products per pair of blocks in the kernel of this name


def product(a: Float[Array, "_ _"], b: Float[Array, "_ _"], axes: Any, wide: Any) -> Float[Array, "_ _"]:
    """Multiplies two matrices and accumulates in the dtype `wide`."""
    return lax.dot_general(a, b, axes, preferred_element_type=wide)


def causal_cost(num_products: int, arrays: Sequence[Array], block_tokens: int) -> pl.CostEstimate:
    """Estimates a kernel's cost for the compiler, as if every row were one causal sequence.

    Rows of several sequences cost less. The first array has the queries, grouped by key/value head.
    """
    rows, num_tokens, kv_heads, shared, values = arrays[0].shape
    pairs = rows * kv_heads * shared * num_tokens * (num_tokens + block_tokens) // 2
    num_bytes = sum(array.size * array.dtype.itemsize for array in arrays)
    return pl.CostEstimate(flops=2 * num_products * values * pairs, transcendentals=pairs, bytes_accessed=num_bytes)
