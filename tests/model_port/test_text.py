"""Pieces of the language tower that have a gradient of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_port.layers import gated_silu


@pytest.mark.slow
def test_gated_silu_has_the_gradient_of_its_formula(float64):
    random = np.random.default_rng(2)
    gate, up, weight = (jnp.asarray(random.standard_normal((2, 5, 7)) * 3) for _ in range(3))
    by_hand = jax.grad(lambda gate, up: jnp.sum(gated_silu(gate, up) * weight), argnums=(0, 1))(gate, up)
    by_rule = jax.grad(lambda gate, up: jnp.sum(gate / (1 + jnp.exp(-gate)) * up * weight), argnums=(0, 1))(gate, up)
    for got, expected in zip(by_hand, by_rule, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)
