import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model_port.layers import Compute, LayerNorm, RMSNorm, run_layers, split


@pytest.fixture
def stack():
    norm = RMSNorm((5, 8), 1e-6)
    norm.scale[...] = 0.5 + jnp.arange(40.0).reshape(5, 8) / 40
    return norm


def outputs(layers, x, **compute):
    """The last carry, the layers' indices, and the gradient of x."""

    def run(x):
        last, indices = run_layers(layers, lambda layer, n, x: (layer(x), jnp.asarray(n)), x, Compute(**compute))
        return last.sum(), (last, indices)

    gradient, (last, indices) = jax.grad(run, has_aux=True)(x)
    return last, indices, gradient


@pytest.mark.parametrize("sizes", [[1] * 5, [1, 1, 2, 1], [5], [3, 2]])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_split_layers_compute_the_same(stack, sizes, remat):
    x = jnp.linspace(-1.0, 2.0, 8)[None]
    expected = outputs(stack, x, remat=remat)
    for got, want in zip(outputs(split(stack, sizes), x, remat=remat), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert expected[1].tolist() == [0, 1, 2, 3, 4]


def test_a_norm_of_bfloat16_rounds_only_its_result():
    x = 1 + jax.random.normal(jax.random.key(0), (3, 4096), jnp.bfloat16)
    for norm in (RMSNorm((4096,), 1e-6), LayerNorm((4096,))):
        exact = norm(x.astype(jnp.float32))
        np.testing.assert_allclose(norm(x).astype(jnp.float32), exact, rtol=2**-8)


def test_split_takes_the_parameters_out_of_the_stack(stack):
    whole = weakref.ref(stack.scale.get_value())
    parts = split(stack, [2, 3])
    gc.collect()
    assert not nnx.to_flat_state(nnx.state(stack, nnx.Param)) and whole() is None
    assert [part.scale.shape for part in parts] == [(2, 8), (3, 8)]
