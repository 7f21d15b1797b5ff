"""Products of two tiles in a kernel, by the axis of each that is summed over."""

from typing import Any

from jax import lax
from jaxtyping import Array, Float

NN, NT, TN = ((((a,), (b,)), ((), ())) for a, b in ((1, 0), (1, 1), (0, 0)))  # a @ b, a @ b.T, a.T @ b


def product(a: Float[Array, "_ _"], b: Float[Array, "_ _"], axes: Any, wide: Any) -> Float[Array, "_ _"]:
    """Summed up in the dtype `wide`, whatever those of the factors are."""
    return lax.dot_general(a, b, axes, preferred_element_type=wide)
