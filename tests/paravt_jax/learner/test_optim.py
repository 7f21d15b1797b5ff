"""The learning rate over a run, and the optimizer, by hand."""

import jax
import numpy as np
import pytest

from paravt_jax.learner.optim import OptimNumbers, learning_rate, optimizer
from paravt_jax.learner.settings import OptimConfig


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.0),
        (1, 4.0),  # 8 * 1 / 2
        (2, 8.0),  # the warm-up of 0.05 * 42 steps is over
        (12, 6.8284271),  # 8 * (1 + cos(pi / 4)) / 2
        (22, 4.0),  # half of the forty steps that are left
        (42, 0.0),
        (43, 0.0),
    ],
)
def test_warm_up_and_cosine_by_hand(step, rate):
    config = OptimConfig(learning_rate=8.0, schedule="cosine")
    assert learning_rate(config, step, 42) == pytest.approx(rate)


def test_a_constant_rate_has_no_warm_up():
    assert [learning_rate(OptimConfig(learning_rate=8.0), step, 42) for step in (0, 1, 99)] == [8.0, 8.0, 8.0]


def test_two_updates_by_hand():
    """The first gradient has a norm of 5 and is clipped to 1, the second has 0.5."""
    adam, weights = optimizer(OptimNumbers(learning_rate=0.1, weight_decay=0.5, max_grad_norm=1.0)), np.array([2.0, -1])
    state, update = adam.init(weights), jax.jit(adam.update)
    for gradient in ([3.0, 4.0], [0.3, 0.4]):
        change, state = update(np.array(gradient), state, weights)
        weights = weights + np.asarray(change)
    # first 2 − 0.1 · (1 + 0.5 · 2) = 1.8 and −1 − 0.1 · (1 − 0.5) = −1.05; then, with the clipped 0.6 and 0.3,
    # (0.09 · 0.6 + 0.1 · 0.3) / 0.19 over √((0.000999 · 0.36 + 0.001 · 0.09) / 0.001999) = 0.9321796, the same for 0.8
    expected = [1.8 - 0.1 * (0.9321796 + 0.9), -1.05 - 0.1 * (0.9321796 - 0.525)]
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
