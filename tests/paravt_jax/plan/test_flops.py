"""FLOPs of traced programs, by hand arithmetic."""

import jax
import jax.numpy as jnp
import pytest

from model_port.attention import gpu, tpu
from model_port.attention.rule import QueryRuns
from paravt_jax.plan.flops import product_flops

X, W = jax.ShapeDtypeStruct((3, 5), jnp.float32), jax.ShapeDtypeStruct((5, 5), jnp.float32)
ONE = 2 * 3 * 5 * 5


def flops(function) -> float:
    return product_flops(jax.jit(function).trace(X, W).jaxpr.jaxpr)


@pytest.mark.parametrize(
    ("function", "num_products"),
    [
        (lambda x, w: x @ w, 1),
        (lambda x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, length=7)[0], 7),
        (lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x, x), 2),
    ],
    ids=["a product", "each step of a scan", "the largest branch"],
)
def test_matrix_products_have_two_flops_per_multiplication(function, num_products):
    assert flops(function) == num_products * ONE


def test_a_data_dependent_loop_has_the_mean_trip_count_of_a_causal_row():
    def rows(x, w):
        def block(i):
            return jax.lax.fori_loop(0, i + 1, lambda _, x: x @ w, x)

        return jax.lax.map(block, jnp.arange(11))

    assert flops(rows) == (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10 + 11) * ONE


def test_recomputation_counts():
    def loss(x, w):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w), policy=None)(x))

    assert flops(jax.grad(loss)) > flops(loss) + 2 * ONE


@pytest.mark.parametrize("kernel", [gpu, tpu], ids=["gpu", "tpu"])
def test_attention_kernels_cost_nine_products_per_visible_pair(kernel):
    """Two forward; backward, three by queries and four by keys."""
    rows, tokens, heads, shared, values = 2, 4096, 2, 4, 128
    q, k = (jax.ShapeDtypeStruct((rows, tokens, heads, *more), jnp.bfloat16) for more in ((shared, values), (values,)))
    ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    numbers = jax.ShapeDtypeStruct((rows, heads, shared, tokens), jnp.float32)

    def both(q, k, ids, numbers):
        runs = QueryRuns(ids, ids)
        return kernel.forward(q, k, k, runs), kernel.backward(q, k, k, runs, numbers, numbers, q)

    flops = product_flops(jax.make_jaxpr(both)(q, k, ids, numbers).jaxpr)
    causal_pairs = rows * heads * shared * tokens**2 / 2
    assert flops == pytest.approx(9 * 2 * values * causal_pairs, rel=0.15)  # blocks on the diagonal are whole
