"""The learning rate over a run, by hand."""

import pytest

from paravt_jax.learner.optim import learning_rate
from paravt_jax.learner.settings import OptimConfig


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.0),
        (1, 4.0),  # 8 * 1 / 2
        (2, 8.0),  # the warm-up of 0.2 * 10 steps is over
        (4, 6.8284271),  # 8 * (1 + cos(pi / 4)) / 2
        (6, 4.0),  # half of the eight steps that are left
        (10, 0.0),
        (11, 0.0),
    ],
)
def test_warm_up_and_cosine_by_hand(step, rate):
    config = OptimConfig(learning_rate=8.0, schedule="cosine", warmup_frac=0.2)
    assert learning_rate(config, step, 10) == pytest.approx(rate)


def test_a_constant_rate_stays_after_its_warm_up():
    config = OptimConfig(learning_rate=8.0, warmup_frac=0.2)
    assert [learning_rate(config, step, 10) for step in (1, 2, 9, 99)] == [4.0, 8.0, 8.0, 8.0]
    assert learning_rate(OptimConfig(learning_rate=8.0), 0, 10) == 8.0
