"""The learning rate over a run, by hand."""

import pytest

from paravt_jax.learner.optim import learning_rate
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
