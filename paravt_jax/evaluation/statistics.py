"""Means and confidence intervals of scores.

Questions on one video are not independent, so the bootstrap resamples whole videos.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Float

from rollout.seeds import derived_seed

NUM_DRAWS = 2000
CONFIDENCE = 0.95


def mean_over(scores: Sequence[float | int], strata: Sequence[Hashable]) -> float:
    """The mean over strata of each stratum's mean."""
    sums, counts = _sums(scores, [0] * len(scores), strata)
    return float(_mean_of_means(sums, counts)[0])


def interval(
    scores: Sequence[float | int], clusters: Sequence[Hashable], strata: Sequence[Hashable]
) -> tuple[float, float]:
    """The bootstrap interval of `mean_over`, resampling clusters with replacement."""
    sums, counts = _sums(scores, clusters, strata)
    random = np.random.default_rng(derived_seed("bootstrap", 0))
    num_clusters = len(sums)
    times = random.multinomial(num_clusters, np.full(num_clusters, 1 / num_clusters), NUM_DRAWS)
    drawn = _mean_of_means(times @ sums, (times @ counts).astype(float))
    low, high = np.nanquantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def pass_at(num: int, num_right: int, k: int) -> float:
    """The probability that at least one of `k` of `num` episodes, drawn without replacement, is right."""
    return 1 - math.comb(num - num_right, k) / math.comb(num, k)


def _sums(
    scores: Sequence[float | int], clusters: Sequence[Hashable], strata: Sequence[Hashable]
) -> tuple[Float[np.ndarray, "C S"], Float[np.ndarray, "C S"]]:
    """Sums of scores and their counts, by cluster and stratum."""
    rows, columns = _numbers(clusters), _numbers(strata)
    shape = (max(rows) + 1, max(columns) + 1)
    sums, counts = np.zeros(shape), np.zeros(shape)
    np.add.at(sums, (rows, columns), np.asarray(scores, float))
    np.add.at(counts, (rows, columns), 1.0)
    return sums, counts


def _mean_of_means(sums: Float[np.ndarray, "C S"], counts: Float[np.ndarray, "C S"]) -> Float[np.ndarray, " C"]:
    """The mean over the strata that were drawn."""
    drawn = counts > 0
    return (sums / np.maximum(counts, 1)).sum(-1) / drawn.sum(-1)


def _numbers(names: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]
