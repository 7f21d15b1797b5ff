"""The numbers of a certificate at their limits, by hand."""

import pytest

from paravt_jax.config import SINGLE_TURN_MODES
from paravt_jax.data.splits import SPLITS
from paravt_jax.evaluation.certificate import as_released, scored, why_refused
from paravt_jax.evaluation.sample_log import SampleResult


def sample(*scores, missing=False):
    episodes = tuple({"missing": missing, "reason": "video", "scores": {"strict": score}} for score in scores)
    return SampleResult("0", "0", "a.mp4", "mcq", {}, "", episodes)


@pytest.mark.parametrize(
    ("answered", "rows", "reason"),
    [
        (10, 10, ""),
        (9, 10, "9 of 10 samples: 1 not run"),
        (10, 11, "10 of 10 samples: 1 not run, the run has 11 rows"),
    ],
)
def test_a_headline_needs_exactly_the_published_samples(answered, rows, reason):
    counts = {"answered": answered, "unanswered": 0, "expected": 10, "rows": rows, "missing": {}}
    assert why_refused(counts | {"not_played": rows - answered}) == reason


@pytest.mark.parametrize(
    ("expected", "rows", "score"), [(None, 3, 1 / 3), (None, 6, 1 / 6), (10, 6, 0.1), (2, 2, 1 / 3)]
)
def test_rows_without_a_record_count_as_wrong_like_missing_samples(expected, rows, score):
    results = [sample(1.0), sample(0.0), sample(1.0, missing=True)]  # the last score does not count
    scores = scored(None, results, {"expected": expected, "rows": rows}, "strict", "")
    assert scores["score"] == 0.5 and scores["missing_as_wrong"] == pytest.approx(score)


def test_a_score_at_a_threshold_reaches_it():
    scores = scored(SPLITS["charades"], [sample(0.5, 0.5), sample(0.7, 0.3)], {"expected": 2, "rows": 2}, "strict", "")
    assert (scores["R@0.3"], scores["R@0.5"], scores["R@0.7"]) == (1, 1, 0)
    assert (scores["avg@2"], scores["pass@2"]) == (0.5, 1)  # an episode with 0.5 is right


@pytest.mark.parametrize("mode", SINGLE_TURN_MODES)
def test_the_releases_mean_iou_excludes_replies_that_stop_its_driver(mode):
    def window(score=0.0, malformed="", reason=""):
        episode = {"missing": bool(reason), "reason": reason, "scores": {"release": score}, "malformed": malformed}
        return SampleResult("0", "0", "a.mp4", "tvg", {}, "", (episode,))

    results = [
        window(0.5),
        window(malformed="the call has no arguments"),
        window(reason="empty"),
        window(reason="video"),
    ]
    assert as_released(results, {}, mode) == 0.25  # of the first and the empty one
