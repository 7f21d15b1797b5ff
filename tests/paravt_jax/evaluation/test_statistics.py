"""Means, intervals and pass@k, by hand."""

import pytest

from paravt_jax.evaluation.statistics import interval, mean_over, pass_at


def test_strata_have_equal_weight():
    assert mean_over([1, 1, 1, 0], ["a", "a", "a", "b"]) == 0.5  # (3/3 + 0/1) / 2
    assert mean_over([1, 1, 1, 0], [""] * 4) == 0.75


def test_an_interval_is_over_videos_and_not_over_questions():
    scores = [1.0, 1.0, 0.0, 0.0] * 50
    alone = interval(scores, range(200), [""] * 200)
    together = interval(scores, [n // 50 for n in range(200)], [""] * 200)  # half of each video's questions are right
    one_sided = interval(sorted(scores), [n // 50 for n in range(200)], [""] * 200)  # videos all right or all wrong
    assert alone == pytest.approx((0.43, 0.57), abs=0.01)  # 1.96 · sqrt(0.25 / 200) = 0.069
    assert together[1] - together[0] < alone[1] - alone[0] < one_sided[1] - one_sided[0]
    assert one_sided == (0, 1)


def test_an_interval_of_strata_keeps_the_mean_of_means():
    low, high = interval([1.0] * 90 + [0.0] * 10, range(100), ["large"] * 90 + ["small"] * 10)
    assert low == high == 0.5  # resampling keeps 1 and 0; resamples without the small stratum give 1 but are rare


def test_the_same_scores_have_the_same_interval():
    scores = [n % 7 / 7 for n in range(50)], range(50), [""] * 50
    assert interval(*scores) == interval(*scores)


def test_pass_at_k_counts_draws_without_replacement():
    assert pass_at(4, 1, 1) == 0.25 and pass_at(4, 1, 4) == 1 and pass_at(4, 0, 4) == 0
    assert pass_at(4, 2, 2) == pytest.approx(5 / 6)  # all pairs but the wrong one
